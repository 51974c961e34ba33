"""Buffers, steps and programs of an engine, put together as the plan says, and what engines share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from outrider.plans import names
from outrider.plans.manifest import BackendPlan, GraphDrafter, Manifest
from outrider.plans.tokenizer import Tokenizer
from outrider.runtime.backends.base import Backend, LoadedEngine
from outrider.runtime.drafters.memories import Memories
from outrider.runtime.drafters.verify_length import PriceCurve
from outrider.runtime.execution.buffers import Buffers
from outrider.runtime.execution.program import Program
from outrider.runtime.execution.step import DraftStep, Step, TargetStep
from outrider.runtime.files import MappedFiles
from outrider.runtime.text.grammars import Grammars


@dataclass(frozen=True)
class LoadedPlan:
    """A plan in memory for one backend: what all that runs it shares.

    `memories` hold what generations have put out, by the drafter that they asked. `prices` are those of the target's
    passes, None where they are not known. `files` are those that the engines may have mapped.
    """

    manifest: Manifest
    plan: BackendPlan
    backend: Backend
    engines: Mapping[str, LoadedEngine]
    tokenizer: Tokenizer
    grammars: Grammars
    memories: Mapping[str, Memories] = field(default_factory=dict)
    prices: PriceCurve | None = None
    files: MappedFiles = field(default_factory=MappedFiles)


@dataclass(frozen=True)
class Assembly:
    """Programs by name, in the plan's order, on one set of buffers, and the steps of all models."""

    buffers: Buffers
    step: TargetStep
    draft_steps: dict[str, DraftStep]
    programs: dict[str, Program]


def assemble(loaded: LoadedPlan) -> Assembly:
    """Allocate and resolve everything. Raises `PlanError`."""
    manifest, plan = loaded.manifest, loaded.plan
    buffers = loaded.backend.buffers(plan)
    limits, buckets = plan.symbols, plan.buckets
    step = TargetStep(buffers, manifest.target, limits[names.TARGET], buckets.get(names.TARGET))
    own = {
        d.name: DraftStep(d, buffers, manifest.models[d.name], limits[d.name], buckets.get(d.name))
        for d in manifest.drafters
        if isinstance(d, GraphDrafter)
    }
    steps: dict[str, Step] = {names.TARGET: step, **own}
    programs = {name: Program(name, data, buffers, steps, loaded.engines) for name, data in plan.programs.items()}
    return Assembly(buffers, step, own, programs)
