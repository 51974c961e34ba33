"""The callback for progress of engine builders."""

from __future__ import annotations

from collections.abc import Callable

Report = Callable[[str], None]
"""Called with a text that describes the current phase of long work."""
