"""What proposes tokens for the target. A drafter changes how fast tokens come, never which."""

from __future__ import annotations

from plans import manifest
from runtime.drafters.base import Drafter
from runtime.drafters.ngram import NgramDrafter

__all__ = ["Drafter", "make_drafter"]


def make_drafter(settings: manifest.NgramDrafter) -> Drafter:
    """A fresh drafter for one sequence, as the plan describes it. Raises PlanError for settings out of limits."""
    return NgramDrafter(
        settings.max_context, settings.min_context, settings.max_draft, settings.min_confidence, name=settings.name
    )
