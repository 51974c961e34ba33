"""Types of command-line arguments that several tools have."""

from __future__ import annotations

import argparse


def at_least_1(text: str) -> int:
    """A whole number, for `add_argument`'s `type`."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)
