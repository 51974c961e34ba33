"""Drafts what followed the same words before: counts of what continued every context of the sequence so far.

Source: FEATURES row 16 (NASD, n-gram assisted speculative decoding); its ancestor is arXiv 2404.08698. No model runs: a
draft costs microseconds, and pays wherever a text repeats itself (code, summaries, edits, quotations).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from plans import names
from plans.errors import PlanError
from runtime.step import TargetStep

MAX_CONTEXT = 16

_ROOT = 0  # the node of the empty context
_TOKEN_BITS = 32  # of a key of `_child`; the rest is the node
_REPAIR = "Correct the recipe and build the plan again."


class NgramDrafter:
    """Counts of the tokens that followed each context of `min_context` to `max_context` tokens.

    The longest context that has been continued before wins, its most frequent continuation is drafted (of equally
    frequent ones the most recent), and so on behind the drafted token, greedily. Drafting stops at `max_draft`
    tokens, where no context is known, or where the chance that the target says all of it falls below `min_confidence`.

    That chance is a product of one factor a token: the share of the best continuation among all of its context's, times
    what such shares have been worth so far behind contexts of that length (`_Trust`). What was drafted is compared with
    what comes, whoever had the round.

    With `filler_top_k`, so many of the target's likeliest tokens count as continuations as well, wherever the target
    chose one: what it nearly said once it may say next time.

    The counts are a trie of all n-grams up to `max_context` + 1 tokens. An n-gram's node serves twice: as the count
    of its last token behind the others, and as a context itself. `_tails` are the nodes of the sequence's last 0, 1,
    2 ... tokens, so that a new token costs one dictionary access per length.

    Memory: at most (1 + `filler_top_k`) * (`max_context` + 1) nodes for each token seen, of about 150 bytes each (worst
    case, 32k tokens that never repeat and contexts of 3: 19 MB, 77 MB with 3 fillers), until `reset`.
    """

    def __init__(
        self,
        max_context: int = 3,
        min_context: int = 1,
        max_draft: int = 8,
        min_confidence: float = 0.0,
        filler_top_k: int = 0,
        *,
        name: str = "ngram",
    ) -> None:
        """Raises PlanError, under the drafter's `name`, for values outside 1 <= min_context <= max_context <= 16,
        max_draft >= 1, 0 <= min_confidence <= 1 and filler_top_k >= 0."""
        if not 1 <= min_context <= max_context <= MAX_CONTEXT:
            raise PlanError(
                f"The drafter {name!r} has min_context {min_context} and max_context {max_context}; they must be whole "
                f"numbers with 1 <= min_context <= max_context <= {MAX_CONTEXT}. {_REPAIR}"
            )
        if max_draft < 1:
            raise PlanError(f"The drafter {name!r} has max_draft {max_draft}; it must be at least 1. {_REPAIR}")
        if not 0.0 <= min_confidence <= 1.0:
            raise PlanError(
                f"The drafter {name!r} has min_confidence {min_confidence}; it must be a share from 0 (always draft) "
                f"to 1. {_REPAIR}"
            )
        if filler_top_k < 0:
            raise PlanError(
                f"The drafter {name!r} has filler_top_k {filler_top_k}; it must be 0 (off) or more. {_REPAIR}"
            )
        self._name, self._max_context = name, max_context
        self._min_context = min_context
        self._max_draft = max_draft
        self._chain = np.arange(max_draft)  # parents of a chain whose root is node 0
        self._min_confidence = min_confidence
        self._filler_top_k = filler_top_k
        self.reset()

    def reset(self) -> None:
        """Forget all counts: a new sequence begins."""
        self._child: dict[int, int] = {}  # node << 32 | token -> node of the n-gram that is one token longer
        # By node, as an n-gram: its last token, how often that was counted behind the others, and the node of the
        # n-gram without its first token.
        self._token = [0]
        self._count = [0]
        self._shorter = [_ROOT]
        # By node, as a context: the sum of its continuations' counts, and the node of the best one.
        self._total = [0]
        self._best = [_ROOT]
        self._tails = [_ROOT]
        self._told = 0
        self._likely: dict[int, NDArray[np.int64]] = {}  # by index of a token that is not counted yet
        self._trust = _Trust(self._max_context)
        self._guesses: list[tuple[int, int, float]] = []  # tokens behind the last one counted, with length and share

    entropy = None
    trials = None

    @property
    def scores(self) -> None:
        """Counts are no probabilities."""
        return None

    @property
    def filler_top_k(self) -> int:
        return self._filler_top_k

    def rounds(self, length: int, step: TargetStep) -> Iterator[tuple[str, tuple[str, ...]]]:
        assert step.buckets is not None
        for size in reversed(step.buckets.new):
            if size <= 1 + min(self._max_draft, step.max_nodes) and length - 1 + size <= step.largest_view:
                step.begin_rehearsed(length, size - 1)
                yield names.speculate(self._name), (names.TARGET,)

    def truncate(self, length: int) -> None:
        """Start over where what was counted is not part of the sequence any more."""
        if length < self._told:
            self.reset()
        self._likely = {index: likely for index, likely in self._likely.items() if index < length}

    def resume(self, tokens: Sequence[int], rows: int, passes: int) -> int:
        """Tokens are all that it reads: every row may stay."""
        return rows

    def begin(self, tokens: Sequence[int], step: TargetStep, limit: int) -> str | None:
        """Count the tokens that are new, and let the program's first stage draft."""
        self._catch_up(tokens)
        step.draft_limit = limit
        return names.speculate(self._name)

    def _catch_up(self, tokens: Sequence[int]) -> None:
        self.extend(tokens[self._told :] if self._told else tokens)

    def absorb(self, tokens: Sequence[int]) -> None:
        """The tokens are all there is to know, and they stay."""

    def follow(self, start: int, rows: int, kept: NDArray[np.int64] | None, passes: int) -> None:
        """Nothing: what was committed is counted before the next draft."""

    def extend(self, token_ids: Sequence[int] | NDArray[np.int64]) -> None:
        """Count each token as the continuation of the contexts before it; it then ends the sequence.

        What was likely in its place counts before it, so that the token itself is the most recent one.
        """
        tokens = _plain(token_ids)
        if self._guesses and len(tokens):
            for token, (guess, length, share) in zip(tokens, self._guesses, strict=False):
                self._trust.learn(length, share, guess == token)
                if guess != token:
                    break
            self._guesses = []
        for token in tokens:
            for other in _plain(self._likely.pop(self._told, ())):
                self._count_continuation(other)
            self._told += 1
            nodes = self._count_continuation(token)
            del nodes[self._max_context :]  # the last one is no context: it is too long
            self._tails = [_ROOT, *nodes]

    def observe(self, index: int, likely: NDArray[np.int64]) -> None:
        """Keep what might well have come as token `index` until that is counted.

        Each counts as one continuation, so the shares that `min_confidence` looks at become smaller.
        """
        self._likely[index] = likely

    def foresee(self, tokens: Sequence[int], limit: int) -> int:
        self._catch_up(tokens)
        return len(self._likely_chain(limit))

    def draft(self, limit: int, token_ids: NDArray[np.int64], parent: NDArray[np.int64], root: int) -> int:
        """Write a chain of at most `limit` nodes behind node `root`; see `HostDrafter.draft`."""
        drafted = self._likely_chain(limit)
        nodes = len(drafted)
        if nodes:
            token_ids[root + 1 : root + 1 + nodes] = drafted
            parent[root + 1 : root + 1 + nodes] = self._chain[:nodes] + root
        return nodes

    def _likely_chain(self, limit: int) -> list[int]:
        """The tokens to be drafted behind the last one counted, at most `limit`."""
        count, total, best, shorter = self._count, self._total, self._best, self._shorter
        worth = self._trust.worth
        drafted: list[int] = []
        guesses = self._guesses = []
        chance = 1.0
        context, length = self._tails[-1], len(self._tails) - 1
        for _ in range(min(limit, self._max_draft)):
            while length >= self._min_context and not total[context]:
                context, length = shorter[context], length - 1
            if length < self._min_context:
                break
            share = count[best[context]] / total[context]
            chance *= share * worth[length]
            if chance < self._min_confidence:
                break
            context = best[context]
            token = self._token[context]
            drafted.append(token)
            guesses.append((token, length, share))
            length += 1  # nothing longer can be known behind one more token
        return drafted

    def _count_continuation(self, token: int) -> list[int]:
        """Count `token` behind every tail; returns the nodes of the n-grams of 1, 2, ... tokens that it ends."""
        child, count, total, best = self._child, self._count, self._total, self._best
        nodes = []
        node = _ROOT
        for context in self._tails:
            key = context << _TOKEN_BITS | token
            one_shorter, node = node, child.get(key, _ROOT)
            if node == _ROOT:
                node = child[key] = len(count)
                count.append(0)
                total.append(0)
                best.append(_ROOT)
                self._token.append(token)
                self._shorter.append(one_shorter)
            count[node] += 1
            total[context] += 1
            # Not `>`: of equally frequent continuations the most recent is the best.
            if count[node] >= count[best[context]]:
                best[context] = node
            nodes.append(node)
        return nodes


