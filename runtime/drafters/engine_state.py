"""What a drafter's engine has of each sequence: KV in a cache of its own, and features of the target that wait for it.

KV at position i stands for token i (`model`), for the pair of the target's feature i and token i + 1 (`eagle3`), or for
that feature alone (`block`). So each can be computed once the target has the KV of token i. A head's engine is fed the
tokens after its features, the last of which is the tip. Features stay in the target's buffer until its next pass:
before that, a head consumes what its sequences have committed, or keeps the features (`kept_features.py`).
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field
from math import inf, log

import numpy as np
from numpy.typing import NDArray

from outrider.plans import names
from outrider.plans.manifest import Engine, Geometry, GraphDrafter
from outrider.runtime.drafters.kept_features import KeptFeatures
from outrider.runtime.drafters.tree_slots import TreeSlots
from outrider.runtime.execution.assembly import Assembly
from outrider.runtime.execution.step import DraftStep
from outrider.runtime.kv.cache import KvCache
from outrider.runtime.kv.slots import FIRST
from outrider.runtime.kv.token_kv import TokenKv
from outrider.runtime.sequence import Sequence
from outrider.runtime.stats import Stopwatch

LEAST_CHANCE = 0.2
"""Chance of a node to be accepted from which a CPU verifies it in a pass that several sequences share."""

_NONE = np.zeros(0, np.int64)


@dataclass
class EngineSequence:
    """State of the drafter for one sequence.

    KV up to position `end`, and where the features of tokens `first` and on lie: `features`, rows of the target's
    buffer: kept ones, then token indices of its pass number `passes`.
    """

    end: int = 0
    first: int = 0
    features: NDArray[np.int64] = field(default_factory=lambda: _NONE)
    passes: int = -1
    tentative: bool = False
    grown: bool = False  # a tree grows in the pass that runs


class EngineState:
    """Owner of its KV cache and of its state for each sequence, by number. KV of drafted nodes is dropped by length,
    but for that of a draft model's accepted nodes where one sequence is alone."""

    def __init__(
        self,
        settings: GraphDrafter,
        geometry: Geometry,
        assembly: Assembly,
        watch: Stopwatch,
        kept: KeptFeatures | None,
        *,
        engine: Engine,
    ) -> None:
        """`watch` has the time of the bookkeeping; `kept` is there for heads."""
        name, buffers, programs = settings.name, assembly.buffers, assembly.programs
        self.name, self.settings = name, settings
        least = LEAST_CHANCE if buffers.exchange is None else 0.0
        least = least if settings.least_chance is None else settings.least_chance
        self.least_score = log(least) if least else -inf
        self.paired, self.rejects = settings.reads_features, settings.acceptance == "rejection"
        self._tree, self._lead, self._room = settings.tree, int(self.paired), geometry.context
        self._buffers, self._watch = buffers, watch
        self._step: DraftStep = assembly.draft_steps[name]
        self._extend = programs[names.extend(name)]
        self._draft = programs.get(names.draft(name))
        several = geometry.branches > 1
        compact = programs.get(names.compact(name))
        self.cache = KvCache(
            name,
            buffers,
            self._step,
            geometry,
            compact if several else None,
            lead=self._lead,
            rectangular=engine.rectangular,
        )
        self._keeps_levels = engine.keeps_levels and not self.paired
        gathers = compact is not None and settings.compacts and engine.keeps_levels
        self._tree_slots = TreeSlots(name, buffers.array, self._step, compact) if gathers and compact else None
        nodes = self._nodes = settings.tree.nodes
        self._token_ids, self._parent, self._score = (
            buffers.array(name, each).reshape(-1, nodes)
            for each in (names.TREE_TOKEN_IDS, names.TREE_PARENT, names.TREE_SCORE)
        )
        self._tip_position = buffers.array(name, names.TIP_POSITION)
        self._feature_indices = buffers.array(name, names.FEATURE_INDICES) if self.paired else None
        # The feature of a prefix's last token goes into every sequence after it: it is kept after the steps' own.
        self._kept = kept
        self._kept_feature = len(buffers.array(names.TARGET, names.FEATURES)) - 1 if self.paired else 0
        self._states: dict[int, EngineSequence] = {}
        self._prefix: list[int] = []
        self._prefix_synced = 0  # tokens of the prefix that `sync_prefix` has seen
        self.arrange(pooled=True)

    # Between runs, and the prefix.

    def arrange(self, *, pooled: bool) -> None:
        """Forget everything; sequences share one row of the cache from now on, or have a row each."""
        self._most_tips = len(self._tip_position) if pooled else 1
        self.cache.arrange(pooled=pooled)
        self._forget_states()
        self._prefix, self._prefix_synced = [], 0

    def has_prefix(self, prefix: abc.Sequence[int]) -> bool:
        """Whether all tokens of the prefix that can have KV here do."""
        return self._prefix == list(prefix) and self._prefix_synced == len(self._prefix)

    def rewind(self) -> None:
        """Forget all but the prefix."""
        self.cache.rewind()
        self._forget_states()

    def _forget_states(self) -> None:
        for state in self._states.values():
            self._drop_features(state, 0)
        self._states.clear()

    def _drop_features(self, state: EngineSequence, kept: int) -> None:
        """Drop the features of a state after its first `kept` ones."""
        if self._kept is not None:
            self._kept.release(state.features[kept:])
        state.features = state.features[:kept]

    def begin(self, prefix: abc.Sequence[int], *, pooled: bool) -> None:
        """Forget everything, and expect sequences after `prefix`."""
        self.arrange(pooled=pooled)
        self._prefix = list(prefix)

    def sync_prefix(self, first: int, count: int) -> None:
        """Take in `count` tokens of the prefix from `first` on, to which a pass of the target has given KV."""
        end = first + count
        if self.paired and end == len(self._prefix):
            feature = names.TARGET, names.FEATURES
            self._buffers.copy_rows((*feature, count - 1), (*feature, self._kept_feature))
        tokens = self._prefix[first + self._lead : end + self._lead]
        most = self._step.most
        for start in range(0, len(tokens), most):
            part = tokens[start : start + most]
            self.cache.begin({})
            if self._feature_indices is not None:
                self._feature_indices[: len(part)] = np.arange(start, start + len(part))
            self.cache.append(part, first + start, FIRST)
            self._extend.run()
            self.cache.commit_prefix(len(part))
        self._prefix_synced = end

    def restore_prefix(self, tokens: int) -> None:
        """Count the first `tokens` of the prefix as computed: their KV has been copied here."""
        self._prefix_synced = tokens

    # A sequence.

    def open(self, sequence: Sequence) -> None:
        """Open a sequence that may ask this drafter; a second time changes nothing."""
        if sequence.number not in self._states:
            self.cache.open(sequence.number)
            self._states[sequence.number] = EngineSequence(max(0, len(self._prefix) - self._lead))

    def close(self, sequence: Sequence) -> None:
        """Drop the state and the KV of a sequence."""
        state = self._states.pop(sequence.number, None)
        if state is not None:
            self._drop_features(state, 0)
            self.cache.close(sequence.number)

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Drop KV and features of a sequence after its first `length` tokens."""
        state = self._states.get(sequence.number)
        if state is None:
            return
        end = max(length - self._lead, 0)
        if end < state.end:
            state.end = self.cache.truncate(sequence.number, end)
        state.grown = False
        self._drop_features(state, max(length - state.first, 0))

    def mark_tentative(self, sequence: Sequence, *, tentative: bool) -> None:
        """Note whether features from now on are of tentative tokens; discard features of retracted ones, which a pass
        over the partial cache gave: those of the tip and of what followed it."""
        state = self._states[sequence.number]
        if state.tentative and not tentative:
            kept = 0 if self._kept is None else self._kept.lasting(state.features)
            self._drop_features(state, max(min(kept, len(sequence.tokens) - 1 - state.first), 0))
        state.tentative = tentative

    def catch_up(self, sequence: Sequence, passes: int) -> int:
        """Take in the sequence's tokens; return how many of them may keep their KV in the target.

        Features of those after are computed again. `passes` counts the target's passes: what others than the last one
        gave is lost.
        """
        self.open(sequence)
        state, tokens, computed = self._states[sequence.number], sequence.tokens, sequence.computed
        least = max(len(tokens) - 1 - self._lead, 0)  # the tip is always fed again
        if state.end > least:
            state.end = self.cache.truncate(sequence.number, least)
        state.grown = False
        if not self.paired:
            return computed
        if passes != state.passes and self._kept is not None:
            self._drop_features(state, self._kept.lasting(state.features))
        if self._feature_of(sequence, state.end) is not None and state.first + len(state.features) >= computed:
            return computed
        window = self.cache.window
        if window is not None and window.too_far(computed):  # computing it again would cost more than it is worth
            window.skip_to(computed)
            state.end = window.end
        kept = max(state.end, sequence.shared)  # the feature before the first own token is kept
        if self._feature_of(sequence, kept) is not None:
            kept = state.first + len(state.features)
        return min(computed, kept)

    def known(self, sequence: Sequence) -> int:
        """Number of leading tokens of the sequence that have KV here, as far as they can."""
        state = self._states.get(sequence.number)
        if state is None:
            return 0
        if self.cache.window is not None:
            return self.cache.window.known
        return state.end + self._lead if state.end else 0

    def restore(self, sequence: Sequence, known: int) -> list[tuple[int, int, TokenKv]]:
        """Claim slots for leading tokens of a sequence without a prefix.

        Returns what is to be copied for that: the first token, the one after the last, and where to.
        """
        state, window = self._states[sequence.number], self.cache.window
        reach = window.reach if window is not None else self.known(sequence)
        if known <= max(reach, self._lead):
            return []
        if window is not None:
            missing = list(window.missing(known))
            window.restore(known)
            state.end = window.end
            return missing
        first = self.known(sequence)
        self.cache.claim(sequence.number, state.end, known - self._lead - state.end)
        state.end = known - self._lead
        return [(first, known, self.cache.kv_of(sequence.number))]

    def kv_of(self, sequence: Sequence) -> TokenKv:
        """KV of the leading tokens of a sequence after no prefix."""
        return self.cache.kv_of(sequence.number) if self.cache.window is None else self.cache.window.leading

    # A round.

    def commit(self, sequence: Sequence, start: int, count: int, kept: NDArray[np.int64] | None, passes: int) -> None:
        """Take note that a pass of the target has given KV to `count` tokens of the sequence from `start` on: the first
        of the step, or the `kept` ones."""
        state = self._states[sequence.number]
        if state.grown:
            assert kept is not None, "a draft is accepted by tokens that are listed"
            fed = self._step.new_tokens
            self.cache.commit()
            stay = self._keep(kept[1:count])
            self.cache.continue_chain(stay)
            state.end += fed + stay
            state.grown = False
        if self._kept is not None:
            mine = np.arange(count) if kept is None else kept[:count].copy()
            before = self._waiting(state)
            if len(before) and state.first + len(state.features) == start:
                self._kept.release(state.features[: -len(before)])
                state.first, state.features = start - len(before), np.concatenate((before, mine))
            else:
                self._drop_features(state, 0)
                state.first, state.features = start, mine
        state.passes = passes

    def _waiting(self, state: EngineSequence) -> NDArray[np.int64]:
        """The kept features that are still to be consumed; the next pass of the target has overwritten all others."""
        assert self._kept is not None
        features = state.features[max(state.end - state.first, 0) :]
        return features if self._kept.lasting(features) == len(features) else features[:0]

    def _keep(self, path: NDArray[np.int64]) -> int:
        """Keep the KV of accepted nodes `path` after the tip's; return of how many."""
        if not self._keeps_levels:
            return 0  # a head's was computed from hidden states of its own, not from the target's features
        if self._tree_slots is None:
            return min(len(path), self._tree.depth)  # a chain's is in place, one a level
        return self._tree_slots.gather(self.cache.length, path)

    def _feature_of(self, sequence: Sequence, index: int) -> int | None:
        """Index of the feature of token `index` in the target's buffer; None where it is lost or not there yet."""
        state = self._states[sequence.number]
        if index == sequence.shared - 1:
            return self._kept_feature
        at = index - state.first
        return int(state.features[at]) if 0 <= at < len(state.features) else None

    def _end(self, sequence: Sequence) -> int:
        """End of the tokens whose KV can be computed now."""
        if not self.paired:
            return len(sequence.tokens)
        state = self._states[sequence.number]
        end = state.end
        if end == sequence.shared - 1:
            end += 1
        if state.first <= end < state.first + len(state.features):
            end = state.first + len(state.features)
        return min(end, len(sequence.tokens) - 1)

    def _lay_out_features(self, sequence: Sequence, first: int, count: int, at: int) -> None:
        if self._feature_indices is None:
            return
        state = self._states[sequence.number]
        if first == sequence.shared - 1:
            self._feature_indices[at] = self._kept_feature
            first, count, at = first + 1, count - 1, at + 1
        offset = first - state.first
        self._feature_indices[at : at + count] = state.features[offset : offset + count]
