"""N-grams where they know how a text goes on, an engine's drafts where they do not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from runtime.drafters.base import Drafter, HostDrafter
from runtime.drafters.graph import EngineDrafter
from runtime.execution.step import TargetStep


class Fallback:
    """Asks `first`, which costs microseconds, and where that foresees fewer than `least` tokens, `then`.

    A round that `first` has is a plain one to `then`: a head takes in what it committed, with a run of its engine. Both
    may also be asked for by name; a session knows them too, and tells them of what happens to the sequence as a whole.
    """

    def __init__(self, first: HostDrafter, then: EngineDrafter, least: int) -> None:
        self._first, self._then, self._least = first, then, least
        self._last: Drafter = first

    @property
    def filler_top_k(self) -> int:
        return self._first.filler_top_k

    @property
    def scores(self) -> NDArray[np.float32] | None:
        return self._last.scores

    @property
    def trials(self) -> NDArray[np.float64] | None:
        return self._last.trials

    @property
    def entropy(self) -> float | None:
        return self._last.entropy

    def rounds(self, length: int, step: TargetStep) -> Iterator[tuple[str, tuple[str, ...]]]:
        yield from self._first.rounds(length, step)
        yield from self._then.extensions(length, 1 + step.max_nodes)

    def truncate(self, length: int) -> None:
        self._first.truncate(length)
        self._then.truncate(length)

    def suppose(self, length: int | None) -> None:
        self._first.suppose(length)
        self._then.suppose(length)

    def resume(self, tokens: Sequence[int], rows: int, passes: int) -> int:
        return self._then.resume(tokens, self._first.resume(tokens, rows, passes), passes)

    def begin(self, tokens: Sequence[int], step: TargetStep, limit: int) -> str | None:
        self._last = self._first
        if self._first.foresee(tokens, limit) < min(self._least, limit):
            program = self._then.begin(tokens, step, limit)
            if program is not None:
                self._last = self._then
                return program
        self._then.absorb(tokens)
        return self._first.begin(tokens, step, limit)

    def absorb(self, tokens: Sequence[int]) -> None:
        self._then.absorb(tokens)

    def observe(self, index: int, likely: NDArray[np.int64]) -> None:
        self._first.observe(index, likely)

    def follow(self, start: int, rows: int, kept: NDArray[np.int64] | None, passes: int) -> None:
        self._then.follow(start, rows, kept, passes)
