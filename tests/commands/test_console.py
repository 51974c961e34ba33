"""Progress says how far the work is, and how long the rest should take."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from outrider.commands import console


def test_lines_of_progress_say_what_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0.0, 100.0, 200.0])
    monkeypatch.setattr(console, "perf_counter", lambda: next(clock))
    with console.progress_bar("measuring") as progress:
        progress(0, 40, "run 1")
        progress(1, 40, "run 2")
        progress(10, 40, "run 3")
        progress(32, 40, "run 4")
    assert capsys.readouterr().err.splitlines() == [
        "measuring: 0 of 40, run 1",
        "measuring: 10 of 40, about 5 min 0 s left, run 3",
        "measuring: 32 of 40, about 50 s left, run 4",
    ]


def test_a_caller_may_know_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Console(file=StringIO(), force_terminal=True, width=100)
    monkeypatch.setattr(console, "stderr", terminal)
    with console.progress_bar("measuring") as progress:
        progress(1, 2, "a long one", left=90.0)
    assert "1 min 30 s" in terminal.file.getvalue()  # type: ignore[attr-defined]
