"""The measurements of serving, on a toy plan: figures, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.tools.lab.serving import __main__ as serving
from tests.conftest import HELD_OUT

PROMPTS = ("--prompts", str(HELD_OUT), "--threads", "1")


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert serving.main([*arguments, *PROMPTS, "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_hits(toy_plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--length", "80", "--shares", "50,90", "--new", "6", "--count", "2", "--drafters", "none,head")
    rows = report(capsys, "hits", str(toy_plan), *sizes)["rows"]
    assert [(row["drafter"], row["share"], row["reused"]) for row in rows] == [  # type: ignore[attr-defined]
        ("none", 50, 40),
        ("none", 90, 72),
        ("head", 50, 39),
        ("head", 90, 71),
    ]
    for row in rows:  # type: ignore[attr-defined]
        assert row["same_tokens"]
        assert row["warm_ms"] > 0
        assert row["match_and_insert"] > 0
    assert serving.main(["hits", str(toy_plan), *sizes, *PROMPTS]) == 0
    assert "warm/cold" in capsys.readouterr().out


@pytest.mark.long
def test_routing(branch_plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--conversations", "4", "--turns", "4", "--first", "16", "--message", "8", "--new", "12")
    found = report(capsys, "routing", str(branch_plan), *sizes)
    assert found["same_answers"]
    assert [row["requests"] for row in found["rows"]] == [16, 16]  # type: ignore[attr-defined]
    assert 0 < found["ratio"] < 1  # type: ignore[operator]
    assert serving.main(["routing", str(branch_plan), "--turns", "9", *PROMPTS]) == 2
    assert "and the plan's context is 160" in " ".join(capsys.readouterr().err.split())


def test_load(branch_plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--length", "60", "--new", "6", "--reps", "1", "--waves", "2", "--at-once", "3", "--drafters", "ngram")
    rows = report(capsys, "load", str(branch_plan), *sizes)["rows"]
    assert [row["mode"] for row in rows] == ["one by one", "in-one-sequence", "batching"]  # type: ignore[attr-defined]
    for row in rows:  # type: ignore[attr-defined]
        assert row["same_tokens"]
        assert row["tokens_per_second"] > 0
        assert row["gap_max_ms"] is None or row["gap_max_ms"] >= row["gap_p50_ms"] > 0
    assert serving.main(["load", str(branch_plan), *sizes, *PROMPTS, "--compare-overlap"]) == 0
    printed = capsys.readouterr().out
    assert "one by one" in printed
    assert "batching, text first" in printed


def test_load_of_a_plan_that_serves_one_at_a_time(toy_plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--length", "40", "--new", "6", "--reps", "1", "--waves", "2", "--at-once", "1,3", "--drafters", "ngram")
    rows = report(capsys, "load", str(toy_plan), *sizes)["rows"]
    assert [(row["at_once"], row["mode"], row["same_tokens"]) for row in rows] == [  # type: ignore[attr-defined]
        (1, "one by one", True),
        (1, "one at a time", True),
        (3, "one by one", True),
        (3, "one at a time", True),
    ]


def test_what_cannot_be_measured_is_refused(toy_plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert serving.main(["hits", str(toy_plan), "--drafters", "oracle", *PROMPTS]) == 2
    assert "--drafters names 'oracle'" in capsys.readouterr().err


@pytest.mark.long
def test_memory_of_actors(branch_plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ray")
    assert serving.main(["memory", str(branch_plan), "--length", "40", "--new", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(row["actors"], row["actor"]) for row in found["rows"]] == [(1, 1), (2, 1), (2, 2)]
    assert 0 < found["added"] < 1.5
