"""Commands as processes: standard streams that are closed, full or of another encoding, and Ctrl-C."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
TEXT = "print('café', 'naïve', 'café', 'na"  # what the toy's n-grams repeat


def run(arguments: Sequence[object], redirected: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """`python -m outrider.ARGUMENTS`, its streams as the shell has them `redirected`."""
    command = [sys.executable, "-m", f"outrider.{arguments[0]}", *map(str, arguments[1:])]
    return subprocess.run(
        ["sh", "-c", f'exec "$0" "$@" {redirected}', *command], env=os.environ | environment, capture_output=True,
        text=True, encoding="utf-8", errors="surrogateescape", timeout=120,
    )  # fmt: skip


@pytest.mark.parametrize(("redirected", "reason"), [(">/dev/full", "No space left"), (">&-", "Bad file descriptor")])
@pytest.mark.parametrize("command", [["runtime", "--help"], ["compiler", "inspect", "--json"]])
def test_output_that_cannot_be_written_is_one_sentence_and_status_1(
    toy_plan: Path, command: list[str], redirected: str, reason: str
) -> None:
    ended = run([*command, toy_plan] if "inspect" in command else command, redirected)
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"error: standard output cannot be written: {reason}")
    assert len(ended.stderr.splitlines()) == 1


def test_a_closed_standard_error_costs_no_output(toy_plan: Path) -> None:
    ended = run(["compiler", "inspect", toy_plan], "2>&-")
    assert ended.returncode == 0
    assert "3 layers" in ended.stdout
    assert run(["compiler", "inspect", toy_plan / "none"], "2>/dev/full").returncode == 2


def test_a_closed_standard_input_is_refused(toy_plan: Path) -> None:
    ended = run(["runtime", "generate", toy_plan, "--prompt-file", "-"], "<&-")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "Bad file descriptor" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_input_that_is_no_utf_8_is_refused(toy_plan: Path, tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes("café\n".encode("latin-1"))
    for command, status in (["chat", toy_plan], 0), (["generate", toy_plan, "--prompt-file", "-"], 2):
        ended = run(["runtime", *command], f"<{tmp_path / 'latin'}", PYTHONUTF8="0", LC_ALL="C.UTF-8")
        assert ended.returncode == status  # a conversation continues without the line
        assert "UTF-8" in ended.stderr.upper()
        assert "Traceback" not in ended.stderr


def test_a_locale_without_accents_takes_and_prints_them(toy_plan: Path, tmp_path: Path) -> None:
    """Prompts are UTF-8 everywhere; JSON escapes what the locale cannot hold, and so does text."""
    (tmp_path / "prompt").write_text(TEXT, encoding="utf-8")
    (tmp_path / "é").symlink_to(toy_plan)
    options = ("--max-new-tokens", 24, "--ignore-eos")
    expected = json.loads(run(["runtime", "generate", toy_plan, "--prompt", TEXT, "--json", *options]).stdout)
    found = run(["runtime", "generate", tmp_path / "é", "--prompt", TEXT, "--json", *options], **ASCII)
    assert found.stdout.isascii()
    assert json.loads(found.stdout)["text"] == expected["text"]
    assert not expected["text"].isascii()
    printed = run(["runtime", "generate", toy_plan, "--prompt-file", "-", *options], f"<{tmp_path / 'prompt'}", **ASCII)
    assert printed.returncode == 0
    assert printed.stdout == expected["text"].encode("ascii", "backslashreplace").decode() + "\n"


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("module", ["runtime", "compiler", "tools.bench", "tools.lab.serving"])
def test_an_interrupt_while_importing_ends_the_command_quietly(module: str, tmp_path: Path) -> None:
    """All import rich, which interrupts the importing process here."""
    (tmp_path / "rich").mkdir()
    (tmp_path / "rich" / "__init__.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n", encoding="utf-8"
    )
    ended = run([module, "--help"], PYTHONPATH=str(tmp_path))
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "interrupted\n")
