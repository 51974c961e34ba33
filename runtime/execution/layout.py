"""Lay out a step of any number of sequences: their tokens without KV, and the nodes drafted after their tips."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.plans.errors import RequestError
from outrider.runtime.drafters.base import NOTHING, Draft
from outrider.runtime.execution.step import TargetStep
from outrider.runtime.kv.cache import KvCache
from outrider.runtime.sequence import Sequence


@dataclass(slots=True)
class Placement:
    """The place of a sequence in the step: `fed` tokens from `start` of the sequence on, then `drafted` nodes.

    `root` is the token index of its tip, -1 where the step does not come to it; `tree` counts the roots before it, and
    `first` is its logits index. `draft` is what was proposed. Once the step has run, `kept` are the token indices whose
    KV stays (None: the first), `taken` of them of tokens of the sequence. `overtaken`: a step that was launched since
    has overwritten its logits. Of a sequence with rules, `raw_logits` are rows as they were before the rules, by logits
    index, where log-probabilities are wanted; `stuck` says after how many tokens of the walk no token may follow, and
    why.
    """

    sequence: Sequence
    start: int
    fed: int
    root: int = -1
    tree: int = 0
    first: int = 0
    drafted: int = 0
    draft: Draft | None = None
    kept: NDArray[np.int64] | None = None
    overtaken: bool = False
    taken: int = 0
    raw_logits: dict[int, NDArray[np.float32]] | None = None
    stuck: tuple[int, RequestError] | None = None


def _lay_out_alone(
    step: TargetStep, cache: KvCache, sequence: Sequence, start: int, chunk: int, draft: Draft | None
) -> Placement:
    """Lay out a sequence that has row 0 to itself, without the bookkeeping of rows."""
    fed = sequence.length - start
    chunk = cache.reach(sequence.number, start, min(fed, chunk))
    cache.compact_if_worthwhile(chunk + (len(draft) if draft is not None else 0))
    if fed > chunk:
        cache.begin_alone(sequence.part(start, chunk), start, sequence.number)
        return Placement(sequence, start, chunk)
    cache.begin_alone(sequence.part(start, fed), start, sequence.number)
    root = fed - 1
    step.append_tip(root)
    if draft is None:
        return Placement(sequence, start, fed, root)
    if draft.program is not None:
        step.expect_tree(1 + len(draft))
    elif len(draft):
        _hang(step, draft, root, len(draft))
        step.fill_bucket()
    return Placement(sequence, start, fed, root, 0, 0, step.drafted, draft)


def lay_out(
    step: TargetStep,
    cache: KvCache,
    starts: Mapping[Sequence, int],
    drafts: Mapping[int, Draft],
    chunk: int,
    *,
    alone: bool,
) -> list[Placement]:
    """Lay out the step of sequences, each from its start on, with their drafts by sequence number.

    The step has at most `chunk` tokens of prompts, and at least one token of each sequence; earlier sequences go first.
    Returns the sequences in the order of the step. Each gets all nodes that were drafted for it, or those that fit.
    `alone`: the only open sequence, in row 0; it alone may have a tree in place.
    """
    if alone:
        ((only, start),) = starts.items()
        return [_lay_out_alone(step, cache, only, start, chunk, drafts.get(only.number))]
    fed: dict[int, int] = {}
    by_number = {each.number: each for each in starts}
    width = cache.width(by_number)
    for each, start in starts.items():
        fed[each.number] = cache.reach(each.number, start, min(each.length - start, chunk, width))
        chunk = max(1, chunk - fed[each.number] + 1)
    chains = {number: fed[number] for number in sorted(fed)}
    cache.make_room(sum(chains.values()) + sum(map(len, drafts.values())))
    whole = [
        number for number, count in chains.items() if starts[by_number[number]] + count == by_number[number].length
    ]
    # Sequences accepted by rejection choose first: room was reserved for them.
    whole.sort(key=lambda number: drafts.get(number, NOTHING).probs is None)
    nodes = cache.fit(chains, {number: len(drafts.get(number, NOTHING)) for number in whole})
    batch = 0
    if len(nodes) == sum(chains.values()) and not any(nodes.values()):  # a token each, and no drafts
        size = step.batch_of(len(chains) if cache.pooled else 1 + max(map(cache.row_of, chains)))
        batch = size if cache.holds_batch(size) else 0
    cache.begin({number: count + nodes.get(number, 0) for number, count in chains.items()}, batch)
    placed: list[Placement] = []
    trees = first = 0
    for number, count in chains.items():
        sequence = by_number[number]
        start = starts[sequence]
        last = cache.append(sequence.part(start, count), start, number)
        here = Placement(sequence, start, count)
        if number in nodes:
            here.root, here.tree, here.first = last, trees, first
            here.drafted, here.draft = nodes[number], drafts.get(number)
            step.append_tip(last)
            if here.drafted and here.draft is not None:
                _hang(step, here.draft, last, here.drafted)
            trees, first = trees + 1, first + 1 + here.drafted
        cache.close_row(number)
        placed.append(here)
    cache.close_step()
    if batch:
        step.ask_for_all()
        for here in placed:
            here.tree = here.first = here.root
    return placed


def _hang(step: TargetStep, draft: Draft, root: int, count: int) -> None:
    """Lay out the first `count` nodes of a draft after the tip, the token `root`."""
    first = root + 1
    step.token_ids[first : first + count] = draft.token_ids[:count]
    step.parent[first : first + count] = draft.parent[:count]
    step.parent[first : first + count] += root
    step.append_nodes(count)
