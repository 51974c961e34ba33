"""The drafters of a step loop, and which of them drafts for each sequence."""

from __future__ import annotations

from collections import abc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from time import perf_counter_ns

import numpy as np

from outrider.plans import names
from outrider.plans.host_drafters import HostDrafter as HostSettings
from outrider.plans.manifest import BatchSize, GraphDrafter
from outrider.runtime.drafters import make_host_drafter
from outrider.runtime.drafters.adaptive import AdaptiveSpeculation
from outrider.runtime.drafters.base import NOTHING, Draft, HostDrafter
from outrider.runtime.drafters.engine import EngineDrafter, chain_rounds
from outrider.runtime.drafters.kept_features import KeptFeatures
from outrider.runtime.drafters.verify_length import VerifyLength
from outrider.runtime.execution.assembly import Assembly, LoadedPlan
from outrider.runtime.execution.layout import Placement
from outrider.runtime.execution.step import TargetStep
from outrider.runtime.sequence import Sequence
from outrider.runtime.stats import Stopwatch


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
    """The drafters of a step loop by name. A round: `rounds/propose.py`, the pass, `commit` for each sequence."""

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
        self.host_times = {name: HostTime(name) for name in self._settings if name not in self.engine_drafters}
        nodes = assembly.step.max_nodes + 1
        self._nodes = np.zeros(nodes, np.int64), np.zeros(nodes, np.int64), np.zeros(nodes, np.float32)
        self._vocabulary = manifest.target.vocab_size
        self._prefix_engines: list[EngineDrafter] = []
        self._drafters: dict[int, SequenceDrafters] = {}  # of open sequences, by number

    # Between runs.

    def begin(self, prefix: abc.Sequence[int], drafters: set[str | None], *, pooled: bool, here: bool) -> None:
        """Expect sequences after `prefix` that ask these drafters, or none; the prefix may have KV `here` already."""
        asked = self._of(drafters)
        self._drafters.clear()
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
        return settings.otherwise if isinstance(settings, HostSettings) else None

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
        if isinstance(settings, HostSettings):
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
        if (memories := self._memories.get(generation.request.drafter or "")) is not None:
            first = generation.prompted
            memory = memories.get_or_create(generation.request.cache_salt)
            memory.add(sequence.tokens[max(0, first - memories.max_context) : first], list(output))

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

    def draft_on_host(self, sequence: Sequence, limit: int) -> Draft:
        """Let the sequence's drafter on the host draft at most `limit` nodes."""
        host = self._drafters[sequence.number].host
        assert host is not None
        began = perf_counter_ns()
        token_ids, parent, score = self._nodes
        count = host.draft(limit, token_ids, parent, score, 0, sequence.generation.request.sampling) if limit else 0
        draft = NOTHING
        if count:
            nodes = slice(1, 1 + count)
            draft = Draft(token_ids[nodes].copy(), parent[nodes].copy(), score[nodes].copy(), by_host=True)
        self.host_times[host.name].nanoseconds[0] += perf_counter_ns() - began
        return draft

    def commit(self, placed: Placement, count: int, draft: Draft | None, passes: int) -> None:
        """A pass gave KV to `count` tokens of a sequence; it verified the nodes of `draft`."""
        sequence = placed.sequence
        own = self._drafters[sequence.number]
        if draft is not None and draft.by_host and len(draft):
            accepted = count - 1  # what is rejected costs a pass that many share more than it brings
            own.reach = 2 * own.reach if accepted == len(draft) else accepted + 2
        if draft and draft.scores is not None and own.verify_length is not None:
            self._note_verified(own.verify_length, placed, draft)
        if own.engine is not None and not own.disabled:
            kept = None if placed.kept is None else placed.kept[:count]
            own.engine.commit(sequence, placed.start, count, kept, passes)

    def _note_verified(self, length: VerifyLength, placed: Placement, draft: Draft) -> None:
        """Note which of a draft's verified nodes the target has reached."""
        first, count = placed.root + 1, placed.drafted
        assert placed.kept is not None, "a draft is accepted by tokens that are listed"
        parent, scores = draft.shape()
        accepted = {token - first for token in placed.kept[placed.fed :].tolist()}
        length.note_verified(parent[:count], scores[:count], accepted, by_host=draft.by_host)

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

    def batches(self, model: str, size: BatchSize, view: int, *, rows: bool) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Lay out the runs of a drafter of that size for several sequences; see `EngineDrafter.batches`."""
        return self.engine_drafters[model].batches(size, view, rows=rows)


def _kept_features(loaded: LoadedPlan, assembly: Assembly) -> KeptFeatures | None:
    """The rows of the target's features after those of a step, but for the last one, which is a prefix's."""
    if not loaded.manifest.target.feature_size:
        return None
    first = assembly.step.most
    count = len(assembly.buffers.array(names.TARGET, names.FEATURES)) - first - 1
    return KeptFeatures(assembly.buffers, first, count)
