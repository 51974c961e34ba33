"""The modes of branches side by side: figures, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from outrider.compiler.build import build
from outrider.compiler.recipe import load_recipe
from outrider.tools.lab import modes
from tests.conftest import HELD_OUT

PLAN = [
    "drafters=[{name: ngram, kind: ngram, max_draft: 4}, {name: chain, kind: model, checkpoint: drafter, gamma: 3}]",
    "capacity={context: 160, prefill_chunk: 32, branches: 4, batching: true}",
]
SIZES = ("--prefix", 40, "--new", 8, "--reps", 2, "--prompts", HELD_OUT, "--threads", 1)


@pytest.fixture(scope="module")
def plan(toy_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("modes") / "plan"
    build(load_recipe(toy_recipe, PLAN), toy_recipe, out)
    return out


def test_every_mode_is_measured_with_the_same_tokens(plan: Path, output: Any, report: Callable[..., Any]) -> None:
    rows = report(modes.main, plan, *SIZES, "--branches", "2,4")["rows"]
    assert [(row["branches"], row["drafter"], row["mode"]) for row in rows] == [
        *product((2, 4), ("none", "ngram", "chain"), ("in-one-sequence", "batching", "one by one"))
    ]
    assert all(row["same_tokens"] and row["ms_per_token"] > 0 for row in rows)
    for row in rows:
        if row["mode"] == "one by one":
            assert (row["speedup"], row["kv_bytes"], row["rounds"]) == (1.0, None, None)
            continue
        assert 0 < row["state_and_mask"] < row["host_share"] < 1
        if row["drafter"] == "none" and row["branches"] == 2:  # of four, one begins a pass after the others
            slot, copies = 3 * 2 * 2 * 16 * 4, int(row["mode"] == "batching")
            assert (row["bytes_copied"], row["rounds"]) == (copies * 40 * slot, 8)
            assert row["kv_bytes"] == (40 * (1 + copies) + 2 * (12 + 8 - 1)) * slot
    assert "one by one" in output(modes.main, plan, *SIZES, "--drafters", "none", "--branches", "2")


def test_what_the_plan_cannot_do_is_refused(plan: Path, toy_plan: Path, output: Callable[..., str]) -> None:
    for option, value, said in (
        ("--branches", "5", "--branches is 5; the plan serves at most 4"),
        ("--drafters", "none,oracle", "--drafters names 'oracle'; the plan has none, ngram, chain"),
        ("--prefix", "1000", "--prefix is 1000; pass 1 to 140"),
    ):
        assert said in output(modes.main, plan, *SIZES, option, value, status=2)
    assert "capacity.branches" in output(modes.main, toy_plan, *SIZES, status=2)