class _Trust:
    """What the share of a continuation is worth, by the length of its context: tokens that came over shares drafted.

    Short contexts mislead. Until there is experience, a context of one token is believed by half, and each token more
    takes a third of the doubt: about what held-out code shows.
    """

    _FIRST_DOUBT, _LESS_BY, _SHARES = 0.5, 0.65, 4.0  # the last: how many shares the assumption weighs as much as

    def __init__(self, longest: int) -> None:
        doubts = [self._FIRST_DOUBT * self._LESS_BY ** max(length - 1, 0) for length in range(longest + 1)]
        self.worth = [1.0 - doubt for doubt in doubts]
        self._came = [self._SHARES * worth for worth in self.worth]
        self._drafted = [self._SHARES] * (longest + 1)

    def learn(self, length: int, share: float, came: bool) -> None:
        """A continuation with this share was drafted behind a context of `length` tokens, and came or did not."""
        self._came[length] += came
        self._drafted[length] += share
        self.worth[length] = min(self._came[length] / self._drafted[length], 1.0)


def _plain(token_ids: Sequence[int] | NDArray[np.int64]) -> Sequence[int]:
    """Python integers: NumPy scalars are slow as dictionary keys, and would overflow in them."""
    return token_ids.tolist() if isinstance(token_ids, np.ndarray) else token_ids
