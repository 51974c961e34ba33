"""What a pass cost and brought, for those who decide by it: adaptive speculation, how much of a draft is verified, and
partial KV that runs ahead."""

from __future__ import annotations

from collections import abc
from collections.abc import Mapping

from outrider.runtime.drafters.base import Draft
from outrider.runtime.execution.layout import Placement
from outrider.runtime.sequence import CommittedTokens, Sequence


def note_round(
    placed: abc.Sequence[Placement],
    found: abc.Sequence[CommittedTokens],
    confirming: Mapping[Sequence, Draft],
    partial_room: Mapping[Sequence, int] | None,
    began: float,
    drafted_at: float,
    verified_at: float | None,
    ended: float,
) -> None:
    """Give adaptive speculation and partial KV what the pass of `placed` brought (`found`) and cost: it `began`,
    had its drafts (`drafted_at`), began to verify them and `ended` at these seconds. `verified_at` is None where one
    launch drafts and verifies; else, of a draft in place, it is later than `drafted_at`.

    Tentative tokens were `confirming` over the full cache; `partial_room` is None but for a pass over the partial one.
    """
    for each in found:
        if partial_room is not None or each.sequence.adaptive is not None or each.sequence.ahead is not None:
            break
    else:  # none of them watches
        return
    settled, by_drafts, together, rows = True, False, 0, 0
    for laid in placed:  # loops, not generators: every round pays for this
        rows += laid.fed + laid.drafted
        settled = settled and laid.fed == 1  # a pass that also catches up says nothing
        by_drafts = by_drafts or laid.drafted > 0
    for committed in found:
        together += len(committed.token_ids)
    for each in found:
        sequence, adaptive, ahead = each.sequence, each.sequence.adaptive, each.sequence.ahead
        if each.error is not None:
            continue
        drafting = adaptive is None or adaptive.drafting
        # What a head reads before a plain round belongs to the drafts.
        seconds = ended - (began if drafting or (by_drafts and len(placed) > 1) else drafted_at)
        tokens, others = len(each.token_ids), together - len(each.token_ids)
        length = sequence.verify_length
        if length is not None and verified_at is not None and drafting and settled and not confirming:
            length.note_round(rows, together, ended - verified_at, ended - began)
        if each.tentative:
            assert ahead is not None
            says = ahead.note_pass(1000 * (ended - began), tokens, each.drafted)
            if says and adaptive is not None and sequence.disabled == adaptive.disabled:
                adaptive.note(ended - began, tokens, others=others, partial=True)
            continue
        stats = sequence.generation.stats
        if partial_room is not None:
            stats.partial_rounds += 1
            stats.partial_ms += 1000 * (ended - began)
        if sequence in confirming:
            assert ahead is not None
            checked = len(confirming[sequence])
            if checked:
                ahead.note_confirmed(1000 * (ended - began), checked, min(each.accepted, checked))
            continue
        stats.plain_rounds += not drafting
        if settled and adaptive is not None and (ahead is None or ahead.steady):
            adaptive.note(seconds, tokens, others=others)
        if ahead is not None:
            plain = settled and (drafting or sequence.disabled) and sequence.rounds > 1
            ahead.note_plain(1000 * seconds, tokens, settled=plain)
