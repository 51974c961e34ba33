"""`python -m outrider.runtime branches`: what it prints, and what it refuses."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from outrider import Runtime
from outrider.runtime.__main__ import main
from outrider.runtime.cli import branches as branch_command

Captured = pytest.CaptureFixture[str]
OPTIONS = ("--max-new-tokens", "9", "--ignore-eos", "--threads", "1", "--drafter", "head")


def found_in_python(plan: Path, **options: object) -> list[str]:
    runtime = Runtime.load(plan, threads=1)
    shared = {"max_new_tokens": 9, "ignore_eos": True, "drafter": "head"}
    return [result.text for result in runtime.generate_branches("import", **shared, **options)]


@pytest.mark.parametrize("mode", ["in-one-sequence", "batching"])
def test_json_has_every_branch_and_what_it_cost(branch_plan: Path, mode: str, capsys: Captured) -> None:
    arguments = ["branches", str(branch_plan), "--prompt", "import", "--branch", " os", "--branch", " sys"]
    assert main([*arguments, *OPTIONS, "--mode", mode, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [branch["text"] for branch in found["branches"]] == found_in_python(branch_plan, branches=[" os", " sys"])
    assert found["stats"]["new_tokens"] == 18
    assert (found["stats"]["bytes_copied"] > 0) or mode != "batching"


def test_samples_differ_and_are_printed_in_order(branch_plan: Path, capsys: Captured) -> None:
    arguments = ["branches", str(branch_plan), "--prompt", "import", "--n", "3", "--temperature", "1", *OPTIONS]
    arguments += ["--seed", "0"]
    expected = found_in_python(branch_plan, n=3, temperature=1.0, seed=0)
    assert len(set(expected)) > 1
    for more in ([], ["--stream"]):
        assert main([*arguments, *more]) == 0
        captured = capsys.readouterr()
        assert captured.out == "".join(f"{text}\n" for text in expected)
        assert "branch 2, 'sample 2' (length):" in captured.err
        assert "27 tokens in" in captured.err


def test_on_a_terminal_they_grow_side_by_side(branch_plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = StringIO()
    console = Console(file=screen, force_terminal=True, width=100, height=40)
    monkeypatch.setattr(branch_command, "stdout", console)
    arguments = ["branches", str(branch_plan), "--prompt", "import", "--branch", " os", "--branch", " sys", "--stream"]
    assert main([*arguments, *OPTIONS]) == 0
    shown = screen.getvalue()
    assert "0: os" in shown
    assert "1: sys" in shown
    assert "length" in shown
    assert shown.index("0: os") < shown.index("1: sys")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--n", "2"), "Greedy samples are all the same"),
        (("--branch", "a", "--max-parallel", "17"), "max_parallel is 17"),
    ],
)
def test_what_cannot_be_served_is_refused(
    branch_plan: Path, arguments: tuple[str, ...], said: str, capsys: Captured
) -> None:
    assert main(["branches", str(branch_plan), "--prompt", "import", *OPTIONS, *arguments]) == 2
    assert said in capsys.readouterr().err
