"""A drafter that is an engine: a head that reads the target's features, or a small decoder.

It drafts in the target's own step where one sequence is alone, and for any number of sequences at once.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from outrider.plans import names
from outrider.plans.manifest import BatchSize
from outrider.runtime.drafters.base import Draft
from outrider.runtime.drafters.engine_state import EngineSequence, EngineState
from outrider.runtime.execution.program import Program
from outrider.runtime.execution.step import TargetStep
from outrider.runtime.kv.slots import FIRST
from outrider.runtime.sequence import Sequence

Choose = Callable[[abc.Sequence[int], abc.Sequence[float]], abc.Sequence[int]]
"""Chooses nodes of a draft, ascending and with all of their ancestors, by parents (-1 for the tip) and scores."""


class EngineDrafter(EngineState):
    """Drafts for sequences by number."""

    # One sequence that has row 0 to itself.

    def draft_in_place(self, sequence: Sequence, past: int, step: TargetStep, limit: int) -> Draft | None:
        """Prepare a tree that the engine writes into the target's step itself; None where there is no room or start.

        Of a chain at most `limit` nodes are asked for. `step` will hold the tip alone, after `past` slots.
        """
        state, tokens, nodes = self._states[sequence.number], sequence.tokens, self._nodes
        state.grown = False  # of a pass that came to no end
        if past + nodes > step.largest_view or len(tokens) >= self._room:
            return None
        if not self._feed(sequence, len(tokens) - self._lead):
            return None
        self._tip_position[sequence.number] = len(tokens) - 1
        # The front of a chain is a chain. By rejection, tokens depend on it: then it is whole, as on every backend.
        cut = self._tree.top_k == 1 and not self.rejects and step.buckets is None
        state.grown = True
        place = slice(1, min(nodes, 1 + limit) if cut else nodes)
        program = names.speculate(self.name)
        return Draft(step.token_ids[place], step.parent[place], self._score[0, place], program=program)

    def cut_in_place(self, step: TargetStep, tree: Draft, choose: Choose) -> None:
        """Cut the tree that the engine has written into the target's step to the nodes that are chosen."""
        parent, scores = tree.shape()
        nodes = choose(parent, scores)
        count = len(nodes)
        if not nodes or nodes[-1] == count - 1:  # the front of a tree is a tree, and lies where it is
            if count < len(parent):
                step.keep_front(count)
        else:
            place = {-1: -1} | {node: index for index, node in enumerate(nodes)}
            places = np.array(nodes) + 1
            step.keep_nodes(places, [place[parent[node]] for node in nodes])
            self._score[0, 1 : 1 + count] = [scores[node] for node in nodes]
            if self._tree_slots is not None:
                self._tree_slots.keep(places)
        left = slice(1, 1 + count)
        tree.token_ids, tree.parent, tree.scores = step.token_ids[left], step.parent[left], self._score[0, left]

    def skip_round(self, sequence: Sequence) -> None:
        """Called when this drafter skips a round: keep the features of the last pass, or consume them."""
        if self._kept is None:
            self._states[sequence.number].grown = False
        elif not self._keep_features(sequence):
            self.sync(sequence)

    def _keep_features(self, sequence: Sequence) -> bool:
        """Keep the features that are still to be consumed; False where there is no room for them."""
        state = self._states[sequence.number]
        assert self._kept is not None
        taken = min(max(state.end - state.first, 0), len(state.features))
        found = None if self.cache.window is not None else self._kept.keep(state.features[taken:])
        if found is None:
            return False
        self._kept.release(state.features[:taken])
        state.grown = False
        state.first, state.features = state.first + taken, found
        return True

    def sync(self, sequence: Sequence) -> None:
        """Consume the features of the last pass, and those that were kept."""
        state = self._states[sequence.number]
        state.grown = False
        if self.paired and self._feed(sequence, self._end(sequence)):
            self._extend.run()
            self._commit_fed(state)

    def _commit_fed(self, state: EngineSequence) -> None:
        self.cache.commit()
        state.end += self._step.new_tokens

    def _feed(self, sequence: Sequence, end: int) -> bool:
        """Lay out the tokens up to `end` that lack KV; False where there are none, or their features are gone.

        More than a step holds goes in with passes of its own.
        """
        state, window, lead = self._states[sequence.number], self.cache.window, self._lead
        tokens, most = sequence.tokens, self._step.most
        while True:
            if window is not None:
                window.pass_over(len(tokens), end)
                state.end = window.end
            first = state.end
            if first >= end or (self.paired and end > self._end(sequence)):
                return False
            count = min(end - first, most)
            self._lay_out_features(sequence, first, count, 0)
            if window is not None:
                window.make_room(count)
            self.cache.compact_if_worthwhile(count + self._step.reach_of(1))
            self.cache.begin_alone(tokens[first + lead : first + lead + count], first, sequence.number)
            if first + count == end:
                return True
            self._extend.run()
            self._commit_fed(state)

    # Any number of sequences.

    def draft(self, wanting: Mapping[int, int], following: abc.Sequence[Sequence]) -> dict[int, Draft]:
        """Draft after the tips of the sequences that are `wanting`, by number: of a chain at most that many nodes.

        A head consumes the tokens that all sequences `following` it have committed, or keeps their features.
        """
        for each in following:
            self._states[each.number].grown = False
        tips = {each.number for each in following if each.number in wanting and len(each.tokens) < self._room}
        waiting = [each for each in following if self.paired or each.number in tips]
        if self.paired and not tips:
            waiting = [each for each in waiting if not self._keep_features(each)]
        if not waiting:
            return {}
        grown = self._feed_all(waiting, tips)
        if not grown:
            return {}
        batch = self.cache.batch if self.cache.pooled else None
        self._step.grow(grown, 1 if batch is None else batch.sequences)
        self._run(self._draft)
        return {number: self._read(tree, wanting[number]) for tree, number in self._trees(grown)}

    def _feed_all(self, waiting: list[Sequence], tips: set[int]) -> list[tuple[int, int, int]]:
        """Lay out the tokens that lack KV; what a step has no room for gets passes of its own.

        Returns the tips that trees grow from, in the step that is laid out: row, index, number. Without any, all of it
        has run.
        """
        waiting = sorted(waiting, key=lambda each: each.number)
        room = self._step.most + self._step.reach_of(self._most_tips)
        while True:
            with self._watch:
                self.cache.make_room(room)
                self._step.expect_tips(self._most_tips)
                counts = {each.number: self._end(each) - self._states[each.number].end for each in waiting}
                # Where they are more than a step has room for, none is recorded, and rows are ragged.
                self.cache.begin(counts, fills=True)
                grown = self._lay_out(waiting, tips)
                self.cache.close_step()
            if grown and not waiting:
                return grown
            if self._step.new_tokens:
                self._run(self._extend)
            if not waiting:
                return []

    def _run(self, program: Program | None) -> None:
        assert program is not None, "a plan of several branches has it"
        program.run()
        with self._watch:
            self.cache.commit()

    def _lay_out(self, waiting: list[Sequence], tips: set[int]) -> list[tuple[int, int, int]]:
        """Lay out tokens that lack KV, of as many sequences as there is room for, and take these out of `waiting`."""
        step, grown = self._step, []
        width = self.cache.width([each.number for each in waiting])
        while waiting:
            sequence = waiting[0]
            number, state = sequence.number, self._states[sequence.number]
            have, end = state.end, self._end(sequence)
            count = min(end - have, step.most - step.new_tokens, width)
            if count > 0:
                self._lay_out_features(sequence, have, count, step.new_tokens)
                tokens = sequence.tokens[have + self._lead : have + self._lead + count]
                last = self.cache.append(tokens, have, number)
                state.end = have + count
                if number in tips and have + count + self._lead == len(sequence.tokens):
                    grown.append((self.cache.row_of(number), last, number))
                    self._tip_position[number] = len(sequence.tokens) - 1
            if have + count < end:
                break
            self.cache.close_row(number)
            waiting.pop(0)
        return grown

    def _trees(self, grown: abc.Sequence[tuple[int, int, int]]) -> Iterator[tuple[int, int]]:
        """Yield the index of each tree in the drafter's buffers, and the number of its sequence."""
        place, row, each = 0, -1, self._step.tips
        for at, _, number in grown:
            place = place + 1 if at == row else 0
            row = at
            yield row * each + place, number

    def _read(self, tree: int, limit: int) -> Draft:
        end = self._nodes
        if self._tree.top_k == 1 and not self.rejects:  # the front of a chain is a chain
            end = min(end, 1 + limit)
        probs = self._probs_of(tree) if self.rejects else None
        return Draft(
            self._token_ids[tree, 1:end].copy(),
            self._parent[tree, 1:end].copy(),
            self._score[tree, 1:end].copy(),
            probs=probs,
        )

    def _probs_of(self, tree: int) -> NDArray[np.float32]:
        """Copy the distributions that a chain's tokens were drawn from, f32 `[nodes - 1, vocab]`."""
        first = tree * self._nodes
        return self._buffers.rows(self.name, names.DRAFT_PROBS, first + 1, first + self._nodes).copy()

    # Sizes of rounds, for devices that record them.

    def batches(self, size: BatchSize, view: int, *, rows: bool) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Lay out a size of step of several sequences, once for each program that may run it, as `rounds` does."""
        self._step.expect_tips(1 if rows else len(self._tip_position))
        if self._feature_indices is not None:
            self._feature_indices[: size.tokens] = 0
        self._step.begin_warmup_batch(size, view, rows=rows)
        if self.paired:
            yield names.extend(self.name), (self.name,)
        self._step.grow((), 1 if rows else size.sequences)
        yield names.draft(self.name), (self.name,)

    def rounds(self, length: int, step: TargetStep) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Lay out every size of round with it that a sequence of `length` tokens may come to, one after another.

        Of each, the name of the program that would run, and the models whose sizes it runs with.
        """
        end, models, nodes = length - self._lead, (names.TARGET, self.name), self._nodes
        if length < self._room and length - 1 + nodes <= step.largest_view:
            step.begin_warmup(length)
            for _ in self._feeds(end):
                step.expect_tree(nodes)
                yield names.speculate(self.name), models
                if self._tree_slots is not None:
                    yield names.compact(self.name), (self.name,)
        yield from self.extensions(length, 1)

    def extensions(self, length: int, most: int) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Lay out what a head consumes at rounds without it that commit at most `most` tokens, as `rounds` does.

        A model catches up when it drafts again.
        """
        for fed in self._feeds(length - self._lead):
            if self.paired and fed <= most:
                yield names.extend(self.name), (self.name,)

    def _feeds(self, end: int) -> Iterator[int]:
        """Lay out the feeds that make the KV end at `end`, of tokens that are 0."""
        assert self._step.buckets is not None
        for fed in reversed(self._step.buckets.new):
            if fed <= end:
                if self._feature_indices is not None:
                    self._feature_indices[:fed] = 0
                self._step.begin(end - fed, end - fed, [0] * fed, FIRST)
                self._tip_position[FIRST] = end - 1 + self._lead
                yield fed


def chain_rounds(length: int, step: TargetStep, longest: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Lay out every size of round in which the host hangs a chain of at most `longest` nodes after the tip."""
    assert step.buckets is not None
    for size in reversed(step.buckets.new):
        if size <= 1 + min(longest, step.max_nodes) and length - 1 + size <= step.largest_view:
            step.begin_warmup(length, size - 1)
            yield names.VERIFY, (names.TARGET,)
