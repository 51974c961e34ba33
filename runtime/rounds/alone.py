"""Passes of a sequence that is alone which commit no generated token: prompts, logits, look-ahead, measured rounds."""

from __future__ import annotations

from collections import abc
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from outrider.plans import names
from outrider.plans.errors import RequestError
from outrider.runtime.drafters.base import chain_draft
from outrider.runtime.execution.layout import Placement, lay_out
from outrider.runtime.options.request import Request
from outrider.runtime.rounds.accept import logits_index
from outrider.runtime.rounds.parts import Parts
from outrider.runtime.sequence import Sequence
from outrider.runtime.stats import Stats


def logits_of(parts: Parts, sequence: Sequence, index: int) -> NDArray[np.float32]:
    """Return the logits f32 `[vocab]` that the `index`-th token of the last round was chosen by: a view."""
    at = 0  # its first pass has failed
    if (chosen_by := parts.chosen_by.get(sequence.number)) is not None:
        if chosen_by.overtaken:
            _compute_again(parts, sequence, chosen_by)
        at = logits_index(chosen_by, index)
    logits: NDArray[np.float32] = parts.logits(at, at + 1)[0]
    return logits


def _compute_again(parts: Parts, sequence: Sequence, chosen_by: Placement) -> None:
    """Compute the logits again that a launched round has overwritten."""
    chosen = chosen_by.start + chosen_by.fed  # the place of the token
    parts.truncate(sequence, min(sequence.computed, chosen - 1))
    _feed(parts, sequence, chosen, tip=True)
    chosen_by.first, chosen_by.overtaken, sequence.generation.watched = 0, False, True


def _feed(parts: Parts, sequence: Sequence, stop: int, *, tip: bool) -> None:
    """Compute the KV of the sequence's tokens up to `stop`; with `tip`, the logits after the last of them too."""
    part = sequence.tokens[sequence.computed : stop]
    parts.cache.begin_alone(part, sequence.computed, sequence.number)
    if tip:
        parts.step.append_tip(len(part) - 1)
    parts.passes += 1
    parts.programs[names.PREFILL].run()
    parts.cache.commit()
    sequence.computed = stop
    parts.loaded.files.check()


def read(parts: Parts, sequence: Sequence, request: Request, stats: Stats) -> NDArray[np.float32] | None:
    """Give all of the sequence's tokens KV; logits f32 `[1, vocab]` after them, None if it was cancelled."""
    chunk, tokens = parts.geometry.prefill_chunk, sequence.tokens
    parts.truncate(sequence, min(sequence.computed, len(tokens) - 1))
    stats.prompt_tokens, stats.reused_tokens = len(tokens), sequence.computed
    while sequence.pending:
        if sequence.pending > chunk and request.cancelled:
            return None
        stop = min(sequence.computed + chunk, len(tokens))
        if stop < len(tokens):
            stats.prefill_passes += 1
        _feed(parts, sequence, stop, tip=stop == len(tokens))
    return parts.logits(0, 1)


def look_ahead(
    parts: Parts, sequence: Sequence, tokens: list[int], distance: int, visible: NDArray[np.bool_]
) -> NDArray[np.float32]:
    """Return logits of tokens that do not belong to the sequence; see `Session.look_ahead`."""
    past = sequence.computed + visible.shape[1] - len(tokens)
    parts.step.begin_beams(past, sequence.computed + distance - 1, tokens, visible)
    parts.buffers.send(names.TARGET, names.ATTN_BIAS, parts.step.bias_elements)
    parts.passes += 1
    parts.programs[names.BEAM].run()
    parts.loaded.files.check()
    return parts.logits(0, len(tokens))


def time_round(parts: Parts, sequence: Sequence, chain: abc.Sequence[int], *, drafts: bool, partial: bool) -> float:
    """Return milliseconds of the target's part of a round; see `Session.time_round`."""
    parts.truncate(sequence, min(sequence.computed, max(len(sequence.tokens) - 1, 0)))
    cache, start, room = parts.cache, sequence.computed, parts.cache.room(sequence.number)
    if partial:
        if parts.partial is None:
            raise RequestError("The plan has no partial KV cache; build it with partial_kv.enabled.")
        row = parts.partial.cache_for(sequence)
        cache, start, room = parts.partial.cache, row.computed, row.room
    tokens = sequence.tokens
    most = min(parts.most_nodes, parts.geometry.context - len(tokens), room - 1)
    if len(tokens) - start != 1 or len(chain) > most:
        raise RequestError(
            f"The sequence has {len(tokens)} tokens, {start} of them with KV, and room for a chain of "
            f"{max(most, 0)}, but {len(chain)} are to follow; generate first, or pass fewer."
        )
    draft = chain_draft(chain)
    lay_out(parts.step, cache, {sequence: start}, {sequence.number: draft}, len(tokens), alone=True)
    name = names.VERIFY if drafts else names.DECODE
    began = perf_counter()
    parts.passes += 1
    parts.programs[names.partial(name) if partial else name].run()
    ended = perf_counter()
    cache.commit(np.zeros(0, np.int64))
    return 1000 * (ended - began)
