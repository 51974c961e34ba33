"""The windows of a model's layers, as a plan has them."""

from __future__ import annotations

from outrider.compiler.models.config import DecoderConfig


def windows_within(config: DecoderConfig, context: int) -> tuple[int, ...]:
    """Return by layer the last tokens that it sees, 0 where that is all of `context` tokens; empty where all do."""
    windows = tuple(window if window is not None and window < context else 0 for window in config.windows)
    return windows if any(windows) else ()
