"""Drafters propose tokens. Where the target's own draws accept them, a drafter changes the speed, never the tokens."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from importlib import import_module

from outrider.plans import host_drafters, manifest
from outrider.plugins.native import NgramMemory
from outrider.runtime.drafters.base import HostDrafter
from outrider.runtime.drafters.memories import Memories

__all__ = ["HostDrafter", "make_host_drafter", "make_memories"]


def make_host_drafter(settings: host_drafters.HostDrafter) -> HostDrafter:
    """A fresh drafter for one sequence, as the plan describes it: that of the module of its kind."""
    drafter: HostDrafter = import_module(f"{__name__}.{settings.kind}").make(settings)
    return drafter


def make_memories(drafters: Iterable[manifest.Drafter]) -> dict[str, Memories]:
    """Empty memories by the names of the drafters that have one, for all sequences of a runtime to share."""
    return {
        each.name: Memories(partial(NgramMemory, each.memory, each.max_context), each.max_context)
        for each in drafters
        if isinstance(each, host_drafters.NgramDrafter) and each.memory
    }
