"""What the parsers of all commands have in common."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module

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
