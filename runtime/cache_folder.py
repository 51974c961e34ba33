"""The user's cache folder: what a machine found out, that another would find out again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return our part of `XDG_CACHE_HOME`, or of `~/.cache`. Raises `RuntimeError` where there is no home."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (cache if cache.is_absolute() else Path.home() / ".cache") / "outrider"
