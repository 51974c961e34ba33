"""Offline batches: `OutriderPredictor` for Ray Data, and what `python -m outrider.runtime batch` runs."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.runtime.batch.predictor import OutriderPredictor

__all__ = ["OutriderPredictor"]


def __getattr__(name: str) -> object:
    """Imported when it is asked for: the command's help needs none of it."""
    if name == "OutriderPredictor":
        from outrider.runtime.batch.predictor import OutriderPredictor

        return OutriderPredictor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
