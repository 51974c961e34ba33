"""Memories of past outputs, one for each owner."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from outrider.plugins.native import NgramMemory

_MOST = 8  # owners


class Memories:
    """A drafter's memories of past outputs, one for each owner. Thread-safe.

    At most `_MOST` owners have one; the least recently used is dropped. An owner is "tenant/cache_salt": a tenant with
    several memories loses one of its own first.
    """

    def __init__(self, make: Callable[[], NgramMemory], max_context: int) -> None:
        """Each memory is made for contexts of up to `max_context` tokens."""
        self._make, self.max_context = make, max_context
        self._by_owner: OrderedDict[str, NgramMemory] = OrderedDict({"": make()})
        self._lock = threading.Lock()

    def get(self, owner: str) -> NgramMemory | None:
        """The owner's memory, if there is one."""
        with self._lock:
            if owner in self._by_owner:
                self._by_owner.move_to_end(owner)
            return self._by_owner.get(owner)

    def get_or_create(self, owner: str) -> NgramMemory:
        """The owner's memory, a new one if there is none."""
        with self._lock:
            if owner not in self._by_owner:
                self._by_owner[owner] = self._make()
                if len(self._by_owner) > _MOST:
                    tenant = owner.partition("/")[0]
                    own = [each for each in self._by_owner if each.partition("/")[0] == tenant and each != owner]
                    del self._by_owner[own[0] if own else next(iter(self._by_owner))]
            self._by_owner.move_to_end(owner)
            return self._by_owner[owner]

    @property
    def nbytes(self) -> int:
        """Bytes of all that are kept."""
        with self._lock:
            return sum(memory.nbytes for memory in self._by_owner.values())
