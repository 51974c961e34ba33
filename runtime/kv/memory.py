"""Memory that holds KV, a row of a KV cache or the pages of a pool: slots are copied from any to any other."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

_LINE = 64  # bytes
_PAGE = 4096  # bytes, the smallest that systems hand out
_MAPPED = 2**20  # bytes from which on memory is worth pages of its own


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

        On a device it is enqueued after what is enqueued already.
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


def host_kv(planes: int, heads: int, slots: int, size: int, dtype: DTypeLike, *, huge_pages: bool = True) -> KvMemory:
    """New memory of the host, of zeros; with huge pages the system hands it out now, not to the first that writes."""
    memory = zeros((planes, heads, slots, size), dtype, huge_pages=huge_pages)
    if huge_pages:
        memory.reshape(-1).view(np.uint8)[::_PAGE] = 0
    return HostKv(memory)


def zeros(shape: Sequence[int], dtype: DTypeLike, *, huge_pages: bool = True) -> NDArray[Any]:
    """Zeros aligned to a cache line, so that no load of a kernel's widest vector spans two. Raises MemoryError.

    NumPy asks the system for huge pages. The slots of a token lie apart, one in every plane and head, so that a short
    sequence already touches most of the huge pages of a KV cache; without `huge_pages` it takes what it writes.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.zeros(size + _LINE, np.uint8) if huge_pages or size < _MAPPED else _small_pages(size + _LINE)
    start = -memory.ctypes.data % _LINE
    return memory[start : start + size].view(dtype).reshape(shape)


def _small_pages(size: int) -> NDArray[np.uint8]:
    if not hasattr(mmap, "MAP_PRIVATE"):  # a system with other calls, and no huge pages unless asked
        return np.zeros(size, np.uint8)
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(str(error)) from None
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.uint8)
