"""Which sizes steps are rounded up to."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from outrider.compiler.buckets import batch_buckets, view_buckets
from outrider.plans.plan import Plan


@given(st.sampled_from([16, 128]), st.integers(1, 2**20))
def test_views_are_at_most_half_again_as_large_as_the_keys_in_them(least: int, most: int) -> None:
    views = view_buckets(least, most)
    assert list(views) == sorted(set(views))
    assert views[-1] == most
    assert all(view % least == 0 for view in views[:-1])
    for smaller, larger in pairwise(views):
        assert larger <= max(1.5 * smaller, smaller + least)
    assert len(views) <= 2 * max((most // least).bit_length(), 1) + 1


def test_a_plan_has_them_where_devices_record(cuda_plan: Plan, toy_plan: Path) -> None:
    targets = cuda_plan.manifest.backends
    assert targets["onnxruntime-cpu"].buckets == {}
    assert not json.loads((toy_plan / "plan.json").read_text())["backends"]["onnxruntime-cpu"]["buckets"]
    buckets = targets["onnxruntime-cuda"].buckets
    assert buckets["target"].new == (1, 2, 3, 4, 5, 6, 7, 9, 12)
    assert buckets["target"].view == (128, 256)
    assert buckets["chain"].new == buckets["bushy"].new == (1, 2)
    assert buckets["head"].new == (1, 2, 3, 4, 5, 6, 7)  # a head computes all that was accepted again


def test_batches_are_those_of_the_field() -> None:
    assert batch_buckets(1) == ()
    assert batch_buckets(7) == (2, 4, 7)
    assert batch_buckets(27) == (2, 4, 8, 16, 24, 27)
