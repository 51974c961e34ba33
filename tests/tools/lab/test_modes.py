"""The modes of branches side by side: figures, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.compiler.build import build
from outrider.compiler.recipe import load_recipe
from outrider.tools.lab import modes
from tests.conftest import HELD_OUT

PLAN = [
    "drafters=[{name: ngram, kind: ngram, max_draft: 4}, {name: chain, kind: model, checkpoint: drafter, gamma: 3}]",
    "capacity={context: 160, prefill_chunk: 32, branches: 4, batching: true}",
]
SIZES = ("--prefix", "40", "--new", "8", "--reps", "2", "--prompts", str(HELD_OUT), "--threads", "1")


@pytest.fixture(scope="module")
def plan(toy_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("modes") / "plan"
    build(load_recipe(toy_recipe, PLAN), toy_recipe, out)
    return out


def test_every_mode_is_measured_and_says_the_same(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert modes.main([str(plan), *SIZES, "--branches", "2,4", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    rows = report["rows"]
    assert [(row["branches"], row["drafter"], row["mode"]) for row in rows] == [
        (count, drafter, mode)
        for count in (2, 4)
        for drafter in ("none", "ngram", "chain")
        for mode in ("in-one-sequence", "batching", "one by one")
    ]
    assert all(row["same_tokens"] for row in rows)
    for row in rows:
        assert row["ms_per_token"] > 0
        if row["mode"] == "one by one":
            assert (row["speedup"], row["kv_bytes"], row["rounds"]) == (1.0, None, None)
            continue
        assert 0 < row["state_and_mask"] < row["host_share"] < 1
        copies = row["branches"] - 1 if row["mode"] == "batching" else 0
        if row["drafter"] == "none" and row["branches"] == 2:  # of four, one begins a pass after the others
            slot = 3 * 2 * 2 * 16 * 4
            assert row["bytes_copied"] == copies * 40 * slot
            own = row["branches"] * (12 + 8 - 1)
            assert row["kv_bytes"] == (40 * (1 + copies) + own) * slot
            assert row["rounds"] == 8

    assert modes.main([str(plan), *SIZES, "--drafters", "none"]) == 0
    assert "one by one" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--branches", "5"), "--branches is 5; the plan serves at most 4"),
        (("--drafters", "none,oracle"), "--drafters names 'oracle'; the plan has none, ngram, chain"),
        (("--prefix", "1000"), "--prefix is 1000; pass 1 to 140"),
    ],
)
def test_what_the_plan_cannot_do_is_refused(
    plan: Path, arguments: tuple[str, str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert modes.main([str(plan), *SIZES, *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_plan_of_one_branch_is_refused(toy_plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert modes.main([str(toy_plan), *SIZES]) == 2
    assert "capacity.branches" in capsys.readouterr().err
