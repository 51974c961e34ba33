"""A preallocated pool of pages for KV that outlives the sequence it was computed for.

A page has room for the KV of some tokens in every model of the plan: that of target and drafters stays together. Each
page belongs to one run of tokens, or is free. Which run that is, and when it is freed, is up to the prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike

from outrider.runtime.kv.memory import KvMemory, host_kv
from outrider.runtime.kv.state import Snapshot

PAGE = 16  # tokens: a run wastes half a page on average at its end, and a copy moves some KiB at once


@dataclass(frozen=True)
class TokenShape:
    """Shape of a token's KV in a model: keys and values of all layers, `planes` of them, in `heads` heads with
    slots of `size` elements."""

    planes: int
    heads: int
    size: int
    dtype: DTypeLike

    @property
    def nbytes(self) -> int:
        return self.planes * self.heads * self.size * np.dtype(self.dtype).itemsize


Allocate = Callable[[int, int, int, int, DTypeLike], KvMemory]
"""Makes memory for KV: planes, heads, slots, elements of a slot, and their type."""


class PagePool:
    """Memory of `pages` pages, allocated once. Not thread-safe: the owner holds the lock."""

    def __init__(self, shapes: Mapping[str, TokenShape], pages: int, allocate: Allocate = host_kv) -> None:
        self.shapes, self.pages = dict(shapes), pages
        self._kv = {
            model: allocate(shape.planes, shape.heads, pages * PAGE, shape.size, shape.dtype)
            for model, shape in shapes.items()
        }
        self._free = list(range(pages - 1, -1, -1))  # descending: low pages go first, so that runs lie together

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return self.pages * self.page_bytes(self.shapes)

    @staticmethod
    def page_bytes(shapes: Mapping[str, TokenShape]) -> int:
        return PAGE * sum(shape.nbytes for shape in shapes.values())

    @property
    def free(self) -> Sequence[int]:
        return self._free

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages, which must be free."""
        assert count <= len(self._free), "more pages than are free"
        cut = len(self._free) - count
        taken = self._free[cut:][::-1]
        del self._free[cut:]
        return taken

    def release(self, pages: Sequence[int]) -> None:
        """Give pages back."""
        self._free += pages
        self._free.sort(reverse=True)

    def copy(self, page: int, to: int) -> None:
        """Copy a page with the KV of all models."""
        for kv in self._kv.values():
            kv.copy(to * PAGE, kv, page * PAGE, PAGE)

    def memory(self, model: str) -> KvMemory:
        """The memory of all pages' KV of a model."""
        return self._kv[model]

    @staticmethod
    def pieces(run: PageRun, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield the run's tokens `[start, stop)` in as few pieces as their KV lies in: the first token, its slot in the
        pages' memory, and how many.
        """
        while start < stop:
            place, inside = divmod(run.offset + start, PAGE)
            first, end = run.pages[place], place + 1
            most = stop - start + inside
            while (end - place) * PAGE < most and run.pages[end] == run.pages[end - 1] + 1:
                end += 1
            count = min(most, (end - place) * PAGE) - inside
            at = first * PAGE + inside
            yield start, at, count
            start += count


class PageRun:
    """The KV of a run of tokens: that of `pages`, from token `offset` of the first one on.

    `valid` says of each model how many leading tokens have KV: a drafter that was not asked has none. `states` are
    those of the target after some of the tokens, by how many of these; their records are of tokens of the run.
    """

    def __init__(self, pool: PagePool, pages: list[int], length: int, valid: dict[str, int]) -> None:
        self._pool, self.pages, self.offset, self._length, self.valid = pool, pages, 0, length, valid
        self.states: dict[int, Snapshot] = {}

    def __len__(self) -> int:
        return self._length

    @staticmethod
    def pages_for(length: int) -> int:
        return -(-length // PAGE)

    def split(self, at: int) -> PageRun:
        """As `radix_tree.Value`; a page in which both parts have KV is copied, to one that must be free."""
        place, inside = divmod(self.offset + at, PAGE)
        upper = PageRun(
            self._pool, self.pages[: place + (inside > 0)], at, {m: min(count, at) for m, count in self.valid.items()}
        )
        upper.offset = self.offset
        upper.states = {after: each.cut(each.base - after + at) for after, each in self.states.items() if after <= at}
        self.states = {after - at: state for after, state in self.states.items() if after > at}
        if inside:
            (page,) = self._pool.allocate(1)
            self._pool.copy(self.pages[place], page)
            self.pages = [*self.pages[:place], page, *self.pages[place + 1 :]]  # who reads may still have the old one
        self.pages, self.offset, self._length = self.pages[place:], inside, self._length - at
        self.valid = {model: max(0, count - at) for model, count in self.valid.items()}
        return upper
