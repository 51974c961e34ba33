"""The harness of tools that measure: the order of runs, cases that fail, the time left, figures, cells and sums."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from outrider.plans.errors import OutriderError
from outrider.tools import measuring as harness
from outrider.tools.lab.suite import tables
from outrider.tools.measuring import Column, make_table, measuring, paired_ratios, percentile, run_in_turn, spread

Runs = list[tuple[int, str, int]]


def test_cases_alternate_in_reverse_order_in_every_second_repetition() -> None:
    ran: Runs = []
    begun: list[str] = []

    def run(case: str, item: int, repetition: int) -> int:
        ran.append((repetition, case, item))
        return len(ran)

    found = run_in_turn(["a", "b", "c"], [7, 8], 3, run, begin=begun.append)
    there = ["a", "b", "c"]
    assert ran[:3] == [(0, case, 7) for case in there]  # the warm-up, which does not count
    assert ran[3:] == [
        (repetition, case, item)
        for repetition in (1, 2, 3)
        for item in (7, 8)
        for case in (there if repetition % 2 else there[::-1])
    ]
    assert found["a"] == [4, 7, 12, 15, 16, 19]  # by repetition and item: one index is a pair
    assert [len(results) for results in found.values()] == [6, 6, 6]
    assert (begun[0], begun[-1], len(begun)) == ("warming up a", "repetition 3, prompt 1, c", len(ran))


def test_a_case_that_fails_leaves_and_what_it_names_with_it() -> None:
    def run(case: str, item: int, repetition: int) -> str:
        if repetition == 2 and case == "b" and "c" in left:
            raise OutriderError("c disturbs")
        if case == "d":
            raise OutriderError("d fails")
        return case

    left = {"a", "b", "c", "d"}

    def leave(case: str, item: int, error: OutriderError) -> list[str]:
        gone = ["c"] if "disturbs" in str(error) else [case]
        left.difference_update(gone)
        return gone

    found = run_in_turn(["a", "b", "c", "d"], [0], 2, run, leave=leave)
    assert found == {"a": ["a", "a"], "b": ["b", "b"]}  # b was run again once c had left
    with pytest.raises(OutriderError, match="d fails"):
        run_in_turn(["d"], [0], 1, run)


def test_the_time_left_is_by_the_costs_of_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[Any, ...]] = []
    monkeypatch.setattr(harness, "progress_bar", lambda _: nullcontext(lambda *update: shown.append(update)))
    now = [0.0]
    with measuring([10.0, 30.0, 60.0], clock=lambda: now[0]) as begin:
        for seconds, text in ((0.0, "short"), (1.0, "long"), (8.0, "longest"), (8.0, "more than planned")):
            now[0] = seconds
            begin(text)
    assert shown == [
        (0, 3, "short", None),
        (1, 3, "long", 9.0),
        (2, 3, "longest", 12.0),
        (3, 3, "more than planned", 0.0),
    ]


def test_figures_are_of_the_values_that_there_are() -> None:
    ranked = [float(value) for value in range(1, 101)]
    assert [percentile(ranked, share) for share in (10, 50, 90, 99)] == [10, 50, 90, 99]
    assert [percentile([7.0], share) for share in (10, 99)] == [7.0, 7.0]
    assert percentile([], 50) is None
    assert spread("x", [3.0, None, 1.0, 2.0]) == {"x": 2.0, "x_p10": 1.0, "x_p90": 3.0}
    assert spread("x", [None], (25,)) == {"x": None, "x_p25": None}
    assert paired_ratios([1.0, 10.0], [2.0, 5.0]) == [0.5, 2.0]


def test_cells_are_in_the_form_of_their_column() -> None:
    row = {"name": "a", "ms": 1.25, "missing": None, "same": True}
    columns = [Column("n", "name", text=True), Column("ms", "ms", ".1f", "x"), Column("m", "missing", ".1f", "x")]
    columns += [Column("same", "same"), Column("twice", lambda row: 2 * row["ms"], ".2f")]
    assert [column.cell(row) for column in columns] == ["a", "1.2x", "-", "yes", "2.50"]
    assert make_table(columns, [row]).row_count == 1


def test_seconds_of_all_processes_are_summed_dearest_first(tmp_path: Path) -> None:
    rows = [
        {"phase": "setup", "test": "a.py::one[1]", "clock": 2, "cpu": 1},
        {"phase": "call", "test": "a.py::one[1]", "clock": 4, "cpu": 3},
        {"phase": "call", "test": "a.py::one[2]", "clock": 1, "cpu": 1},
        {"phase": "call", "test": "b.py::two", "clock": 10, "cpu": 9},
        {"fixture": "plan (tests)", "clock": 2, "cpu": 1},
        {"phase": "all", "test": "", "clock": 20, "cpu": 15},
    ]
    for worker, own in enumerate((rows[:2], rows[2:])):
        (tmp_path / f"gw{worker}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in own), encoding="utf-8")
    by_kind = [table.split("\n") for table in "\n".join(tables(tmp_path)).split("\n\n")]
    assert [[line.split() for line in table[1:] if line] for table in by_kind] == [
        [["15.0", "20.0", "1", "all"], ["13.0", "15.0", "3", "call"], ["1.0", "2.0", "0", "setup"]],
        [["9.0", "10.0", "1", "b.py::two"], ["5.0", "7.0", "2", "a.py::one"]],
        [["9.0", "10.0", "1", "b.py"], ["5.0", "7.0", "2", "a.py"]],
        [["1.0", "2.0", "1", "plan", "(tests)"]],
    ]
