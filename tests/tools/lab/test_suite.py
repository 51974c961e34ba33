"""Where the tests' time goes: sums by test, file and fixture, of all processes."""

from __future__ import annotations

import json
from pathlib import Path

from outrider.tools.lab.suite import tables


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
