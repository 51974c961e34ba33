"""A step: a round of all sequences, or one over each KV cache that they read."""

from __future__ import annotations

from collections import abc

from outrider.plans.errors import OpError, PlanError
from outrider.runtime.generation import FinishReason
from outrider.runtime.rounds.decode import decode
from outrider.runtime.rounds.launched import LaunchedRounds
from outrider.runtime.rounds.parts import Parts
from outrider.runtime.rounds.retry import retry_each
from outrider.runtime.rounds.views import PartialKvView
from outrider.runtime.sequence import CommittedTokens, Sequence


def step(
    parts: Parts, launched: LaunchedRounds, sequences: abc.Sequence[Sequence], chunk: int
) -> list[CommittedTokens]:
    """Serve every sequence once; return the tokens that each gets, or why it ends."""
    found: list[CommittedTokens] = []
    full: list[Sequence] = []
    for each in sequences:
        if each.over:
            continue
        own = each.generation
        if own.stuck is not None or own.request.cancelled:
            launched.drop(each)
            own.error = own.stuck
            if own.stuck is None:
                own.reason = FinishReason.CANCELLED
            found.append(CommittedTokens(each, [], reason=own.reason, error=own.error))
            continue
        switch_drafters(parts, each)
        full.append(each)
    if launched.outstanding is not None or (full and launched.serves(full)):
        return found + launched.step(full, chunk)
    if parts.partial is not None and not parts.drafting.needs_features(parts.live.values()):
        full, partial_room = parts.partial.divide(full, parts.passes)
        if partial_room:
            try:
                found += decode(parts, list(partial_room), PartialKvView(parts.partial, partial_room), chunk)
            except PlanError as error:
                for each in partial_room:
                    _disable_partial(parts, each, error)
                full += partial_room
    if full:
        try:
            found += decode(parts, full, parts.full, chunk)
        except OpError:
            found += retry_each(parts, full, chunk)
    return found


def switch_drafters(parts: Parts, sequence: Sequence) -> None:
    """Follow adaptive speculation where it has disabled the sequence's drafters, or enabled them again."""
    drafters = parts.drafting.drafters_of(sequence)
    if drafters.adaptive is None or drafters.disabled == drafters.adaptive.disabled:
        return
    if sequence.confirmed is not None:  # not before its tentative tokens are confirmed
        return
    drafters.disabled = drafters.adaptive.disabled
    if not drafters.disabled:
        parts.catch_up_drafters(sequence)


def _disable_partial(parts: Parts, sequence: Sequence, error: PlanError) -> None:
    """Let a sequence continue over the full cache after a pass over the partial one has failed."""
    assert parts.partial is not None
    parts.partial.disable(sequence, error)
    if parts.run_ahead(sequence) is not None and not parts.drafting.drafters_of(sequence).disabled:
        parts.catch_up_drafters(sequence)  # the drafter has missed what the failed pass replaced
