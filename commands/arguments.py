"""Command lines of all commands: a parser that refuses in one sentence, and types of numbers."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from difflib import get_close_matches
from typing import Any, NoReturn

from outrider.plans.errors import UsageError

_INT64_MAX = 2**63 - 1


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that raises `UsageError`, one sentence that names the help, instead of printing its usage.

    Texts, which are arguments without a `type`, are read as UTF-8 in any locale. Paths stay unchanged.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._given: list[str] = []
        self.register("type", None, _as_utf8)

    def add_subparsers(self, **options: Any) -> Any:
        """Add subparsers as the base class does; each command's parser decodes the command's own words."""
        commands = super().add_subparsers(**options)
        commands.type = str
        return commands

    def error(self, message: str) -> NoReturn:
        """Raise `UsageError` with argparse's message and the closest known word.

        Of "argument --count: is '0'; ..." the message keeps only the option's name. An unknown argument is reported
        before missing ones, because it may be a misspelling of one of them.
        """
        said = re.sub(
            r"^argument ([^ ]+): (is )?", lambda found: f"{found[1]} is " if found[2] else f"{found[1]}: ", message
        )
        choice = re.match(r"^([^ ]+): invalid choice: '(.*)' \(choose from (.*)\)$", said, re.DOTALL)
        if choice is not None:
            known = re.findall(r"[^\s',]+", choice[3])
            said = f"{choice[1]} is {_shortened(choice[2])}; choose from {', '.join(known)}{_meant(choice[2], known)}"
        unknown = [word for word in self._given if word.startswith("--") and not self._begins_an_option(word)]
        if "required" in said and unknown:
            said = self._unknown(unknown[0])
        joined = f"{said} See" if said.endswith("?") else f"{said.rstrip('.')}; see"
        raise UsageError(f"{joined} {self.prog} --help")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Raise `UsageError` for unknown arguments in the command's own parser, so that the error names its help."""
        self._given = list(sys.argv[1:] if args is None else args)
        known, others = super().parse_known_args(self._given, namespace)
        if others:
            self.error(self._unknown(others[0]))
        return known, others

    def _begins_an_option(self, word: str) -> bool:
        """Return whether an option begins with `word`."""
        name = word.partition("=")[0]
        return any(option.startswith(name) for option in self._option_string_actions)

    def _unknown(self, word: str) -> str:
        name = word.partition("=")[0]
        meant = _meant(name, self._option_string_actions) if name.startswith("-") else ""
        return f"there is no argument {_shortened(word)}{meant}"


def _meant(word: str, known: Iterable[str]) -> str:
    close = get_close_matches(word, known, n=1, cutoff=0.75)
    return f"; did you mean {close[0]}?" if close else ""


def _as_utf8(word: str) -> str:
    """Return the word that the user typed; bytes unknown to the locale's encoding are lone surrogates in `word`."""
    with suppress(UnicodeError):
        return os.fsencode(word).decode("utf-8")
    return word


def whole_number(least: int = 0, most: int = _INT64_MAX) -> Callable[[str], int]:
    """Return a type for `add_argument`: whole numbers from `least` to `most`, without a sign."""
    limits = f"of at least {least}" if most == _INT64_MAX else f"from {least} to {most}"

    def read(text: str) -> int:
        plain = text.isascii() and text.isdigit() and len(text) <= 20
        if not plain or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"is {_shortened(text)}; pass a whole number {limits}")
        return int(text)

    return read


def number(least: float = -math.inf, most: float = math.inf, *, above: float = -math.inf) -> Callable[[str], float]:
    """Return a type for `add_argument`: finite numbers from `least`, or above `above`, to `most`."""
    limits = [f"above {above:g}"] if above > -math.inf else [f"of at least {least:g}"] if least > -math.inf else []
    limits += [f"at most {most:g}"] if most < math.inf else []

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and least <= value <= most and value > above):
            raise argparse.ArgumentTypeError(
                f"is {_shortened(text)}; pass {' '.join(('a number', ', '.join(limits))).strip()}"
            )
        return value

    return read


at_least_0 = whole_number(0)
at_least_1 = whole_number(1)


def counts(text: str) -> list[int]:
    """Parse whole numbers of at least 1 with commas between them, each once: a type for `add_argument`."""
    return list(dict.fromkeys(at_least_1(word.strip()) for word in text.split(",")))


def _shortened(text: str) -> str:
    return repr(text) if len(text) <= 40 else f"{text[:40]!r}..."
