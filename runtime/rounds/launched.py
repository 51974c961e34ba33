"""Rounds that the host launches before it has seen the tokens of the round before: it follows the device by one step.

Such a round gives each sequence one token, whichever it is, so that places in the KV cache are known before the tokens,
which stay on the device. What a sequence is given after its end counts for nothing.
"""

from __future__ import annotations

from collections import abc
from contextlib import suppress
from dataclasses import dataclass

from outrider.plans import names
from outrider.plans.errors import OpError, PlanError
from outrider.runtime.execution.layout import Placement, lay_out
from outrider.runtime.rounds.accept import accept
from outrider.runtime.rounds.parts import Parts
from outrider.runtime.rounds.retry import retry_each, rewind
from outrider.runtime.sequence import CommittedTokens, Sequence


@dataclass(slots=True)
class Launch:
    """A round on the device: `placed` are those that are still to get its tokens, from `landing` of the program."""

    placed: list[Placement]
    landing: int


class LaunchedRounds:
    """The decoding rounds that may be launched, of which one may be `outstanding` between steps."""

    def __init__(self, parts: Parts) -> None:
        self._parts, self._program = parts, parts.programs[names.DECODE]
        self.outstanding: Launch | None = None

    def serves(self, sequences: abc.Sequence[Sequence]) -> bool:
        """Whether a round of all these may be launched: one at least decodes, and nobody watches or drafts."""
        if not self._program.launches or self._parts.cache.alignment is not None:
            return False
        decodes = False
        for each in sequences:
            if not self._is_plain(each):
                return False
            decodes = decodes or each.decoding
        return decodes

    def _is_plain(self, sequence: Sequence) -> bool:
        """Whether the sequence's rounds give it a token each, on which nothing of the next round depends but that
        token."""
        parts, own = self._parts, sequence.generation
        drafters = parts.drafting.drafters_of(sequence)
        return (
            not drafters.any
            and drafters.adaptive is None
            and (parts.partial is None or parts.partial.run_of(sequence) is None)
            and not own.rules
            and own.request.logprobs is None
            and own.request.on_round is None
            and not own.watched
        )

    def step(self, sequences: abc.Sequence[Sequence], chunk: int) -> list[CommittedTokens]:
        """Commit a round that is outstanding, or is launched here, once the one after it is launched too."""
        parts, present, following = self._parts, self.outstanding, None
        try:
            if present is None:
                present = self._launch(sequences, chunk)
                self._advance(present)
            continuing = [each for each in sequences if each.length < each.generation.end]
            if self.serves(continuing):
                following = self._launch(continuing, chunk)
                for each in present.placed:
                    each.overtaken = True
            self.collect(present)
            if following is not None:
                self._advance(following)
            self.outstanding = following
        except BaseException as error:
            self.outstanding = None
            if parts.buffers.exchange is not None:
                with suppress(PlanError):  # the first one is raised
                    parts.buffers.exchange.settle()  # the host writes next what the device reads
            for failed in (present, following):
                for each in () if failed is None else failed.placed:
                    rewind(parts, each.sequence, each.start)
            if isinstance(error, OpError):
                return retry_each(parts, sequences, chunk)
            raise
        return self._commit(present)

    def _launch(self, sequences: abc.Sequence[Sequence], chunk: int) -> Launch:
        """Launch a round of the sequences, which takes at most `chunk` tokens of prompts; `_advance` is next."""
        parts, starts = self._parts, {each: each.computed for each in sequences}
        parts.passes += 1
        with parts.watch:
            placed = lay_out(parts.step, parts.cache, starts, {}, chunk, alone=parts.cache.alone)
        return Launch(placed, self._program.launch())

    def _advance(self, launch: Launch) -> None:
        """Commit the KV of the round that was launched last, as soon as the device has taken its step."""
        self._parts.buffers.taken()
        for each in launch.placed:
            each.sequence.computed = each.start + each.fed
            each.sequence.unseen += each.root >= 0
        with self._parts.watch:
            self._parts.cache.commit()

    def collect(self, launch: Launch) -> None:
        """Wait for a round: its tokens are in the program's `tokens` then."""
        self._program.collect(launch.landing)
        for each in launch.placed:
            each.sequence.unseen -= each.root >= 0

    def _commit(self, launch: Launch) -> list[CommittedTokens]:
        """Commit the tokens of a round, whose KV was committed when it was launched."""
        found: list[CommittedTokens] = []
        for each in launch.placed:
            if each.root < 0:  # a part of its prompt was fed
                each.sequence.generation.stats.prefill_passes += 1
            elif not each.sequence.over:
                found.append(accept(self._parts, each, self._program, self._parts.full, 1))
        self._parts.keep_beginnings(launch.placed)
        return found

    def drop(self, sequence: Sequence) -> None:
        """A sequence takes no token of the outstanding round. The KV that this gives it stays where the sequence has
        the token that was fed; where its text was stopped before that token, `StepLoop.finish` cuts the KV."""
        launch = self.outstanding
        if launch is None:
            return
        sequence.unseen = 0
        launch.placed = [each for each in launch.placed if each.sequence is not sequence]
        if not launch.placed:
            self.outstanding = None
