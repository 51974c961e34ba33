"""A sequence: its tokens, how many of them have KV, and the generation that it grows by.

A branch, a session's text and a served request are all sequences. What drafters, the partial KV cache and rounds know
of a sequence they keep themselves, by its number.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.plans.errors import OpError, RequestError
from outrider.runtime.generation import FinishReason, GrowingGeneration
from outrider.runtime.sampling import TokenLogprob
from outrider.runtime.trace import RoundTrace

UNSEEN = -1
"""What is laid out for a token that the host has not seen: the device puts it there."""


@dataclass(eq=False, slots=True)
class Sequence:
    """State between steps: `tokens`, the last of which is the tip, and `computed`, how many of them have KV.

    A step feeds the tokens without KV, so that prefill, decoding, speculation and continuing after a cut are one loop.
    `number` is the branch number of the sequence's slots and of its sampling settings. The first `shared` tokens are
    the prefix, whose KV all sequences of the step loop share. In lossless partial KV, tokens from `confirmed` on are
    tentative: passes over the partial cache chose them, and a pass over the full one will confirm or retract them.
    After its tokens there may be `unseen` ones, which a round on the device chooses meanwhile. `generation` is the one
    that runs, or the last one; `StepLoop.start` sets it.
    """

    id: int
    number: int
    tokens: list[int]
    shared: int = 0
    computed: int = 0
    confirmed: int | None = None
    unseen: int = 0
    generation: GrowingGeneration = field(init=False)

    @property
    def length(self) -> int:
        """Number of its tokens, unseen ones included."""
        return len(self.tokens) + self.unseen

    @property
    def pending(self) -> int:
        """Tokens without KV."""
        return len(self.tokens) + self.unseen - self.computed

    def part(self, start: int, count: int) -> list[int]:
        """Return `count` of its tokens from `start` on, UNSEEN for those that nobody has seen."""
        found = self.tokens[start : start + count]
        return found if len(found) == count else found + [UNSEEN] * (count - len(found))

    @property
    def generated(self) -> list[int]:
        """Tokens of the generation that runs."""
        return self.tokens[self.generation.prompted :]

    @property
    def over(self) -> bool:
        """Whether no step serves its generation any more."""
        own = self.generation
        return own.stopped or own.reason is not None or own.error is not None

    @property
    def decoding(self) -> bool:
        """Whether all of its prompt has been computed."""
        return self.pending <= 1

    @property
    def tentative(self) -> list[int]:
        """Tokens that wait to be confirmed by a pass over the full cache."""
        return [] if self.confirmed is None else self.tokens[self.confirmed :]


@dataclass(slots=True)
class CommittedTokens:
    """Tokens that a pass has added to a sequence, committed or `tentative`; their text has not been looked at yet."""

    sequence: Sequence
    token_ids: list[int]
    logprobs: list[TokenLogprob] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    reason: FinishReason | None = None
    error: RequestError | OpError | None = None
    tentative: bool = False
    round: RoundTrace | None = None  # for who watches
