"""The contract of drafters: how a session keeps one in step with its sequence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.execution.step import TargetStep


class Drafter(Protocol):
    """Proposes tokens for one branch.

    Ownership: the drafter owns what it knows of the sequence and, where it has one, its arena; nobody else writes
    them. Whatever it proposes, the output is the target's. The calls of a generation:

        resume, then per target pass: (begin | absorb), the pass, follow

    What runs ahead says `suppose(length)` before passes whose tokens may be taken back, and `truncate(length)` and
    `suppose(None)` when they are.

    and `observe` for each token committed in between, where `filler_top_k` asks for it.
    """

    @property
    def filler_top_k(self) -> int:
        """How many of the target's likeliest tokens it wants to see of each token committed; 0 for none."""

    @property
    def scores(self) -> NDArray[np.float32] | None:
        """Log-probabilities of the last draft's nodes, summed from the tip, node 0; None where it knows none."""

    @property
    def trials(self) -> NDArray[np.float64] | None:
        """`(r, p / q)` of the last draft's nodes, NaN where the target did not come to; None where nothing rejects."""

    @property
    def entropy(self) -> float | None:
        """Of the last draft's first distribution, over that of the uniform one; None where it decides nothing."""

    def rounds(self, length: int, step: TargetStep) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Lay out every size of round with it that a sequence of `length` tokens may come to, one after another.

        Of each, the name of the program that would run, and the models whose sizes it runs with. Only for devices that
        record rounds: steps have buckets.
        """

    def truncate(self, length: int) -> None:
        """The sequence now has `length` tokens, those before them unchanged."""

    def suppose(self, length: int | None) -> None:
        """Tokens from `length` on are not certain: nothing is learned from them. None: they are gone
        again, and what was seen of them."""

    def resume(self, tokens: Sequence[int], rows: int, passes: int) -> int:
        """A generation with this drafter begins at `tokens`; how many of the target's `rows` may stay for it.

        The target computes those behind that number again. `passes` counts the target's passes: what those between
        the last `follow` and now have overwritten is lost.
        """

    def begin(self, tokens: Sequence[int], step: TargetStep, limit: int) -> str | None:
        """Prepare to draft at most `limit` tokens (1 or more) behind the tip of `tokens`.

        Returns the program that is to run, None to decode plainly. `step` holds the pending tokens, the tip last.
        """

    def absorb(self, tokens: Sequence[int]) -> None:
        """Take in what the last pass left: a pass without this drafter is about to replace it."""

    def observe(self, index: int, likely: NDArray[np.int64]) -> None:
        """Token `index` of the sequence has been chosen; `likely` are the target's likeliest there, best last."""

    def follow(self, start: int, rows: int, kept: NDArray[np.int64] | None, passes: int) -> None:
        """A pass has given the sequence `rows` rows from `start` on: the step's first, or those that `kept` lists."""


class HostDrafter(Drafter, Protocol):
    """A drafter that computes on the host, called as a program's first stage."""

    def foresee(self, tokens: Sequence[int], limit: int) -> int:
        """How many nodes `draft` would write behind `tokens`."""

    def draft(self, limit: int, token_ids: NDArray[np.int64], parent: NDArray[np.int64], root: int) -> int:
        """Write at most `limit` nodes of a draft tree whose root, the tip, is node `root`; return how many.

        `token_ids` and `parent`, int64 [nodes], are the step's arrays, which several trees may share. The nodes go
        to indices root + 1, root + 2, ...; `parent` holds indices into the same arrays, ancestors come before
        descendants, and siblings are distinct tokens. Nothing else of the arrays is touched. The caller has
        room for `limit` nodes behind the root.
        """
