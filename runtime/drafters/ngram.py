"""Drafts what followed the same words before: counts of what continued every context of the sequence so far.

Source: arXiv 2404.08698 (n-gram assisted speculative decoding); long contexts, trees and a memory of earlier outputs as
in suffix decoding (arXiv 2411.04975). No model runs: a draft costs microseconds, and pays wherever a text repeats
itself (code, summaries, edits, quotations) or others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.plans.host_drafters import NgramDrafter as NgramSettings
from outrider.plugins.native import NgramMemory, Ngrams
from outrider.runtime.sampling import SamplingParams


class NgramDrafter:
    """Counts of the tokens that followed each context of `min_context` to `max_context` tokens.

    The longest context that has been continued before wins: its continuations are drafted, each as likely as it was
    frequent (of equally frequent ones the most recent first), and so on after each of them: a tree, the likeliest node
    first. At a temperature above 0 the continuations run the target's race, by their counts, and each is as likely as
    it is to win. A draft ends at `max_draft` nodes, where no context is known, or where the chance that the target
    reaches a node falls below `min_confidence`.

    That chance is a product of one factor a token: the continuation's share among all of its context's, times what such
    shares have been worth so far after contexts of about that length. Drafts are compared with the tokens that come,
    in rounds of other drafters too.

    With `filler_top_k`, that many of the target's likeliest tokens are kept as well, wherever it chose one: what it
    nearly said once it may say next time. They part continuations that are equally frequent; in a race each weighs a
    tenth of a token that came. A greedy draft is as long as without them: they are no part of a share.

    With a memory (`recall_from`), contexts are looked up in earlier outputs too. Where those have continued a longer
    one than the sequence has, their continuations are drafted, by the same rules; of what was likely the memory holds
    nothing. What its shares have been worth is learned apart, for each sequence anew.

    The counts are native code (`plugins/csrc/cpu/ngram_counts.h`), a suffix automaton: for any `max_context`, at
    most 2 states and 3 edges for each token seen, of 20 and 24 bytes and up to 16 of hash table an edge, and 4 bytes of
    the token itself. `filler_top_k` adds up to that many edges for each context of a token.
    """

    def __init__(
        self,
        max_context: int = 64,
        min_context: int = 1,
        max_draft: int = 8,
        min_confidence: float = 0.0,
        filler_top_k: int = 0,
        *,
        name: str = "ngram",
    ) -> None:
        self._name, self._max_context = name, max_context
        self._min_context = min_context
        self._max_draft = max_draft
        self._min_confidence = min_confidence
        self._filler_top_k = filler_top_k
        self._memory: NgramMemory | None = None
        self.reset()

    def reset(self) -> None:
        """Forget all counts: a new sequence begins. The memory stays."""
        self._counts = Ngrams(self._min_context, self._max_context, self._min_confidence)
        self._counts.recall_from(self._memory)
        self._told = 0
        self._certain: int | None = None  # number of confirmed tokens; those after them are tentative
        self._ahead = 0  # of these, that contexts have gone over
        self._likely: dict[int, NDArray[np.int64]] = {}  # by index of a token that is not counted yet

    @property
    def filler_top_k(self) -> int:
        return self._filler_top_k

    @property
    def name(self) -> str:
        return self._name

    def recall_from(self, memory: NgramMemory | None) -> None:
        """Draft from `memory` too, made for contexts of up to `max_context` tokens; without one, from the sequence
        alone."""
        self._memory = memory
        self._counts.recall_from(memory)

    def mark_tentative(self, length: int | None) -> None:
        """Contexts may end in tokens from `length` on, which are not counted."""
        if length == self._certain:
            return
        self._counts.go_back()
        self._certain, self._ahead = length, 0

    def truncate(self, length: int) -> None:
        """Start over where what was counted is not part of the sequence any more."""
        if length < self._told:
            self.reset()
        self._likely = {index: likely for index, likely in self._likely.items() if index < length}

    def sync(self, tokens: Sequence[int]) -> None:
        """Count the tokens that are new; tentative ones may end contexts, and are not counted."""
        certain = len(tokens) if self._certain is None else self._certain
        if self._told < certain:
            self._counts.go_back()
            self._ahead = 0
            self.extend(tokens[self._told : certain])
        if self._told + self._ahead < len(tokens):
            tentative = tokens[self._told + self._ahead :]
            self._counts.go_ahead(list(tentative))
            self._ahead += len(tentative)

    def extend(self, token_ids: Sequence[int] | NDArray[np.int64]) -> None:
        """Count each token as the continuation of the contexts before it; it then ends the sequence.

        What was likely in its place goes before it, so that the token itself is the most recent one.
        """
        tokens = _plain(token_ids)
        if not self._likely:
            self._counts.extend(tokens)
            self._told += len(tokens)
            return
        for token in tokens:
            self._counts.extend_one(token, _plain(self._likely.pop(self._told, [])))
            self._told += 1

    def observe(self, index: int, likely: NDArray[np.int64]) -> None:
        """Keep what might well have come as token `index` until that is counted."""
        if self._certain is None:
            self._likely[index] = likely

    def foresee(self, tokens: Sequence[int], limit: int, sampling: SamplingParams) -> int:
        self.sync(tokens)
        return self._counts.foresee(min(limit, self._max_draft), *self._races(sampling))

    def draft(
        self,
        limit: int,
        token_ids: NDArray[np.int64],
        parent: NDArray[np.int64],
        score: NDArray[np.float32],
        root: int,
        sampling: SamplingParams,
    ) -> int:
        """Write a tree of at most `limit` nodes after node `root`; see `HostDrafter.draft`."""
        limit = min(limit, self._max_draft)
        return self._counts.draft(limit, token_ids, parent, score, root, *self._races(sampling))

    def _races(self, sampling: SamplingParams) -> tuple[int, int, int, float]:
        """The races after the tokens it received: seed, stream, position of the next token, temperature."""
        return sampling.seed, sampling.stream_id, self._told + self._ahead, sampling.temperature


def make(settings: NgramSettings) -> NgramDrafter:
    """Return a drafter with the settings of a plan."""
    return NgramDrafter(
        settings.max_context,
        settings.min_context,
        settings.max_draft,
        settings.min_confidence,
        settings.filler_top_k,
        name=settings.name,
    )


def _plain(token_ids: Sequence[int] | NDArray[np.int64]) -> list[int]:
    """Python integers, as a list."""
    return token_ids.tolist() if isinstance(token_ids, np.ndarray) else list(token_ids)
