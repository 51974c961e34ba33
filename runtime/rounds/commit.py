"""Commit a round: KV to the caches, tokens to the drafters, costs to those who decide by them."""

from __future__ import annotations

from collections import abc
from time import perf_counter

from outrider.runtime.rounds.parts import Parts
from outrider.runtime.rounds.round import Round
from outrider.runtime.sequence import CommittedTokens, Sequence


def commit_round(parts: Parts, round: Round, found: abc.Sequence[CommittedTokens]) -> None:
    """Commit what was accepted. KV of accepted tokens after one that ends a generation stays until `StepLoop.finish`
    or the next generation drops it."""
    with parts.watch:
        round.view.cache.commit(round.kept)
    for each in round.placed:
        sequence = each.sequence
        round.view.commit(sequence, each.start + each.taken)
        if parts.drafting.drafters_of(sequence).any:
            drafted = each.draft if each.drafted and sequence not in round.confirming else None
            parts.drafting.commit(each, each.taken, drafted, parts.passes)
    parts.keep_beginnings(round.placed)
    if parts.partial is not None:
        parts.partial.note_step(round.placed, parts.passes, over_partial=round.view.partial)
    _note_costs(parts, round, found)


def _note_costs(parts: Parts, round: Round, found: abc.Sequence[CommittedTokens]) -> None:
    """Report what the round brought and cost to adaptive speculation, to the choice of how much is verified, and to
    partial KV that runs ahead."""
    partial, clock, ended = round.view.partial, round.clock, perf_counter()
    if not partial and not any(_watches(parts, each.sequence) for each in found):
        return
    settled, by_drafts, together, rows = True, False, 0, 0
    for laid in round.placed:  # loops, not generators: every round pays for this
        rows += laid.fed + laid.drafted
        settled = settled and laid.fed == 1  # a pass that also catches up says nothing about drafts
        by_drafts = by_drafts or laid.drafted > 0
    for committed in found:
        together += len(committed.token_ids)
    for each in found:
        if each.error is not None:
            continue
        sequence, ahead = each.sequence, parts.run_ahead(each.sequence)
        drafters = parts.drafting.drafters_of(sequence)
        adaptive = drafters.adaptive
        drafting = adaptive is None or adaptive.drafting
        # What a head consumes before a plain round belongs to the drafts.
        seconds = ended - (clock.began if drafting or (by_drafts and len(round.placed) > 1) else clock.drafted)
        tokens, others = len(each.token_ids), together - len(each.token_ids)
        length, whole = drafters.verify_length, ended - clock.began
        if length is not None and clock.verified is not None and drafting and settled and not round.confirming:
            length.note_round(rows, together, ended - clock.verified, whole)
        if each.tentative:
            assert ahead is not None
            decides = ahead.note_pass(1000 * whole, tokens, each.drafted)
            if decides and adaptive is not None and drafters.disabled == adaptive.disabled:
                adaptive.note(whole, tokens, others=others, partial=True)
            continue
        stats = sequence.generation.stats
        if partial:
            stats.partial_rounds += 1
            stats.partial_ms += 1000 * whole
        if sequence in round.confirming:
            assert ahead is not None
            checked = len(round.confirming[sequence])
            if checked:
                ahead.note_confirmed(1000 * whole, checked, min(each.accepted, checked))
            continue
        stats.plain_rounds += not drafting
        if settled and adaptive is not None and (ahead is None or ahead.steady):
            adaptive.note(seconds, tokens, others=others)
        if ahead is not None:
            plain = settled and (drafting or drafters.disabled) and sequence.generation.rounds > 1
            ahead.note_plain(1000 * seconds, tokens, settled=plain)


def _watches(parts: Parts, sequence: Sequence) -> bool:
    """Whether something decides by what rounds of the sequence cost."""
    return parts.drafting.drafters_of(sequence).adaptive is not None or parts.run_ahead(sequence) is not None
