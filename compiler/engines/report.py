"""How builders of engines say what they are at."""

from __future__ import annotations

from collections.abc import Callable

Report = Callable[[str], None]
"""Told what long work is at."""
