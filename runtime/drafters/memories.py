"""Memories of what generations have put out, parted by whose they are."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from plugins.native import NgramMemory

_MOST = 8  # owners


class Memories:
    """A drafter's memory for each owner that has put out something. Safe to use from several threads.

    Of many owners, those keep theirs that used them last. An owner is a tenant, "/" and what parts its requests: a
    tenant with several memories loses one of its own first.
    """

    def __init__(self, make: Callable[[], NgramMemory]) -> None:
        self._make = make
        self._by_owner: OrderedDict[str, NgramMemory] = OrderedDict({"": make()})
        self._lock = threading.Lock()

    def known(self, owner: str) -> NgramMemory | None:
        """The owner's memory, if there is one."""
        with self._lock:
            if owner in self._by_owner:
                self._by_owner.move_to_end(owner)
            return self._by_owner.get(owner)

    def of(self, owner: str) -> NgramMemory:
        """The owner's memory, made if need be."""
        if (known := self.known(owner)) is not None:
            return known
        made, tenant = self._make(), owner.partition("/")[0]
        with self._lock:
            self._by_owner[owner] = made
            if len(self._by_owner) > _MOST:
                own = [each for each in self._by_owner if each.partition("/")[0] == tenant and each != owner]
                del self._by_owner[own[0] if own else next(iter(self._by_owner))]
            return made

    @property
    def nbytes(self) -> int:
        """Bytes of all that are kept."""
        with self._lock:
            return sum(memory.nbytes for memory in self._by_owner.values())
