"""What all commands have in common: their parsers, their standard streams as processes, and Ctrl-C."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest

from outrider.commands.arguments import Parser
from outrider.plans.errors import UsageError

MODULES = {
    **{
        f"outrider.{name}.__main__": f"python -m outrider.{name}"
        for name in ("compiler", "runtime", "tools.bench", "tools.verify", "tools.tune")
    },
    "outrider.runtime.ray_serve.command": "python -m outrider.runtime.ray_serve",
    **{
        f"outrider.tools.lab.{name}": None
        for name in (
            "serving.__main__", "peers.__main__", "faults.__main__", "bundle", "context", "synthetic_pair",
            "train_reference", "gpu.measure", "gpu.prepare", "paired", "reference.pack",
        )
    },
}  # fmt: skip
NEGATIVE = {"--length-penalty", "--presence-penalty", "--frequency-penalty"}  # options that may be below 0


def parsers(module: str, called: str | None) -> Iterator[Parser]:
    """The parser of a module, and those of its commands."""
    make = import_module(module)._parser
    waiting = [make() if called is None else make(called)]
    while waiting:
        parser = waiting.pop()
        yield parser
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                waiting += action.choices.values()


def is_number(action: argparse.Action) -> bool:
    for text in ("7", "0.5"):
        with suppress(argparse.ArgumentTypeError):
            if callable(action.type) and isinstance(action.type(text), int | float):
                return True
    return False


WITHOUT_NUMBERS = ("compiler.__main__", "tools.lab.reference.pack", "tools.lab.gpu.prepare", "tools.lab.gpu.measure")


@pytest.mark.parametrize(("module", "called"), MODULES.items())
def test_every_number_is_refused_where_it_is_none_or_below_0(module: str, called: str | None) -> None:
    found = 0
    for parser in parsers(module, called):
        for action in parser._actions:
            assert action.type not in (int, float), f"{parser.prog} {action.option_strings}: any number is taken"
            if not action.option_strings or not is_number(action):
                continue
            found += 1
            option = action.option_strings[-1]
            for wrong in ("nan", "-1", "1e999", ""):
                if (option, wrong) in {(negative, "-1") for negative in NEGATIVE}:
                    continue
                with pytest.raises(UsageError, match=f"{option} is .*; see {parser.prog} --help"):
                    parser.parse_args([f"{option}={wrong}"])
    assert found or module.removeprefix("outrider.") in WITHOUT_NUMBERS


@pytest.mark.parametrize(("module", "called"), MODULES.items())
def test_help_is_printed_for_every_command_names_it_and_has_an_example(
    module: str, called: str | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")  # so that no line ends within an option
    for parser in parsers(module, called):
        with pytest.raises(SystemExit) as ended:
            parser.parse_args(["--help"])
        assert ended.value.code == 0
        text = " ".join(capsys.readouterr().out.split())
        assert text.startswith(f"usage: {parser.prog}")
        assert "%(prog)s" not in text
        (example,) = re.findall(r"examples?: (.*?)(?:$|; |, then |\. [A-Zp])", text)
        program, called_with = parser.prog.split(), shlex.split(example)
        assert called_with[: len(program)] == program, example
        parser.parse_args(called_with[len(program) :])


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
