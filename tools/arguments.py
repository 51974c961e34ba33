"""Types of command-line arguments that several tools have."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from plans.errors import RequestError


def at_least_1(text: str) -> int:
    """A whole number, for `add_argument`'s `type`."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def counts(text: str) -> list[int]:
    """Whole numbers with commas between them, likewise."""
    return [at_least_1(word.strip()) for word in text.split(",")]


def drafters_named(asked: str | None, known: Iterable[str]) -> list[str]:
    """The drafters of `--drafters NAME,...`, of which "none" is one; all of them by default.

    Raises `RequestError` for a name that is not `known`.
    """
    names = ["none", *known]
    chosen = names if asked is None else asked.split(",")
    if wrong := [name for name in chosen if name not in names]:
        raise RequestError(f"--drafters names {wrong[0]!r}; the plan has {', '.join(names)}.")
    return chosen
