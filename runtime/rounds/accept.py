"""Accept: the tokens that the target chose after each tip, up to one that ends the generation."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outrider.plans import names
from outrider.plans.errors import OpError, PlanError, RequestError
from outrider.runtime.execution.layout import Placement
from outrider.runtime.execution.program import Program
from outrider.runtime.rounds.parts import Parts
from outrider.runtime.rounds.round import Round
from outrider.runtime.rounds.trace import trace_round
from outrider.runtime.rounds.views import KvView
from outrider.runtime.sampling import likeliest, logprobs
from outrider.runtime.sequence import CommittedTokens


def accept_round(parts: Parts, round: Round) -> list[CommittedTokens]:
    """Add the chosen tokens to their sequences; note in each placement which KV stays."""
    found: list[CommittedTokens] = []
    program = round.program
    counts = [1 if each.root < 0 or program.counts is None else int(program.counts[each.tree]) for each in round.placed]
    if program.kept is not None:
        round.kept = program.kept[: int(parts.buffers.array(names.TARGET, names.KEPT_COUNT)[0])].copy()
    for each, count in zip(round.placed, counts, strict=True):
        each.taken = each.fed
        each.kept = _kept_of(parts, each, round.kept)
        if each.root < 0:  # a part of its prompt was fed
            each.sequence.generation.stats.prefill_passes += 1
            continue
        committed = accept(parts, each, program, round.view, count)
        each.taken += max(1, len(committed.token_ids)) - 1
        found.append(committed)
    return found


def _kept_of(parts: Parts, placed: Placement, kept: NDArray[np.int64] | None) -> NDArray[np.int64] | None:
    """A sequence's tokens of the step whose KV stays; without `kept`, those that were fed: None for all of the step."""
    branch, number = parts.step.branch, placed.sequence.number
    if kept is None:
        if placed.fed == parts.step.new_tokens:
            return None
        return np.flatnonzero(branch[: parts.step.new_tokens] == number)[: placed.fed]
    mine: NDArray[np.int64] = kept[branch[kept] == number]
    return mine


def accept(parts: Parts, placed: Placement, program: Program, view: KvView, count: int) -> CommittedTokens:
    """Add the `count` tokens that the target chose after one tip to the sequence, up to one that ends it."""
    sequence, tokens = placed.sequence, program.tokens
    generation = sequence.generation
    assert tokens is not None, "a program of the target that commits tokens"
    room = view.room(sequence)
    chosen: list[int]
    if count == 1:
        chosen = [int(tokens[placed.first])]
    else:
        chosen = tokens[placed.first : placed.first + min(count, room)].tolist()
    committed = CommittedTokens(sequence, [], drafted=placed.drafted, accepted=count - 1)
    if placed.draft is not None:
        generation.stats.left_out += placed.draft.left_out
    stuck: RequestError | None = None
    if generation.rules:
        chosen, stuck = _apply_rules(parts, placed, program, chosen)
    if (ahead := view.run_ahead(sequence)) is not None:
        committed.tentative = True
        if sequence.confirmed is None:
            sequence.confirmed = len(sequence.tokens)
        committed.token_ids = ahead.cut(chosen)
        ahead.over = ahead.over or stuck is not None  # a pass over the full cache finds out whether it is
        sequence.tokens += committed.token_ids
        return committed
    if chosen:
        generation.stuck = stuck
        committed.token_ids, committed.reason = generation.cut(chosen, len(chosen) == room)
    else:
        committed.error = stuck
    generation.reason, generation.error = committed.reason, committed.error
    parts.chosen_by[sequence.number] = placed
    _observe(parts, placed, committed)
    if generation.request.on_round is not None:
        committed.round = trace_round(parts, placed, committed)
    sequence.tokens += committed.token_ids
    generation.rounds += 1
    return committed


def logits_index(placed: Placement, index: int) -> int:
    """Return the logits index that the `index`-th token of a round was chosen by."""
    node = 0 if placed.kept is None else int(placed.kept[placed.fed - 1 + index]) - placed.root
    return placed.first + node


def _observe(parts: Parts, placed: Placement, committed: CommittedTokens) -> None:
    """Read the logits that the tokens were chosen by, for log-probabilities and for a drafter that learns of them."""
    sequence, request = placed.sequence, placed.sequence.generation.request
    drafters = parts.drafting.drafters_of(sequence)
    host = drafters.host
    wanted = 0 if host is None else min(host.filler_top_k, parts.geometry.vocab_size)
    if request.logprobs is None and not wanted:
        return
    for index, token in enumerate(committed.token_ids):
        at = logits_index(placed, index)
        logits = parts.logits(at, at + 1)[0]
        if request.logprobs is not None:
            try:
                committed.logprobs.append(logprobs((placed.raw_logits or {}).get(at, logits), token, request.logprobs))
            except PlanError as error:  # infinite logits, from which a token can still be chosen
                committed.error = sequence.generation.error = OpError(str(error))
                break
        if host is not None and wanted and not drafters.disabled:
            likely = likeliest(logits, wanted)[::-1]
            host.observe(len(sequence.tokens) + index, likely[logits[likely] > -np.inf])


def _apply_rules(
    parts: Parts, placed: Placement, program: Program, chosen: list[int]
) -> tuple[list[int], RequestError | None]:
    """Return the tokens of a pass that the sequence's rules allow, and why none may follow them, if so."""
    try:
        if not program.halts:
            return [parts.ruled_walk.choose_again(placed)], None
    except RequestError as error:
        return [], error
    if placed.stuck is None or placed.stuck[0] >= len(chosen):
        return chosen, None
    kept, reason = placed.stuck
    return chosen[:kept], reason
