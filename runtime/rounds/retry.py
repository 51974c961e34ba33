"""Retry a pass that an op has refused, one sequence at a time: a faulty sequence ends alone."""

from __future__ import annotations

import logging
from collections import abc

from outrider.plans.errors import OpError
from outrider.runtime.rounds.decode import decode
from outrider.runtime.rounds.parts import Parts
from outrider.runtime.sequence import CommittedTokens, Sequence

_LOG = logging.getLogger("outrider")


def retry_each(parts: Parts, live: abc.Sequence[Sequence], chunk: int) -> list[CommittedTokens]:
    """Retry a pass one sequence at a time: a sequence's tokens depend on no other.

    KV of a prompt that is not finite may come from another sequence of the same pass, so every such prompt is computed
    again, alone.
    """
    for each in [*live, *(other for other in parts.live.values() if other.over)]:
        lost = prompt_damaged(parts, each) or (each.over and not parts.cache.is_finite(each.number))
        roll_back(parts, each, each.shared if lost else each.computed)
    return [committed for each in live for committed in _retry_alone(parts, each, chunk)]


def _retry_alone(parts: Parts, sequence: Sequence, chunk: int) -> list[CommittedTokens]:
    """Retry a pass for one sequence; a prompt that starts over runs up to its first token.

    A sequence that is refused again loses its drafter, because a faulty draft must change no token. A sequence that is
    refused without one ends with the error.
    """
    anew = sequence.computed == sequence.shared
    generation, drafters = sequence.generation, parts.drafting.drafters_of(sequence)
    rejects = drafters.engine is not None and drafters.engine.rejects
    while True:
        try:
            while rejects and generation.rounds and not sequence.decoding:  # the features that the drafter reads
                decode(parts, [sequence], parts.full, min(chunk, sequence.pending - 1))
            prompted = not generation.rounds
            committed = decode(parts, [sequence], parts.full, chunk)
            if prompted and not parts.cache.is_finite(sequence.number):
                raise OpError("the KV of its prompt is not finite")
            if committed or not anew:
                return committed
        except OpError as error:
            if drafters.disabled or not drafters.any:
                roll_back(parts, sequence, sequence.shared)
                generation.error = error
                return [CommittedTokens(sequence, [], error=error)]
            roll_back(parts, sequence, sequence.shared if prompt_damaged(parts, sequence) else sequence.computed)
            _LOG.warning("sequence %d continues without its drafter: %s", sequence.id, error)
            parts.adaptive.give_back(generation.request, drafters.adaptive)
            drafters.disabled, drafters.adaptive = True, None


def prompt_damaged(parts: Parts, sequence: Sequence) -> bool:
    """Whether a sequence without a generated token has KV that is not finite."""
    return not sequence.generation.rounds and not parts.cache.is_finite(sequence.number)


def rewind(parts: Parts, sequence: Sequence, end: int) -> None:
    """A pass has failed: what it fed the sequence, from token `end` on, is to be computed again."""
    sequence.unseen = 0
    parts.truncate(sequence, min(sequence.computed, end, len(sequence.tokens) - 1))


def roll_back(parts: Parts, sequence: Sequence, end: int) -> None:
    """Rewind a sequence after a pass that an op has refused, and zero KV that is not finite in free slots.

    Engines that multiply masked values by 0 read those slots.
    """
    rewind(parts, sequence, end)
    caches = parts.caches
    if parts.partial is not None:
        caches.append(parts.partial.cache)
        parts.partial.cache_for(sequence).truncate(end)
    if end <= sequence.shared:
        parts.drafting.truncate(sequence, end)
    if not parts.drafting.drafters_of(sequence).disabled and not sequence.over:
        parts.catch_up_drafters(sequence)
    for cache in caches:
        cache.erase(sequence.number)
