"""`tools.lab.context` on a toy plan: figures of every mode, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from outrider.plans import names
from outrider.runtime.execution.program import Program
from outrider.tools.lab import context as command
from tests.conftest import HELD_OUT


@pytest.fixture
def context(long_plan: Path, output: Callable[..., str]) -> Callable[..., str]:
    sizes = ("--prompts", HELD_OUT, "--threads", 1, "--new", 20, "--reps", 1, "--keep-drafting")
    return lambda *more, plan=long_plan, status=0: output(command.main, plan, *sizes, *more, status=status)


def test_a_row_for_every_length_drafter_mode_and_budget(context: Callable[..., str]) -> None:
    report = json.loads(context("--lengths", "5,90", "--drafters", "chain,none", "--budgets", "1,auto", "--json"))
    cases = [("off", None), ("lossless", 1), ("lossless", "auto"), ("lossy", 1), ("lossy", "auto")]
    assert {(r["context"], r["drafter"], (r["mode"], r["budget"])) for r in report["rows"]} == {
        *product((5, 90), ("chain", "none"), cases)
    }
    for row in report["rows"]:
        partial = row["context"] == 90 and row["mode"] != "off"
        assert (row["partial_rounds"] > 0) == (row["verify_partial_ms"] is not None) == partial
        assert min(row["verify_full_ms"], row["tokens_per_second"]) > 0
        assert (row["agreement"] is None) == (row["tentative"] == 0)
        assert row["same"] == 1.0 or row["mode"] == "lossy"
        assert row["speedup"] == 1.0 or row["mode"] != "off"
        assert row["speedup_least"] <= row["speedup"] <= row["speedup_most"]
    assert report["partial_kv"]["n_retrieval_blocks"] == 3
    alone = ("--lengths", "90", "--drafters", "ngram", "--modes", "lossy")
    assert " lossy " in context(*alone)
    (row,) = json.loads(context(*alone, "--json"))["rows"]
    assert row["same"] is row["speedup"] is None  # there is nothing to compare it with


def test_times_after_random_rows_need_no_prefill(context: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    ran, run = set(), Program.run
    monkeypatch.setattr(Program, "run", lambda self: (ran.add(self.name), run(self))[1])
    arguments = ("--lengths", "60,120", "--drafters", "none", "--modes", "off,lossy", "--random-rows", "--json")
    rows = json.loads(context(*arguments))["rows"]
    assert ran
    assert names.PREFILL not in ran
    assert [(row["context"], row["partial_rounds"] > 0) for row in rows] == [*product((60, 120), (False, True))]


def test_what_cannot_be_measured_is_refused(context: Callable[..., str], toy_plan: Path) -> None:
    for option, value, said in (
        ("--modes", "fast", "--modes names 'fast'; the modes are lossless, lossy, off"),
        ("--budgets", "1,4", "--budgets has 4; the plan has room for 3 blocks"),
        ("--drafters", "other", "--drafters names 'other'; the plan has"),
        ("--lengths", "150", "--lengths has 150; beside --new 20 the context leaves 140"),
    ):
        assert said in context(option, value, status=2)
    assert "has no partial KV cache; build it with partial_kv.enabled" in context(plan=toy_plan, status=2)
