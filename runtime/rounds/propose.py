"""Propose tokens for the sequences of a pass, and divide the nodes that the pass verifies among the sequences.

A pass verifies a limited number of nodes. Where more are drafted, every sequence has its share, and what one does not
need goes to the others; of trees, the nodes that are likeliest of all are taken.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Mapping
from dataclasses import replace
from heapq import nlargest
from math import log
from typing import NamedTuple

import numpy as np

from outrider.runtime.drafters.base import Draft, chain_draft, clip_draft
from outrider.runtime.drafters.drafting import SequenceDrafters
from outrider.runtime.drafters.engine_state import LEAST_CHANCE
from outrider.runtime.drafters.verify_length import common_rate, worth_verifying
from outrider.runtime.rounds.parts import Parts
from outrider.runtime.sequence import Sequence


class DraftBudget(NamedTuple):
    """What a sequence may draft in a pass: at most `nodes`.

    Its engine drafter may only where `by_engine`: it needs the KV of all tokens before the tip.
    """

    sequence: Sequence
    nodes: int
    by_engine: bool = False


def propose(
    parts: Parts, live: Mapping[int, DraftBudget], following: abc.Sequence[Sequence], nodes: int, past: int | None
) -> dict[int, Draft]:
    """Drafts by number for the sequences of a pass, `nodes` in all; `live` says what each may use.

    `following` are all whose drafters are enabled: heads consume what those have committed. `past`: of a sequence
    that is alone, the slots of the cache that is read.
    """
    if past is not None:
        ((number, budget),) = live.items()
        draft = _propose_alone(parts, budget, past)
        return {} if draft is None else {number: draft}
    chains: dict[int, tuple[Sequence, int]] = {}
    wanting: dict[str, dict[int, int]] = {}
    forced: dict[int, abc.Sequence[int]] = {}
    for number, (each, limit, by_engine) in live.items():
        if limit <= 0:
            continue
        own, chain = parts.drafting.drafters_of(each), _chain_limit(each, limit)
        if tokens := _forced(each, own, chain):
            forced[number] = tokens
            continue
        if own.host is not None:
            limit = min(limit, own.reach) if len(live) > 1 else limit
            chain = min(chain, limit)
            foreseen = own.host.foresee(each.tokens, chain, each.generation.request.sampling)
            if foreseen >= min(own.least, chain) or own.engine is None:
                chains[number] = each, foreseen
                continue
        if own.engine is not None and by_engine:
            wanting.setdefault(own.engine.name, {})[number] = chain if own.engine.settings.tree.top_k == 1 else limit
    drafts: dict[int, Draft] = {}
    for engine in parts.drafting.engine_drafters.values():
        of_engine = [each for each in following if parts.drafting.drafters_of(each).engine is engine]
        if of_engine:
            drafted = engine.draft(wanting.get(engine.name, {}), of_engine)
            drafts |= {number: _limited(draft, live[number].sequence) for number, draft in drafted.items()}
    return _choose_nodes(parts, live, chains, forced, drafts, nodes)


def _propose_alone(parts: Parts, allowed: DraftBudget, past: int) -> Draft | None:
    """Propose for one sequence that is alone, after `past` slots of the cache that is read."""
    sequence, limit, by_engine = allowed
    own = parts.drafting.drafters_of(sequence)
    host, engine = own.host, own.engine
    if own.disabled or not own.any:
        return None
    chain = _chain_limit(sequence, limit)
    if forced := _forced(sequence, own, chain):
        if engine is not None:
            engine.skip_round(sequence)
        return chain_draft(forced)
    foreseen = 0
    if host is not None and engine is not None:
        foreseen = host.foresee(sequence.tokens, chain, sequence.generation.request.sampling)
    if limit > 0 and engine is not None and by_engine and (host is None or foreseen < min(own.least, chain)):
        tree = engine.draft_in_place(sequence, past, parts.step, chain)
        if tree is not None:
            return tree
    if engine is not None:
        engine.skip_round(sequence)
    if limit > 0 and host is not None:
        host.sync(sequence.tokens)
        return _worth(parts.drafting.draft_on_host(sequence, chain), sequence, own)
    return None


def _choose_nodes(
    parts: Parts,
    live: Mapping[int, DraftBudget],
    chains: Mapping[int, tuple[Sequence, int]],
    forced: Mapping[int, abc.Sequence[int]],
    drafts: dict[int, Draft],
    budget: int,
) -> dict[int, Draft]:
    """Choose the nodes of each draft for the pass. A rejecting draft is taken whole: tokens depend on it."""
    priced = {n for n, (_, foreseen) in chains.items() if foreseen and _rate(parts, live[n].sequence) is not None}
    drafts |= {n: parts.drafting.draft_on_host(*chains[n]) for n in priced}
    chains = {n: chain for n, chain in chains.items() if n not in priced}
    whole = {n: draft for n, draft in drafts.items() if draft.probs is not None}
    others = sum(map(len, whole.values())) + sum(n for _, n in chains.values()) + sum(map(len, forced.values()))
    trees = {n: draft for n, draft in drafts.items() if draft.probs is None}
    worth = _worth_verifying(parts, live, trees, others)
    trees |= worth
    nodes = [
        (float(score), -place, number)
        for number, tree in trees.items()
        for place, score in enumerate(tree.scores if tree.scores is not None else ())
        if number in worth or score >= _least(parts, tree, live[number].sequence) or len(live) == 1
    ]
    wanted = {number: foreseen for number, (_, foreseen) in chains.items()} | dict.fromkeys(trees, 0)
    wanted |= {number: len(tokens) for number, tokens in forced.items()}
    for _, _, number in nodes:
        wanted[number] += 1
    shares = divide(budget - sum(map(len, whole.values())), wanted)
    found = whole | {number: parts.drafting.draft_on_host(each, shares[number]) for number, (each, _) in chains.items()}
    found |= {number: chain_draft(tokens[: shares[number]]) for number, tokens in forced.items()}
    chosen: dict[int, list[int]] = {number: [] for number in trees}
    for _, place, number in nlargest(sum(shares[number] for number in trees), nodes):
        chosen[number].append(-place)
    return found | {number: _part(trees[number], sorted(places)) for number, places in chosen.items()}


def _worth_verifying(
    parts: Parts, live: Mapping[int, DraftBudget], trees: Mapping[int, Draft], others: int
) -> dict[int, Draft]:
    """Cut trees to what is worth verifying in a pass that verifies `others` more nodes; return those that
    the rule serves, of sequences with a `verify_length`."""
    lengths = {
        n: length for n in trees if (length := parts.drafting.drafters_of(live[n].sequence).verify_length) is not None
    }
    rate = common_rate(lengths.values())
    if rate is None:
        return {}
    rows = others + sum(len(tree) for number, tree in trees.items() if number not in lengths)
    rows += sum(min(each.sequence.pending, parts.step.most) for each in live.values())
    chances = [
        length.chances(*trees[number].shape(), by_host=trees[number].by_host) for number, length in lengths.items()
    ]
    curve = next(iter(lengths.values())).curve
    chosen = worth_verifying(chances, rows, curve, rate)
    return {number: _left(trees[number], nodes) for number, nodes in zip(lengths, chosen, strict=True)}


def _least(parts: Parts, draft: Draft, sequence: Sequence) -> float:
    """Return the lowest score of a node that is verified beside others' where no prices are known."""
    engine = parts.drafting.drafters_of(sequence).engine
    return log(LEAST_CHANCE) if draft.by_host or engine is None else engine.least_score


