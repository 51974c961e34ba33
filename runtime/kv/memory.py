"""Memory that holds KV, a row of a KV cache or the pages of a pool: slots are copied from any to any other."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class KvMemory(Protocol):
    """KV `[planes, heads, slots, size]`, in memory of the host or of a device (`runtime.backends.device_kv`)."""

    @property
    def slots(self) -> int:
        """Number of slots."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot, all planes and heads together."""

    def copy(self, to: int, source: KvMemory, first: int, count: int) -> None:
        """Copy `count` slots of `source` from `first` on to here, from `to` on; the two may overlap.

        On a device it is enqueued behind what is enqueued already.
        """

    def array(self, first: int, count: int) -> NDArray[Any]:
        """`count` slots from `first` on for the host to read, `[planes, heads, count, size]`."""


class HostKv:
    """KV in an array of the host, `[planes, heads, slots, size]`."""

    def __init__(self, kv: NDArray[Any]) -> None:
        self._kv = kv
        planes, heads, self.slots, size = kv.shape
        self.slot_bytes = planes * heads * size * kv.itemsize

    def copy(self, to: int, source: KvMemory, first: int, count: int) -> None:
        self._kv[:, :, to : to + count] = source.array(first, count)

    def array(self, first: int, count: int) -> NDArray[Any]:
        return self._kv[:, :, first : first + count]


def host_kv(planes: int, heads: int, slots: int, size: int, dtype: Any) -> KvMemory:
    """New memory of the host, of zeros."""
    return HostKv(np.zeros((planes, heads, slots, size), dtype))
