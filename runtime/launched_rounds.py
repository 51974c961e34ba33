"""Rounds that the host launches before it has seen the tokens of the round before: it stays one step behind the device.

Such a round gives each sequence one token, whatever the tokens are, so that places in the KV cache are known before
them: only the tokens stay on the device. What a sequence is given after its end counts for nothing.
"""

from __future__ import annotations

from collections import abc
from contextlib import suppress
from dataclasses import dataclass

from outrider.plans.errors import PlanError
from outrider.runtime.execution.buffers import Buffers
from outrider.runtime.execution.layout import Placement, lay_out, lay_out_one
from outrider.runtime.execution.program import Program
from outrider.runtime.execution.step import TargetStep
from outrider.runtime.kv.cache import KvCache
from outrider.runtime.sequence import Sequence
from outrider.runtime.stats import Stopwatch


@dataclass(slots=True)
class Launch:
    """A round on the device: `placed` are those that are still to get its tokens, from `landing` of the program.

    `alone`: of one sequence that has row 0 to itself.
    """

    placed: list[Placement]
    landing: int
    alone: bool


class LaunchedRounds:
    """The rounds of a `program` that may be launched, of which one may be `outstanding` between steps."""

    def __init__(self, program: Program, buffers: Buffers, step: TargetStep, cache: KvCache, watch: Stopwatch) -> None:
        self._program, self._buffers, self._step, self._cache, self._watch = program, buffers, step, cache, watch
        self.outstanding: Launch | None = None

    def serves(self, sequences: abc.Sequence[Sequence]) -> bool:
        """Whether a round of all these may be launched: one at least decodes, and nobody watches or drafts."""
        if not self._program.launches or self._cache.alignment is not None:
            return False
        decodes = False
        for each in sequences:
            if not each.plain:
                return False
            decodes = decodes or each.decoding
        return decodes

    def launch(self, sequences: abc.Sequence[Sequence], chunk: int) -> Launch:
        """Launch a round of the sequences, which takes at most `chunk` tokens of prompts; `advance` is next."""
        step, cache, alone = self._step, self._cache, self._cache.alone
        if alone:
            placed = [lay_out_one(step, cache, sequences[0], sequences[0].computed, chunk, None)]
        else:
            with self._watch:
                placed = lay_out(step, cache, {each: each.computed for each in sequences}, {}, chunk)
        return Launch(placed, self._program.launch(), alone)

    def advance(self, launch: Launch) -> None:
        """Commit the KV of the round that was launched last, as soon as the device has taken its step."""
        self._buffers.taken()
        for each in launch.placed:
            each.sequence.computed = each.start + each.fed
            each.sequence.unseen += each.root >= 0
        if launch.alone:
            self._cache.commit_alone(launch.placed[0].fed, None)
        else:
            with self._watch:
                self._cache.commit()

    def collect(self, launch: Launch) -> None:
        """Wait for a round: its tokens are in the program's `tokens` then."""
        self._program.collect(launch.landing)
        for each in launch.placed:
            each.sequence.unseen -= each.root >= 0

    def settle(self) -> None:
        """Wait for all that is enqueued, after a failure: the host writes next what it reads."""
        if self._buffers.exchange is not None:
            with suppress(PlanError):  # the first one is told
                self._buffers.exchange.settle()

    def drop(self, sequence: Sequence) -> None:
        """A sequence takes no token of the outstanding round. The KV that this gives it stays where the sequence has
        the token that was fed; where its text was stopped before that token, `Engine.finish` cuts the KV."""
        launch = self.outstanding
        if launch is None:
            return
        sequence.unseen = 0
        launch.placed = [each for each in launch.placed if each.sequence is not sequence]
        if not launch.placed:
            self.outstanding = None
