"""Propose tokens for the sequences of a pass, and divide the nodes that the pass verifies among the sequences.

A pass verifies a limited number of nodes. Where more are drafted, every sequence has its share, and what one does not
need goes to the others; of trees, the nodes that are likeliest of all are taken.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from heapq import nlargest
from math import log
from time import perf_counter_ns
from typing import NamedTuple

import numpy as np

from outrider.plans import names
from outrider.plans.manifest import GraphDrafter, NgramDrafter
from outrider.runtime.drafters import make_host_drafter
from outrider.runtime.drafters.adaptive import AdaptiveSpeculation
from outrider.runtime.drafters.base import NOTHING, Draft, HostDrafter, TreeInPlace, clip_draft
from outrider.runtime.drafters.engine import EngineDrafter, chain_rounds, tree_shape
from outrider.runtime.drafters.engine_state import LEAST_CHANCE
from outrider.runtime.drafters.kept_features import KeptFeatures
from outrider.runtime.drafters.verify_length import VerifyLength, common_rate, worth_verifying
from outrider.runtime.execution.assembly import Assembly, LoadedPlan
from outrider.runtime.execution.layout import Placement
from outrider.runtime.execution.step import TargetStep
from outrider.runtime.sequence import Sequence
from outrider.runtime.stats import Stopwatch


class DraftBudget(NamedTuple):
    """What a sequence may draft in a pass: at most `nodes`.

    Its engine drafter may only where `by_engine`: it needs the KV of all tokens before the tip.
    """

    sequence: Sequence
    nodes: int
    by_engine: bool = False


@dataclass(slots=True)
class SequenceDrafters:
    """What drafts for a sequence: a drafter on the `host`, an `engine`, or an engine where the host's foresees fewer
    than `least` tokens.

    `adaptive` speculation measures whether that pays; `disabled` drafters take in no committed tokens. `reach` limits
    the nodes of a host's draft in a pass of several, by how much of the last ones was accepted.
    """

    host: HostDrafter | None = None
    engine: EngineDrafter | None = None
    least: int = 1
    reach: int = 8
    adaptive: AdaptiveSpeculation | None = None
    disabled: bool = False
    hosts: dict[str, HostDrafter] = field(default_factory=dict)  # those that have been asked, by name

    @property
    def any(self) -> bool:
        """Whether there is one."""
        return self.host is not None or self.engine is not None

    @property
    def drafting(self) -> bool:
        """Whether adaptive speculation lets them draft in the next round."""
        return not self.disabled and (self.adaptive is None or self.adaptive.drafting)

    @property
    def verify_length(self) -> VerifyLength | None:
        """How much of a draft is verified; None where drafts are verified whole."""
        return None if self.adaptive is None else self.adaptive.verify_length


class HostTime:
    """Time that a host drafter takes, as of a program of one stage."""

    def __init__(self, name: str) -> None:
        self.stage_names, self.is_engine, self.nanoseconds = (name,), (False,), [0]


class Drafting:
    """The drafters of a step loop by name. A round: `propose`, the pass, `commit` for each sequence."""

    def __init__(self, loaded: LoadedPlan, assembly: Assembly, watch: Stopwatch) -> None:
        manifest = loaded.manifest
        self._settings = {drafter.name: drafter for drafter in manifest.drafters}
        self._memories = loaded.memories
        kept = _kept_features(loaded, assembly)
        self.engine_drafters = {
            drafter.name: EngineDrafter(
                drafter,
                manifest.models[drafter.name],
                assembly,
                watch,
                kept if drafter.reads_features else None,
                engine=loaded.plan.engines[drafter.name],
            )
            for drafter in manifest.drafters
            if isinstance(drafter, GraphDrafter)
        }
        self._step = assembly.step
        self.host_times = {d.name: HostTime(d.name) for d in manifest.drafters if isinstance(d, NgramDrafter)}
        nodes = assembly.step.max_nodes + 1
        self._nodes = np.zeros(nodes, np.int64), np.zeros(nodes, np.int64), np.zeros(nodes, np.float32)
        self._vocabulary = manifest.target.vocab_size
        self._prefix_engines: list[EngineDrafter] = []
        self._drafters: dict[int, SequenceDrafters] = {}  # of open sequences, by number

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

    def open(self, sequence: Sequence) -> None:
        """Expect a sequence, which nothing drafts for until `attach`."""
        self._drafters[sequence.number] = SequenceDrafters()

    def drafters_of(self, sequence: Sequence) -> SequenceDrafters:
        """What drafts for an open sequence."""
        return self._drafters[sequence.number]

    def attach(self, sequence: Sequence) -> SequenceDrafters:
        """Let the drafter that the generation's request asks draft for it: n-grams, an engine, or an engine where
        n-grams foresee too little.

        Over lossy partial KV there are no drafts from other requests' outputs: tokens depend on where rounds end there,
        and so on drafts.
        """
        request, own = sequence.generation.request, self._drafters[sequence.number]
        settings = self._settings.get(request.drafter or "")
        own.host = own.engine = None
        if isinstance(settings, NgramDrafter):
            if settings.name not in own.hosts:
                own.hosts[settings.name] = make_host_drafter(settings)
            own.host, own.least = own.hosts[settings.name], settings.least
            memories = None if request.partial_kv == "lossy" else self._memories.get(settings.name)
            own.host.recall_from(None if memories is None else memories.get(request.cache_salt))
            if settings.otherwise is not None:
                own.engine = self.engine_drafters[settings.otherwise]
        elif isinstance(settings, GraphDrafter):
            own.engine = self.engine_drafters[settings.name]
        if own.engine is not None:
            own.engine.open(sequence)
        return own

    def remember(self, sequence: Sequence, output: abc.Sequence[int]) -> None:
        """Keep what a generation of a sequence has put out for drafts to come, where its drafter has a memory.

        As many tokens of its prompt go along as contexts reach back: as contexts, never to be drafted themselves. May
        run beside the next step.
        """
        generation = sequence.generation
        settings = self._settings.get(generation.request.drafter or "")
        if isinstance(settings, NgramDrafter) and (memories := self._memories.get(settings.name)) is not None:
            first = generation.prompted
            memory = memories.get_or_create(generation.request.cache_salt)
            memory.add(sequence.tokens[max(0, first - settings.max_context) : first], list(output))

    def catch_up(self, sequence: Sequence, passes: int) -> int:
        """Let the sequence's drafters take in its tokens; return how many tokens may keep their KV in the target."""
        own = self._drafters[sequence.number]
        if own.host is not None:
            own.host.mark_tentative(None)
            own.host.sync(sequence.tokens)  # now: no round is to seem so slow
        if own.engine is None:
            return sequence.computed
        return own.engine.catch_up(sequence, passes)

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Drop what drafters know of a sequence after its first `length` tokens."""
        for host in self._drafters[sequence.number].hosts.values():
            host.truncate(length)
        for engine in self.engine_drafters.values():
            engine.truncate(sequence, length)

    def close(self, sequence: Sequence) -> None:
        """Drop a sequence from all drafters."""
        del self._drafters[sequence.number]
        for engine in self.engine_drafters.values():
            engine.close(sequence)

    def mark_tentative(self, sequence: Sequence, length: int | None) -> None:
        """Tokens from `length` on are tentative; None: tentative tokens have been retracted."""
        own = self._drafters[sequence.number]
        if own.host is not None:
            own.host.mark_tentative(length)
        if own.engine is not None:
            own.engine.mark_tentative(sequence, tentative=length is not None)

    # A round.

    def needs_features(self, sequences: Iterable[Sequence]) -> bool:
        """Whether a head drafts for one of these sequences by rejection.

        Its tokens depend on every draft, and a head drafts from the features of the sequence's last pass, which any
        other pass replaces.
        """
        for each in sequences:
            engine = self._drafters[each.number].engine
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
            own, chain = self._drafters[number], _chain_limit(each, limit)
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
                wanting.setdefault(own.engine.name, {})[number] = (
                    chain if own.engine.settings.tree.top_k == 1 else limit
                )
        drafts: dict[int, Draft] = {}
        for engine in self.engine_drafters.values():
            of_engine = [each for each in following if self._drafters[each.number].engine is engine]
            if of_engine:
                drafted = engine.draft(wanting.get(engine.name, {}), of_engine)
                drafts |= {number: _limited(draft, live[number].sequence) for number, draft in drafted.items()}
        return {**self._divide(live, chains, forced, drafts, nodes)}

    def _propose_alone(self, allowed: DraftBudget, past: int) -> Draft | TreeInPlace | None:
        """Propose for one sequence that is alone, after `past` slots of the cache that is read."""
        sequence, limit, by_engine = allowed
        own = self._drafters[sequence.number]
        host, engine = own.host, own.engine
        if own.disabled or not own.any:
            return None
        chain = _chain_limit(sequence, limit)
        if forced := _forced(sequence, own, chain):
            if engine is not None:
                engine.skip_round(sequence)
            return _chain(forced)
        foreseen = 0
        if host is not None and engine is not None:
            foreseen = host.foresee(sequence.tokens, chain, sequence.generation.request.sampling)
        if limit > 0 and engine is not None and by_engine and (host is None or foreseen < min(own.least, chain)):
            tree = engine.draft_in_place(sequence, past, self._step, chain)
            if tree is not None:
                return tree
        if engine is not None:
            engine.skip_round(sequence)
        if limit > 0 and host is not None:
            host.sync(sequence.tokens)
            return _worth(self._host_draft(sequence, chain), sequence, own)
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
        priced = {n for n, (_, foreseen) in chains.items() if foreseen and self._rate(n) is not None}
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
            if number in worth or score >= self._least(tree, number) or len(live) == 1
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
        lengths = {n: length for n in trees if (length := self._drafters[n].verify_length) is not None}
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

    def _least(self, draft: Draft, number: int) -> float:
        """Return the lowest score of a node that is verified beside others' where no prices are known."""
        engine = self._drafters[number].engine
        return log(LEAST_CHANCE) if draft.by_host or engine is None else engine.least_score

    def _rate(self, number: int) -> float | None:
        length = self._drafters[number].verify_length
        return None if length is None else length.rate

    def _host_draft(self, sequence: Sequence, limit: int) -> Draft:
        host = self._drafters[sequence.number].host
        assert host is not None
        began = perf_counter_ns()
        token_ids, parent, score = self._nodes
        count = host.draft(limit, token_ids, parent, score, 0, sequence.generation.request.sampling) if limit else 0
        draft = NOTHING
        if count:
            nodes = slice(1, 1 + count)
            draft = Draft(token_ids[nodes].copy(), parent[nodes] - 1, score[nodes].copy(), by_host=True)
        self.host_times[host.name].nanoseconds[0] += perf_counter_ns() - began
        return draft

    def commit(self, placed: Placement, count: int, draft: Draft | TreeInPlace | None, passes: int) -> None:
        """A pass gave KV to `count` tokens of a sequence; it verified the nodes of `draft`."""
        sequence = placed.sequence
        own = self._drafters[sequence.number]
        if isinstance(draft, Draft) and draft.by_host and draft:
            accepted = count - 1  # what is rejected costs a pass that many share more than it brings
            own.reach = 2 * own.reach if accepted == len(draft) else accepted + 2
        if draft and draft.scores is not None and own.verify_length is not None:
            self._note_verified(own.verify_length, placed, draft)
        if own.engine is not None and not own.disabled:
            kept = None if placed.kept is None else placed.kept[:count]
            own.engine.commit(sequence, placed.start, count, kept, passes)

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


