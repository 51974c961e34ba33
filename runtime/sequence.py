"""A sequence: its tokens, how many of them have KV, what drafts for it, and the request that it is generated for.

A branch, a session's text and a served request are all sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from outrider.plans.errors import OpError, RequestError
from outrider.runtime.drafters.adaptive import AdaptiveSpeculation
from outrider.runtime.drafters.base import HostDrafter
from outrider.runtime.drafters.verify_length import VerifyLength
from outrider.runtime.generation import FinishReason, GrowingGeneration
from outrider.runtime.options.request import Request
from outrider.runtime.sampling import TokenLogprob
from outrider.runtime.text.rules import LogitsRule
from outrider.runtime.trace import Round

if TYPE_CHECKING:
    from outrider.runtime.drafters.engine import EngineDrafter
    from outrider.runtime.execution.layout import Placement
    from outrider.runtime.kv.partial import PartialCache
    from outrider.runtime.kv.partial_policy import Budget
    from outrider.runtime.kv.run_ahead import RunAhead


UNSEEN = -1
"""What is laid out for a token that the host has not seen: the device puts it there."""


@dataclass(eq=False, slots=True)
class Sequence:
    """State between steps: `tokens`, the last of which is the tip, and `computed`, how many of them have KV.

    A step feeds the tokens without KV, so that prefill, decoding, speculation and continuing after a cut are one loop.
    `number` is the branch number of the sequence's slots and of its sampling settings. The first `shared` tokens are
    the prefix, whose KV all sequences of the engine share. In lossless partial KV, tokens from `confirmed` on are
    tentative: passes over the partial cache chose them, and a pass over the full one will confirm or retract them.
    After its tokens there may be `unseen` ones, which a round on the device chooses meanwhile.
    """

    id: int
    number: int
    tokens: list[int]
    shared: int = 0
    computed: int = 0
    confirmed: int | None = None
    unseen: int = 0
    owner: str = ""  # tenant and `cache_salt` of its request: the prefix cache and memories are separate for each
    watched: bool = False  # somebody has asked for the logits of a token of the generation
    host_drafters: dict[str, HostDrafter] = field(default_factory=dict)  # those that have been asked, by name

    # Of the generation that runs; set by `Engine.start`.
    request: Request = field(init=False)
    generation: GrowingGeneration = field(init=False)
    prompted: int = 0  # tokens before the first generated one
    end: int = 0  # most tokens that it may come to
    rules: tuple[LogitsRule, ...] = ()
    host_drafter: HostDrafter | None = None
    engine_drafter: EngineDrafter | None = None
    least: int = 1  # tokens that `host_drafter` must foresee, else `engine_drafter` drafts
    reach: int = 8  # nodes that a host's draft may have in a pass of several, by how much of the last ones was accepted
    adaptive: AdaptiveSpeculation | None = None
    disabled: bool = False  # its drafters are disabled, and take in no committed tokens
    ahead: RunAhead | None = None
    partial: PartialCache | None = None
    budget: Budget | None = None  # of blocks that `partial` retrieves
    queries: tuple[NDArray[np.int64], int] | None = None  # token indices of its last pass over the full cache: which
    began: float = 0.0  # seconds of the engine's clock
    rounds: int = 0  # passes that committed something
    inserted: bool = False  # whether the prefix cache has its beginning
    reason: FinishReason | None = None  # why its tokens end
    stopped: bool = False  # whether its text has ended
    stuck: RequestError | None = None  # why no token may follow, which the next step reports
    error: RequestError | OpError | None = None  # why it cannot continue
    chosen_by: Placement | None = None  # where its last tokens' logits are

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
    def plain(self) -> bool:
        """Whether its rounds give it a token each, on which nothing of the next round depends but that token."""
        request = self.request
        return (
            self.host_drafter is None
            and self.engine_drafter is None
            and self.adaptive is None
            and self.partial is None
            and not self.rules
            and request.logprobs is None
            and request.on_round is None
            and not self.watched
        )

    @property
    def generated(self) -> list[int]:
        """Tokens of the generation that runs."""
        return self.tokens[self.prompted :]

    @property
    def over(self) -> bool:
        """Whether no step serves it any more."""
        return self.stopped or self.reason is not None or self.error is not None

    @property
    def decoding(self) -> bool:
        """Whether all of its prompt has been computed."""
        return self.pending <= 1

    @property
    def drafting(self) -> bool:
        """Whether adaptive speculation lets its drafters draft in the next round."""
        return not self.disabled and (self.adaptive is None or self.adaptive.drafting)

    @property
    def verify_length(self) -> VerifyLength | None:
        """How much of its drafts is verified; None where they are verified whole."""
        return None if self.adaptive is None else self.adaptive.verify_length

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
    round: Round | None = None  # for who watches
