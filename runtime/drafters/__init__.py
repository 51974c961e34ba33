"""Drafters propose tokens. Where the target's own draws accept them, a drafter changes the speed, never the tokens."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from outrider.plans import manifest
from outrider.plugins.native import NgramMemory
from outrider.runtime.drafters.base import HostDrafter
from outrider.runtime.drafters.memories import Memories
from outrider.runtime.drafters.ngram import NgramDrafter

__all__ = ["HostDrafter", "make_host_drafter", "make_memories"]


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


def make_memories(drafters: Iterable[manifest.Drafter]) -> dict[str, Memories]:
    """Empty memories by the names of the drafters that have one, for all sequences of a runtime to share.

    Raises PlanError for a drafter with settings out of limits.
    """
    memories = {}
    for each in drafters:
        if isinstance(each, manifest.NgramDrafter) and each.memory:
            make_host_drafter(each)  # refuses what no memory can be made for
            memories[each.name] = Memories(partial(NgramMemory, each.memory, each.max_context))
    return memories
