"""Drafters propose tokens. Where the target's own draws accept them, a drafter changes the speed, never the tokens."""

from __future__ import annotations

from plans import manifest
from runtime.drafters.base import HostDrafter
from runtime.drafters.ngram import NgramDrafter

__all__ = ["HostDrafter", "make_host_drafter"]


def make_host_drafter(settings: manifest.NgramDrafter) -> HostDrafter:
    """A fresh drafter for one sequence, as the plan describes it. Raises PlanError for settings out of limits."""
    return NgramDrafter(
        settings.max_context,
        settings.min_context,
        settings.max_draft,
        settings.min_confidence,
        settings.filler_top_k,
        name=settings.name,
    )
