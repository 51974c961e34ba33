"""Measurements after long contexts and of serving, on a toy plan: figures, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from outrider.plans import names
from outrider.runtime.execution.program import Program
from outrider.tools.lab import context as command
from outrider.tools.lab.serving import __main__ as serving
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


PROMPTS = ("--prompts", HELD_OUT, "--threads", 1)


def test_hits(toy_plan: Path, output: Callable[..., str], report: Callable[..., Any]) -> None:
    sizes = ("--length", 80, "--shares", "50,90", "--new", 6, "--count", 2, "--drafters", "none,head", *PROMPTS)
    rows = report(serving.main, "hits", toy_plan, *sizes)["rows"]
    assert [(row["drafter"], row["share"], row["reused"]) for row in rows] == [
        ("none", 50, 40), ("none", 90, 72), ("head", 50, 39), ("head", 90, 71),
    ]  # fmt: skip
    assert all(row["same_tokens"] and row["warm_ms"] > 0 and row["match_and_insert"] > 0 for row in rows)
    assert "warm/cold" in output(serving.main, "hits", toy_plan, *sizes)
    said = output(serving.main, "hits", toy_plan, "--drafters", "oracle", *PROMPTS, status=2)
    assert "--drafters names 'oracle'" in said


@pytest.mark.long
def test_routing(branch_plan: Path, output: Callable[..., str], report: Callable[..., Any]) -> None:
    sizes = ("--conversations", 4, "--turns", 4, "--first", 16, "--message", 8, "--new", 12)
    found = report(serving.main, "routing", branch_plan, *sizes, *PROMPTS)
    assert found["same_answers"]
    assert [row["requests"] for row in found["rows"]] == [16, 16]
    assert 0 < found["ratio"] < 1
    said = output(serving.main, "routing", branch_plan, "--turns", 9, *PROMPTS, status=2)
    assert "and the plan's context is 160" in said


def test_load(branch_plan: Path, toy_plan: Path, output: Callable[..., str], report: Callable[..., Any]) -> None:
    sizes = ("--new", 6, "--reps", 1, "--waves", 2, "--drafters", "ngram", *PROMPTS)
    own = ("--length", 60, "--at-once", 3)
    rows = report(serving.main, "load", branch_plan, *sizes, *own)["rows"]
    assert [row["mode"] for row in rows] == ["one by one", "in-one-sequence", "batching"]
    for row in rows:
        assert row["same_tokens"]
        assert row["tokens_per_second"] > 0
        assert row["gap_max_ms"] is None or row["gap_max_ms"] >= row["gap_p50_ms"] > 0
    assert "against one by one" in output(serving.main, "load", branch_plan, *sizes, *own)
    rows = report(serving.main, "load", toy_plan, *sizes, "--length", 40, "--at-once", "1,3")["rows"]
    assert [(row["at_once"], row["mode"]) for row in rows] == [*product((1, 3), ("one by one", "one at a time"))]
    assert all(row["same_tokens"] for row in rows)


@pytest.mark.long
def test_memory_of_actors(branch_plan: Path, report: Callable[..., Any]) -> None:
    pytest.importorskip("ray")
    found = report(serving.main, "memory", branch_plan, "--length", 40, "--new", 4)
    assert [(row["actors"], row["actor"]) for row in found["rows"]] == [(1, 1), (2, 1), (2, 2)]
    assert 0 < found["added"] < 1.5
