"""Plan a round: what each sequence feeds and may draft, its draft, where it lies in the step, and the program."""

from __future__ import annotations

from collections import abc
from time import perf_counter

from outrider.plans import names
from outrider.runtime.drafters.base import Draft
from outrider.runtime.execution.layout import Placement, lay_out
from outrider.runtime.execution.program import Program
from outrider.runtime.rounds.parts import Parts
from outrider.runtime.rounds.propose import DraftBudget, propose
from outrider.runtime.rounds.round import Round, RoundClock
from outrider.runtime.rounds.views import KvView
from outrider.runtime.sequence import Sequence


def plan_round(parts: Parts, sequences: abc.Sequence[Sequence], view: KvView, chunk: int) -> Round:
    """Draft, and lay out the step of a pass that takes at most `chunk` tokens of prompts."""
    clock, cache, alone = RoundClock(), view.cache, parts.cache.alone
    starts: dict[Sequence, int] = {}
    budgets: dict[int, DraftBudget] = {}
    confirming: dict[Sequence, Draft] = {}
    for each in sequences:
        starts[each], draft = view.begin(each)
        if draft is None:
            budgets[each.number] = _budget(parts, each, starts[each], view, chunk)
        else:
            confirming[each], budgets[each.number] = draft, DraftBudget(each, 0)
    following = [each for each in parts.live.values() if not parts.drafting.drafters_of(each).disabled]
    nodes = parts.step.max_nodes + 1 - len(sequences) - sum(map(len, confirming.values()))
    if alone:
        cache.compact_if_worthwhile(1 + parts.longest_draft)  # slots of ended neighbours must not prevent a draft
    past = cache.length if alone else None
    proposed = {} if alone and confirming else propose(parts, budgets, following, nodes, past)
    proposed |= {each.number: draft for each, draft in confirming.items()}
    clock.drafted = perf_counter()
    with parts.watch:
        placed = lay_out(parts.step, cache, starts, proposed, chunk, alone=alone)
    if parts.rejecting:
        _lay_out_probs(parts, placed)
    return Round(view, placed, _choose_program(parts, placed, view), confirming, clock)


def _budget(parts: Parts, sequence: Sequence, start: int, view: KvView, chunk: int) -> DraftBudget:
    """Return what may be drafted after the tip of a sequence that is fed from token `start` on."""
    pending, generation = len(sequence.tokens) - start, sequence.generation
    request = generation.request
    # By rejection the first token has no draft: tokens must not depend on whether a prompt's KV was known.
    unready = parts.rejecting and generation.rounds == 0 and request.drafter in parts.rejecting
    if not parts.drafting.drafters_of(sequence).drafting or pending > view.feeds(chunk) or unready:
        return DraftBudget(sequence, 0)
    nodes, most = min(parts.most_nodes, view.room(sequence) - 1), request.limits.tokens
    return DraftBudget(sequence, nodes if most is None else min(nodes, most), pending == 1)


def _choose_program(parts: Parts, placed: abc.Sequence[Placement], view: KvView) -> Program:
    drafted, tips = 0, False
    for each in placed:
        drafted += each.drafted
        tips |= each.root >= 0
    if not tips:
        return parts.programs[names.PREFILL]
    name = names.VERIFY if drafted else names.DECODE
    draft = placed[0].draft
    if drafted and draft is not None and draft.program is not None:
        name = draft.program
    return parts.programs[view.program(name)]


def _lay_out_probs(parts: Parts, placed: abc.Sequence[Placement]) -> None:
    """Put the distributions that chains were drawn from where acceptance by rejection reads them."""
    for each in placed:
        draft = each.draft
        if draft is not None and draft.probs is not None and each.drafted:
            probs, first = parts.buffers.array(names.TARGET, names.DRAFT_PROBS), each.first + 1
            probs[first : first + each.drafted] = draft.probs[: each.drafted]
            parts.buffers.send(names.TARGET, names.DRAFT_PROBS, (first + each.drafted) * probs.shape[1])
