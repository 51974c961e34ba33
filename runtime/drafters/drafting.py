"""Propose tokens for the sequences of a pass, and divide the nodes that the pass verifies among the sequences.

A pass verifies a limited number of nodes. Where more are drafted, every sequence has its share, and what one does not
need goes to the others; of trees, the nodes that are likeliest of all are taken.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from heapq import nlargest
from math import log
from time import perf_counter_ns
from typing import NamedTuple

import numpy as np

from outrider.plans import names
from outrider.plans.manifest import GraphDrafter, NgramDrafter
from outrider.runtime.drafters import make_host_drafter
from outrider.runtime.drafters.base import NOTHING, Draft, TreeInPlace, clip_draft
from outrider.runtime.drafters.engine import EngineDrafter, chain_rounds, tree_shape
from outrider.runtime.drafters.engine_state import LEAST_CHANCE
from outrider.runtime.drafters.kept_features import KeptFeatures
from outrider.runtime.drafters.verify_length import VerifyLength, common_rate, worth_verifying
from outrider.runtime.execution.assembly import Assembly, LoadedPlan
from outrider.runtime.execution.layout import Placement
from outrider.runtime.execution.step import TargetStep
from outrider.runtime.options.request import Request
from outrider.runtime.sequence import Sequence
from outrider.runtime.stats import Stopwatch


class DraftBudget(NamedTuple):
    """What a sequence may draft in a pass: at most `nodes`.

    Its engine drafter may only where `by_engine`: it needs the KV of all tokens before the tip.
    """

    sequence: Sequence
    nodes: int
    by_engine: bool = False


class HostTime:
    """Time that a host drafter takes, as of a program of one stage."""

    def __init__(self, name: str) -> None:
        self.stage_names, self.is_engine, self.nanoseconds = (name,), (False,), [0]


class Drafting:
    """The drafters of an engine by name. A round: `propose`, the pass, `commit` for each sequence."""

    def __init__(self, loaded: LoadedPlan, parts: Assembly, watch: Stopwatch) -> None:
        manifest = loaded.manifest
        self._settings = {drafter.name: drafter for drafter in manifest.drafters}
        self._memories = loaded.memories
        kept = _kept_features(loaded, parts)
        self.engine_drafters = {
            drafter.name: EngineDrafter(
                drafter,
                manifest.models[drafter.name],
                parts,
                watch,
                kept if drafter.reads_features else None,
                engine=loaded.plan.engines[drafter.name],
            )
            for drafter in manifest.drafters
            if isinstance(drafter, GraphDrafter)
        }
        self._step = parts.step
        self.host_times = {d.name: HostTime(d.name) for d in manifest.drafters if isinstance(d, NgramDrafter)}
        nodes = parts.step.max_nodes + 1
        self._nodes = np.zeros(nodes, np.int64), np.zeros(nodes, np.int64), np.zeros(nodes, np.float32)
        self._vocabulary = manifest.target.vocab_size
        self._prefix_engines: list[EngineDrafter] = []

    # Between runs.

    def begin(self, prefix: abc.Sequence[int], drafters: set[str | None], *, pooled: bool, here: bool) -> None:
        """Expect sequences after `prefix` that ask these drafters, or none; the prefix may have KV `here` already."""
        asked = self._of(drafters)
        for engine in self.engine_drafters.values():
            if engine not in asked:
                engine.arrange(pooled=pooled)
            elif here:
                engine.rewind()
            else:
                engine.begin(prefix, pooled=pooled)
        self._prefix_engines = asked if prefix else []

    def has_prefix(self, prefix: abc.Sequence[int], drafters: set[str | None]) -> bool:
        """Whether the engines of these drafters have the KV of the prefix."""
        return all(engine.has_prefix(prefix) for engine in self._of(drafters))

    @property
    def of_prefix(self) -> abc.Sequence[EngineDrafter]:
        """Engine drafters that compute KV of the prefix."""
        return self._prefix_engines

    def _of(self, drafters: set[str | None]) -> list[EngineDrafter]:
        asked = {name for drafter in drafters for name in (drafter, self._otherwise(drafter))}
        return [engine for name, engine in self.engine_drafters.items() if name in asked]

    def _otherwise(self, drafter: str | None) -> str | None:
        settings = self._settings.get(drafter or "")
        return settings.otherwise if isinstance(settings, NgramDrafter) else None

    # A sequence.

    def attach(self, sequence: Sequence, request: Request) -> None:
        """Let the drafter that the request asks draft for the sequence's next generation: n-grams, an engine, or an
        engine where n-grams foresee too little.

        Over lossy partial KV there are no drafts from other requests' outputs: tokens depend on where rounds end there,
        and so on drafts.
        """
        settings = self._settings.get(request.drafter or "")
        sequence.host_drafter = sequence.engine_drafter = None
        if isinstance(settings, NgramDrafter):
            if settings.name not in sequence.host_drafters:
                sequence.host_drafters[settings.name] = make_host_drafter(settings)
            sequence.host_drafter, sequence.least = sequence.host_drafters[settings.name], settings.least
            memories = None if request.partial_kv == "lossy" else self._memories.get(settings.name)
            sequence.host_drafter.recall_from(None if memories is None else memories.get(sequence.owner))
            if settings.otherwise is not None:
                sequence.engine_drafter = self.engine_drafters[settings.otherwise]
        elif isinstance(settings, GraphDrafter):
            sequence.engine_drafter = self.engine_drafters[settings.name]
        if sequence.engine_drafter is not None:
            sequence.engine_drafter.open(sequence)

    def remember(self, sequence: Sequence, output: abc.Sequence[int]) -> None:
        """Keep what a generation of a sequence has put out for drafts to come, where its drafter has a memory.

        As many tokens of its prompt go along as contexts reach back: as contexts, never to be drafted themselves. May
        run beside the next step.
        """
        settings = self._settings.get(sequence.request.drafter or "")
        if isinstance(settings, NgramDrafter) and (memories := self._memories.get(settings.name)) is not None:
            first = sequence.prompted
            memory = memories.get_or_create(sequence.owner)
            memory.add(sequence.tokens[max(0, first - settings.max_context) : first], list(output))

    def catch_up(self, sequence: Sequence, passes: int) -> int:
        """Let the sequence's drafters take in its tokens; return how many tokens may keep their KV in the target."""
        if sequence.host_drafter is not None:
            sequence.host_drafter.mark_tentative(None)
            sequence.host_drafter.sync(sequence.tokens)  # now: no round is to seem so slow
        if sequence.engine_drafter is None:
            return sequence.computed
        return sequence.engine_drafter.catch_up(sequence, passes)

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Drop what drafters know of a sequence after its first `length` tokens."""
        for host in sequence.host_drafters.values():
            host.truncate(length)
        for engine in self.engine_drafters.values():
            engine.truncate(sequence, length)

    def close(self, sequence: Sequence) -> None:
        """Drop a sequence from all drafters."""
        for engine in self.engine_drafters.values():
            engine.close(sequence)

    def mark_tentative(self, sequence: Sequence, length: int | None) -> None:
        """Tokens from `length` on are tentative; None: tentative tokens have been retracted."""
        if sequence.host_drafter is not None:
            sequence.host_drafter.mark_tentative(length)
        if sequence.engine_drafter is not None:
            sequence.engine_drafter.mark_tentative(sequence, tentative=length is not None)

    # A round.

    def needs_features(self, sequences: Iterable[Sequence]) -> bool:
        """Whether a head drafts for one of these sequences by rejection.

        Its tokens depend on every draft, and a head drafts from the features of the sequence's last pass, which any
        other pass replaces.
        """
        for each in sequences:
            engine = each.engine_drafter
            if engine is not None and engine.paired and engine.rejects:
                return True
        return False

    def propose(
        self, live: Mapping[int, DraftBudget], following: abc.Sequence[Sequence], nodes: int, past: int | None
    ) -> dict[int, Draft | TreeInPlace]:
        """Drafts by number for the sequences of a pass, `nodes` in all; `live` says what each may use.

        `following` are all whose drafters are enabled: heads consume what those have committed. `past`: of a sequence
        that is alone, the slots of the cache that is read.
        """
        if past is not None:
            ((number, budget),) = live.items()
            draft = self._propose_alone(budget, past)
            return {} if draft is None else {number: draft}
        chains: dict[int, tuple[Sequence, int]] = {}
        wanting: dict[str, dict[int, int]] = {}
        forced: dict[int, abc.Sequence[int]] = {}
        for number, (each, limit, by_engine) in live.items():
            if limit <= 0:
                continue
            chain = _chain_limit(each, limit)
            if each.rules and (tokens := _forced(each, chain)):
                forced[number] = tokens
                continue
            if each.host_drafter is not None:
                limit = min(limit, each.reach) if len(live) > 1 else limit
                chain = min(chain, limit)
                foreseen = each.host_drafter.foresee(each.tokens, chain, each.request.sampling)
                if foreseen >= min(each.least, chain) or each.engine_drafter is None:
                    chains[number] = each, foreseen
                    continue
            if each.engine_drafter is not None and by_engine:
                wanting.setdefault(each.engine_drafter.name, {})[number] = (
                    chain if each.engine_drafter.settings.tree.top_k == 1 else limit
                )
        drafts: dict[int, Draft] = {}
        for engine in self.engine_drafters.values():
            of_engine = [each for each in following if each.engine_drafter is engine]
            if of_engine:
                drafted = engine.draft(wanting.get(engine.name, {}), of_engine)
                drafts |= {number: _limited(draft, live[number].sequence) for number, draft in drafted.items()}
        return {**self._divide(live, chains, forced, drafts, nodes)}

    def _propose_alone(self, allowed: DraftBudget, past: int) -> Draft | TreeInPlace | None:
        """Propose for one sequence that is alone, after `past` slots of the cache that is read."""
        sequence, limit, by_engine = allowed
        host, engine = sequence.host_drafter, sequence.engine_drafter
        if sequence.disabled or (host is None and engine is None):
            return None
        chain = _chain_limit(sequence, limit)
        if sequence.rules and (forced := _forced(sequence, chain)):
            if engine is not None:
                engine.skip_round(sequence)
            return _chain(forced)
        foreseen = (
            0 if host is None or engine is None else host.foresee(sequence.tokens, chain, sequence.request.sampling)
        )
        if limit > 0 and engine is not None and by_engine and (host is None or foreseen < min(sequence.least, chain)):
            tree = engine.draft_in_place(sequence, past, self._step, chain)
            if tree is not None:
                return tree
        if engine is not None:
            engine.skip_round(sequence)
        if limit > 0 and host is not None:
            host.sync(sequence.tokens)
            return _worth(self._host_draft(sequence, chain), sequence)
        return None

    def _divide(
        self,
        live: Mapping[int, DraftBudget],
        chains: Mapping[int, tuple[Sequence, int]],
        forced: Mapping[int, abc.Sequence[int]],
        drafts: dict[int, Draft],
        budget: int,
    ) -> dict[int, Draft]:
        """Choose the nodes of each draft for the pass. A rejecting draft is taken whole: tokens depend on it."""
        priced = {n for n, (each, foreseen) in chains.items() if foreseen and _rate(each) is not None}
        drafts |= {n: self._host_draft(*chains[n]) for n in priced}
        chains = {n: chain for n, chain in chains.items() if n not in priced}
        whole = {n: draft for n, draft in drafts.items() if draft.probs is not None}
        others = sum(map(len, whole.values())) + sum(n for _, n in chains.values()) + sum(map(len, forced.values()))
        trees = {n: draft for n, draft in drafts.items() if draft.probs is None}
        worth = self._worth_verifying(live, trees, others)
        trees |= worth
        nodes = [
            (float(score), -place, number)
            for number, tree in trees.items()
            for place, score in enumerate(tree.scores if tree.scores is not None else ())
            if number in worth or score >= _least(tree, live[number].sequence) or len(live) == 1
        ]
        wanted = {number: foreseen for number, (_, foreseen) in chains.items()} | dict.fromkeys(trees, 0)
        wanted |= {number: len(tokens) for number, tokens in forced.items()}
        for _, _, number in nodes:
            wanted[number] += 1
        shares = divide(budget - sum(map(len, whole.values())), wanted)
        found = whole | {number: self._host_draft(each, shares[number]) for number, (each, _) in chains.items()}
        found |= {number: _chain(tokens[: shares[number]]) for number, tokens in forced.items()}
        chosen: dict[int, list[int]] = {number: [] for number in trees}
        for _, place, number in nlargest(sum(shares[number] for number in trees), nodes):
            chosen[number].append(-place)
        return found | {number: _part(trees[number], sorted(places)) for number, places in chosen.items()}

    def _worth_verifying(
        self, live: Mapping[int, DraftBudget], trees: Mapping[int, Draft], others: int
    ) -> dict[int, Draft]:
        """Cut trees to what is worth verifying in a pass that verifies `others` more nodes; return those that
        the rule serves, of sequences with a `verify_length`."""
        lengths = {n: length for n in trees if (length := live[n].sequence.verify_length) is not None}
        rate = common_rate(lengths.values())
        if rate is None:
            return {}
        rows = others + sum(len(tree) for number, tree in trees.items() if number not in lengths)
        rows += sum(min(each.sequence.pending, self._step.most) for each in live.values())
        chances = [
            length.chances(*_shape(trees[number]), by_host=trees[number].by_host) for number, length in lengths.items()
        ]
        curve = next(iter(lengths.values())).curve
        chosen = worth_verifying(chances, rows, curve, rate)
        return {number: _left(trees[number], nodes) for number, nodes in zip(lengths, chosen, strict=True)}

    def _host_draft(self, sequence: Sequence, limit: int) -> Draft:
        host = sequence.host_drafter
        assert host is not None
        began = perf_counter_ns()
        token_ids, parent, score = self._nodes
        count = host.draft(limit, token_ids, parent, score, 0, sequence.request.sampling) if limit else 0
        draft = NOTHING
        if count:
            nodes = slice(1, 1 + count)
            draft = Draft(token_ids[nodes].copy(), parent[nodes] - 1, score[nodes].copy(), by_host=True)
        self.host_times[host.name].nanoseconds[0] += perf_counter_ns() - began
        return draft

    def commit(self, placed: Placement, count: int, draft: Draft | TreeInPlace | None, passes: int) -> None:
        """A pass gave KV to `count` tokens of a sequence; it verified the nodes of `draft`."""
        sequence = placed.sequence
        if isinstance(draft, Draft) and draft.by_host and draft:
            accepted = count - 1  # what is rejected costs a pass that many share more than it brings
            sequence.reach = 2 * sequence.reach if accepted == len(draft) else accepted + 2
        if draft and draft.scores is not None and sequence.verify_length is not None:
            self._note_verified(sequence.verify_length, placed, draft)
        if sequence.engine_drafter is not None and not sequence.disabled:
            kept = None if placed.kept is None else placed.kept[:count]
            sequence.engine_drafter.commit(sequence, placed.start, count, kept, passes)

    def _note_verified(self, length: VerifyLength, placed: Placement, draft: Draft | TreeInPlace) -> None:
        """Note which of a draft's verified nodes the target has reached."""
        first, count = placed.root + 1, placed.drafted
        assert placed.kept is not None, "a draft is accepted by tokens that are listed"
        if isinstance(draft, TreeInPlace):
            parent, scores = draft.shape or tree_shape(self._step, draft, count)
        else:
            parent, scores = _shape(draft)
            parent, scores = parent[:count], scores[:count]
        accepted = {token - first for token in placed.kept[placed.fed :].tolist()}
        length.note_verified(parent, scores, accepted, by_host=isinstance(draft, Draft) and draft.by_host)

    # Sizes of rounds, for devices that record them.

    def rounds(self, length: int, step: TargetStep) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Lay out every size of round that a sequence of `length` tokens may come to; see `EngineDrafter.rounds`."""
        for name, settings in self._settings.items():
            if isinstance(settings, GraphDrafter):
                yield from self.engine_drafters[name].rounds(length, step)
                continue
            yield from chain_rounds(length, step, settings.max_draft)
            if settings.otherwise is not None:
                yield from self.engine_drafters[settings.otherwise].extensions(length, 1 + step.max_nodes)


def _kept_features(loaded: LoadedPlan, parts: Assembly) -> KeptFeatures | None:
    """The rows of the target's features after those of a step, but for the last one, which is a prefix's."""
    if not loaded.manifest.target.feature_size:
        return None
    first = parts.step.most
    count = len(parts.buffers.array(names.TARGET, names.FEATURES)) - first - 1
    return KeptFeatures(parts.buffers, first, count)


def _forced(sequence: Sequence, limit: int) -> abc.Sequence[int]:
    """Return the tokens that a rule of the sequence forces; none by rejection, where tokens depend on the draft."""
    host, engine = sequence.host_drafter, sequence.engine_drafter
    if limit > 0 and not (host is None and engine is None) and not (engine is not None and engine.rejects):
        for rule in sequence.rules:
            if tokens := rule.forced(sequence.generated, limit)[:limit]:
                return tokens
    return ()


def _chain(tokens: abc.Sequence[int]) -> Draft:
    return Draft(tokens, range(-1, len(tokens) - 1))


def _chain_limit(sequence: Sequence, limit: int) -> int:
    """Return how long a chain may be where `limit` nodes may be drafted."""
    depth = sequence.request.limits.depth
    return limit if depth is None else min(limit, depth)


def _limited(draft: Draft, sequence: Sequence) -> Draft:
    """Cut a draft to the limits of the sequence's request."""
    limits = sequence.request.limits
    if limits.tokens is None and limits.depth is None:
        return draft
    nodes = clip_draft(np.asarray(draft.parent).tolist(), draft.scores, limits.tokens, limits.depth)
    return draft if len(nodes) == len(draft) else _part(draft, nodes)


def _part(tree: Draft, nodes: abc.Sequence[int]) -> Draft:
    """Cut a tree to some of its nodes, ascending, which include all of their ancestors."""
    place = {-1: -1} | {node: index for index, node in enumerate(nodes)}
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


def _least(draft: Draft, sequence: Sequence) -> float:
    """Return the lowest score of a node that is verified beside others' where no prices are known."""
    engine = sequence.engine_drafter
    return log(LEAST_CHANCE) if draft.by_host or engine is None else engine.least_score


def _rate(sequence: Sequence) -> float | None:
    return None if sequence.verify_length is None else sequence.verify_length.rate


def _worth(draft: Draft, sequence: Sequence) -> Draft:
    """Cut the draft of a sequence that is alone to what is worth verifying."""
    length = sequence.verify_length
    if length is None or not draft:
        return draft
    return _left(draft, length.choose(*_shape(draft), sequence.pending, by_host=draft.by_host))


def _shape(draft: Draft) -> tuple[list[int], list[float]]:
    """Parents and scores of a draft whose chances are known."""
    assert draft.scores is not None
    return np.asarray(draft.parent).tolist(), np.asarray(draft.scores).tolist()


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