def _rate(parts: Parts, sequence: Sequence) -> float | None:
    length = parts.drafting.drafters_of(sequence).verify_length
    return None if length is None else length.rate


def _forced(sequence: Sequence, own: SequenceDrafters, limit: int) -> abc.Sequence[int]:
    """Return the tokens that a rule of the sequence forces; none by rejection, where tokens depend on the draft."""
    if limit > 0 and own.any and not (own.engine is not None and own.engine.rejects):
        for rule in sequence.generation.rules:
            if tokens := rule.forced(sequence.generated, limit)[:limit]:
                return tokens
    return ()


def _chain_limit(sequence: Sequence, limit: int) -> int:
    """Return how long a chain may be where `limit` nodes may be drafted."""
    depth = sequence.generation.request.limits.depth
    return limit if depth is None else min(limit, depth)


def _limited(draft: Draft, sequence: Sequence) -> Draft:
    """Cut a draft to the limits of the sequence's request."""
    limits = sequence.generation.request.limits
    if limits.tokens is None and limits.depth is None:
        return draft
    nodes = clip_draft((np.asarray(draft.parent) - 1).tolist(), draft.scores, limits.tokens, limits.depth)
    return draft if len(nodes) == len(draft) else _part(draft, nodes)


def _part(tree: Draft, nodes: abc.Sequence[int]) -> Draft:
    """Cut a tree to some of its nodes, ascending, which include all of their ancestors."""
    place = {0: 0} | {1 + node: 1 + index for index, node in enumerate(nodes)}
    scores = None if tree.scores is None else [tree.scores[node] for node in nodes]
    return Draft(
        [int(tree.token_ids[node]) for node in nodes],
        [place[int(tree.parent[node])] for node in nodes],
        scores,
        left_out=tree.left_out,
        by_host=tree.by_host,
    )


def _left(draft: Draft, nodes: abc.Sequence[int]) -> Draft:
    """Cut a draft to the nodes that are worth verifying."""
    return draft if len(nodes) == len(draft) else replace(_part(draft, nodes), left_out=len(draft) - len(nodes))


def _worth(draft: Draft, sequence: Sequence, own: SequenceDrafters) -> Draft:
    """Cut the draft of a sequence that is alone to what is worth verifying."""
    length = own.verify_length
    if length is None or not draft:
        return draft
    return _left(draft, length.choose(*draft.shape(), sequence.pending, by_host=draft.by_host))


def divide(budget: int, wanted: Mapping[int, int]) -> dict[int, int]:
    """Share a budget: each gets what it wants or, where that is too much in all, as even a share as can be."""
    shares = {}
    left = max(0, budget)
    for rest, (who, want) in zip(
        range(len(wanted), 0, -1), sorted(wanted.items(), key=lambda item: item[1]), strict=True
    ):
        shares[who] = min(want, left // rest)
        left -= shares[who]
    return shares
