"""Numbers that callers pass: which there are, and how errors show them."""

from __future__ import annotations

from math import isfinite

import numpy as np

_LONGEST = 60  # characters of a value in an error message, as in refusals of requests


def as_real(given: object) -> float | None:
    """The number as a float; None for what is no number, not finite, or more than floats hold."""
    if isinstance(given, bool) or not isinstance(given, int | float | np.integer | np.floating):
        return None
    try:
        number = float(given)
    except OverflowError:
        return None
    return number if isfinite(number) else None


def shown(given: object) -> str:
    """A value as an error message shows it, shortened if it is long."""
    try:
        spelled = repr(given)
    except Exception:  # Python spells no number of more than 4,300 digits; an object of a caller's may raise anything
        return "a number of too many digits" if isinstance(given, int) else f"an object of type {type(given).__name__}"
    return spelled if len(spelled) <= _LONGEST else f"{spelled[:_LONGEST]}..."
