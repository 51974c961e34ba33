"""Command lines: numbers that are refused, and how; and how far the work is, and how long the rest should take."""

from __future__ import annotations

import argparse
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from outrider.commands import console
from outrider.commands.arguments import Parser, at_least_0, at_least_1, counts, number, whole_number
from outrider.plans.errors import UsageError


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (at_least_0, "0", 0), (at_least_1, "12", 12), (whole_number(0, 2**64 - 1), str(2**64 - 1), 2**64 - 1),
        (number(0), "0", 0.0), (number(above=0), "1e-3", 0.001), (number(), "-2.5", -2.5), (counts, "8, 1,8", [8, 1]),
    ],
)  # fmt: skip
def test_numbers_within_their_limits_are_read(read, text: str, value: object) -> None:
    assert read(text) == value


@pytest.mark.parametrize(
    ("read", "texts"),
    [
        (at_least_0, ["-1", "", " ", "1.5", "+1", "1_0", "٣", "x", "9" * 5000, str(2**63)]),
        (at_least_1, ["0", "-0"]),
        (whole_number(0, 65535), ["65536"]),
        (number(0), ["-0.1", "nan", "inf", "-inf", "", "x"]),
        (number(most=1, above=0), ["0", "1.01", "nan"]),
        (number(), ["nan", "inf"]),
        (counts, ["", "1,,2", "1,0", "1,x"]),
    ],
)
def test_numbers_beyond_their_limits_are_refused_with_the_limits(read, texts: list[str]) -> None:
    for text in texts:
        with pytest.raises(argparse.ArgumentTypeError, match=r"^is '.*; pass a (whole )?number"):
            read(text)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--count", "0"], "--count is '0'; pass a whole number of at least 1; see some tool --help"),
        (["--count"], "--count: expected one argument; see some tool --help"),
        (["--mode", "fanzy"], "--mode is 'fanzy'; choose from plain, fancy; did you mean fancy? See some tool --help"),
        (["--zzz"], "there is no argument '--zzz'; see some tool --help"),
        (["--cuont=2"], "there is no argument '--cuont=2'; did you mean --count? See some tool --help"),
        (["ask", "--promt", "x"], "there is no argument '--promt'; did you mean --prompt? See some tool ask --help"),
        (["ask"], "one of the arguments --prompt --prompt-file is required; see some tool ask --help"),
        ([], "the following arguments are required: COMMAND; see some tool --help"),
        (["asks"], "COMMAND is 'asks'; choose from ask; did you mean ask? See some tool --help"),
    ],
)
def test_a_wrong_command_line_is_one_sentence_and_where_help_is(arguments: list[str], sentence: str) -> None:
    parser = Parser(prog="some tool")
    parser.add_argument("--count", type=at_least_1)
    parser.add_argument("--mode", choices=("plain", "fancy"))
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    asked = commands.add_parser("ask").add_mutually_exclusive_group(required=True)
    asked.add_argument("--prompt")
    asked.add_argument("--prompt-file")
    with pytest.raises(UsageError) as refused:
        parser.parse_args(arguments)
    assert str(refused.value) == sentence


def test_texts_are_utf_8_in_every_locale_and_paths_are_what_the_system_has() -> None:
    parser = Parser()
    parser.add_argument("text")
    parser.add_argument_group("files").add_argument("--plan", type=Path)
    parser.add_argument_group("texts").add_argument("--stop", action="append")
    typed = "café".encode().decode("ascii", "surrogateescape")
    found = parser.parse_args([typed, "--plan", typed, "--stop", typed, f"--stop={typed}"])
    assert (found.text, found.plan, found.stop) == ("café", Path(typed), ["café", "café"])
    assert parser.parse_args(["\udce9"]).text == "\udce9"  # no UTF-8 either: the reader of the text says so


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