def _kept_features(loaded: LoadedPlan, assembly: Assembly) -> KeptFeatures | None:
    """The rows of the target's features after those of a step, but for the last one, which is a prefix's."""
    if not loaded.manifest.target.feature_size:
        return None
    first = assembly.step.most
    count = len(assembly.buffers.array(names.TARGET, names.FEATURES)) - first - 1
    return KeptFeatures(assembly.buffers, first, count)


def _forced(sequence: Sequence, own: SequenceDrafters, limit: int) -> abc.Sequence[int]:
    """Return the tokens that a rule of the sequence forces; none by rejection, where tokens depend on the draft."""
    if limit > 0 and own.any and not (own.engine is not None and own.engine.rejects):
        for rule in sequence.generation.rules:
            if tokens := rule.forced(sequence.generated, limit)[:limit]:
                return tokens
    return ()


def _chain(tokens: abc.Sequence[int]) -> Draft:
    return Draft(tokens, range(-1, len(tokens) - 1))


def _chain_limit(sequence: Sequence, limit: int) -> int:
    """Return how long a chain may be where `limit` nodes may be drafted."""
    depth = sequence.generation.request.limits.depth
    return limit if depth is None else min(limit, depth)


def _limited(draft: Draft, sequence: Sequence) -> Draft:
    """Cut a draft to the limits of the sequence's request."""
    limits = sequence.generation.request.limits
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


def _worth(draft: Draft, sequence: Sequence, own: SequenceDrafters) -> Draft:
    """Cut the draft of a sequence that is alone to what is worth verifying."""
    length = own.verify_length
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
