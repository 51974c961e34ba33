"""What sessions share, and what one runs on: buffers, steps, programs and drafters, put together as the plan says."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter

from plans import names
from plans.manifest import BackendPlan, GraphDrafter, Manifest, NgramDrafter
from plans.tokenizer import Tokenizer
from runtime.backends.base import Backend, LoadedEngine
from runtime.drafters import Drafter, Fallback, make_host_drafter
from runtime.drafters.entropy import EntropyChain
from runtime.drafters.graph import EngineDrafter
from runtime.execution.buffers import Buffers
from runtime.execution.program import Program
from runtime.execution.step import DraftStep, Step, TargetStep
from runtime.execution.warmup import warm_up
from runtime.sampling import SamplingParams

_LOG = logging.getLogger("outrider")


@dataclass(frozen=True)
class Loaded:
    """A plan in memory for one backend: what all of its sessions share."""

    manifest: Manifest
    plan: BackendPlan
    backend: Backend
    engines: Mapping[str, LoadedEngine]
    tokenizer: Tokenizer


@dataclass(frozen=True)
class Assembly:
    """Programs and drafters by name, in the plan's order, on one set of buffers.

    `by_engine` has the drafters with an arena, those included that stand behind another; `on_host` names host drafters.
    """

    buffers: Buffers
    step: TargetStep
    programs: dict[str, Program]
    drafters: dict[str, Drafter]
    by_engine: dict[str, EngineDrafter]
    draft_steps: dict[str, DraftStep]
    on_host: frozenset[str]


def assemble(loaded: Loaded) -> Assembly:
    """Allocate and resolve everything; where a device records, all rounds are warmed up. Raises `PlanError`."""
    manifest, plan, engines = loaded.manifest, loaded.plan, loaded.engines
    buffers = loaded.backend.buffers(plan)
    limits, buckets = plan.symbols, plan.buckets
    step = TargetStep(buffers, manifest.target, limits[names.TARGET], buckets.get(names.TARGET))
    steps: dict[str, Step] = {names.TARGET: step}
    own: dict[str, DraftStep] = {}
    for drafter in manifest.drafters:
        if isinstance(drafter, GraphDrafter):
            name = drafter.name
            steps[name] = own[name] = DraftStep(
                drafter, buffers, manifest.models[name], limits[name], buckets.get(name)
            )
    host = {d.name: make_host_drafter(d) for d in manifest.drafters if isinstance(d, NgramDrafter)}
    programs = {name: Program(name, data, buffers, steps, engines, host) for name, data in plan.programs.items()}
    drafters: dict[str, Drafter] = {}
    by_engine: dict[str, EngineDrafter] = {}
    for drafter in manifest.drafters:
        name = drafter.name
        if isinstance(drafter, NgramDrafter):
            drafters[name] = host[name]  # one with another behind it is put in its place below
            continue
        geometry, extend = manifest.models[name], programs[names.extend(name)]
        if drafter.entropy is not None:
            draft = programs[names.draft(name)]
            engine: EngineDrafter = EntropyChain(drafter, drafter.entropy, geometry, buffers, own[name], extend, draft)
        else:
            keeps = plan.engines[name].keeps_levels
            compact = programs[names.compact(name)] if keeps and drafter.compacts else None
            engine = EngineDrafter(drafter, geometry, buffers, own[name], extend, compact, keeps_levels=keeps)
        drafters[name] = by_engine[name] = engine
    for drafter in manifest.drafters:
        if isinstance(drafter, NgramDrafter) and drafter.otherwise is not None:
            drafters[drafter.name] = Fallback(host[drafter.name], by_engine[drafter.otherwise], drafter.least)
    if buffers.exchange is not None and buffers.exchange.records and plan.buckets:
        buffers.set_sampling(0, SamplingParams())
        started = perf_counter()
        with buffers.exchange.recording():
            rounds = warm_up(manifest.target.context, steps, drafters, programs)
        _LOG.info("warmed up %d rounds in %.1f s", rounds, perf_counter() - started)
    return Assembly(buffers, step, programs, drafters, by_engine, own, frozenset(host))
