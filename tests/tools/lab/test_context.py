"""`tools.lab.context` on a toy plan: figures of every mode, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.plans import names
from outrider.runtime.execution.program import Program
from outrider.tools.lab import context as command
from tests.conftest import HELD_OUT

Captured = pytest.CaptureFixture[str]
SIZES = ("--prompts", str(HELD_OUT), "--threads", "1", "--new", "20", "--reps", "1", "--keep-drafting")


def context(plan: Path, *arguments: str) -> int:
    return command.main([str(plan), *SIZES, *arguments])


def test_a_row_for_every_length_drafter_mode_and_budget(long_plan: Path, capsys: Captured) -> None:
    arguments = ("--lengths", "5,90", "--drafters", "chain,none", "--budgets", "1,auto")
    assert context(long_plan, *arguments, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    rows = report["rows"]
    cases = [("off", None), ("lossless", 1), ("lossless", "auto"), ("lossy", 1), ("lossy", "auto")]
    assert sorted((r["context"], r["drafter"], r["mode"], str(r["budget"])) for r in rows) == sorted(
        (length, drafter, mode, str(budget))
        for length in (5, 90)
        for drafter in ("chain", "none")
        for mode, budget in cases
    )
    for row in rows:
        served = row["context"] == 90 and row["mode"] != "off"
        assert (row["partial_rounds"] > 0) == served
        assert (row["verify_partial_ms"] is not None) == (row["context"] == 90 and row["mode"] != "off")
        assert row["verify_full_ms"] > 0
        assert row["tokens_per_second"] > 0
        assert 0 <= row["refresh_share"] < 1
        assert (row["agreement"] is None) == (row["tentative"] == 0)
        if row["mode"] != "lossy":
            assert row["same"] == 1.0
        if row["mode"] == "off":
            assert row["speedup"] == 1.0
        assert row["speedup_least"] <= row["speedup"] <= row["speedup_most"]
    assert report["partial_kv"]["n_retrieval_blocks"] == 3
    assert context(long_plan, "--lengths", "90", "--drafters", "ngram", "--modes", "lossless") == 0
    assert "lossless" in capsys.readouterr().out
    assert context(long_plan, "--lengths", "90", "--drafters", "ngram", "--modes", "lossy", "--json") == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["same"] is None  # there is nothing to compare it with
    assert row["speedup"] is None


def test_times_behind_random_rows_need_no_prefill(
    long_plan: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran, run = set(), Program.run
    monkeypatch.setattr(Program, "run", lambda self: (ran.add(self.name), run(self))[1])
    arguments = ("--lengths", "60,120", "--drafters", "none", "--modes", "off,lossy", "--random-rows", "--json")
    assert context(long_plan, *arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["random_rows"]
    assert ran
    assert names.PREFILL not in ran
    assert [(row["context"], row["partial_rounds"] > 0) for row in report["rows"]] == [
        (60, False), (60, True), (120, False), (120, True),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--modes", "fast"), "--modes names 'fast'; the modes are lossless, lossy, off"),
        (("--budgets", "1,4"), "--budgets has 4; the plan has room for 3 blocks"),
        (("--drafters", "other"), "--drafters names 'other'; the plan has"),
        (("--lengths", "150"), "--lengths has 150; beside --new 20 the context leaves 140"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    long_plan: Path, arguments: tuple[str, ...], said: str, capsys: Captured
) -> None:
    assert context(long_plan, *arguments) == 2
    assert said in capsys.readouterr().err


def test_a_plan_without_partial_kv_is_refused(toy_plan: Path, capsys: Captured) -> None:
    assert context(toy_plan) == 2
    assert "has no partial KV cache; build it with partial_kv.enabled" in capsys.readouterr().err
