"""What proposes tokens for the target. A drafter changes how fast tokens come, never which."""

from __future__ import annotations

from plans import manifest
from runtime.drafters.base import Drafter, HostDrafter
from runtime.drafters.ngram import NgramDrafter

__all__ = ["Drafter", "HostDrafter", "make_host_drafter"]


def make_host_drafter(settings: manifest.NgramDrafter) -> HostDrafter:
    """A fresh drafter for one sequence, as the plan describes it. Raises PlanError for settings out of limits."""
    return NgramDrafter(
        settings.max_context, settings.min_context, settings.max_draft, settings.min_confidence, name=settings.name
    )
