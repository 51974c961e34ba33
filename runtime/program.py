"""A program of the plan, resolved against one session's buffers: afterwards it only runs.

Names are looked up here, once. A stage is then a call with the step's sizes; the loop below knows no
model, drafter or backend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter_ns
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from plans import names
from plans.errors import PlanError
from plans.manifest import Program as ProgramData
from plans.manifest import Stage, StageKind
from plugins import native
from plugins.schemas import SCHEMAS
from runtime.backends.base import LoadedEngine
from runtime.drafters.base import Drafter
from runtime.step import Step

_T = TypeVar("_T")
Call = Callable[[list[int]], None]


class Program:
    """Stages ready to run, and where their results lie."""

    def __init__(
        self,
        name: str,
        data: ProgramData,
        step: Step,
        engines: Mapping[str, LoadedEngine],
        drafters: Mapping[str, Drafter],
    ) -> None:
        self.name = name
        resolver = _Resolver(name, step, engines, drafters)
        self.stage_names = tuple(f"{stage.run}" for stage in data.stages)
        self.is_engine = tuple(stage.kind is StageKind.ENGINE for stage in data.stages)
        self._stages = tuple(resolver.resolve(stage) for stage in data.stages)
        self._sizes = step.sizes
        self.nanoseconds = [0] * len(self._stages)
        self.runs = 0
        self.tokens: NDArray[np.int64] | None = None
        self.counts: NDArray[np.int64] | None = None
        if data.results is not None:
            self.tokens = resolver.array(data.results.tokens)
            if data.results.counts is not None:
                self.counts = resolver.array(data.results.counts)

    def run(self) -> None:
        """Run every stage once on the prepared step, and add up the time of each."""
        sizes, nanoseconds = self._sizes, self.nanoseconds
        before = perf_counter_ns()
        for index, stage in enumerate(self._stages):
            try:
                stage(sizes)
            except ValueError as error:  # an op refuses what it was given, such as logits that are not numbers
                raise PlanError(f"program {self.name!r}, stage {self.stage_names[index]}: {error}") from error
            now = perf_counter_ns()
            nanoseconds[index] += now - before
            before = now
        self.runs += 1

    @property
    def engine_nanoseconds(self) -> int:
        return sum(t for t, engine in zip(self.nanoseconds, self.is_engine, strict=True) if engine)


class _Resolver:
    def __init__(
        self, program: str, step: Step, engines: Mapping[str, LoadedEngine], drafters: Mapping[str, Drafter]
    ) -> None:
        self._program, self._step, self._engines, self._drafters = program, step, engines, drafters

    def resolve(self, stage: Stage) -> Call:
        if stage.kind is StageKind.DRAFT:
            return _draft(self._find(self._drafters, stage.run, "drafter"), self._step)
        tensors = {
            parameter: self.array(buffer) for parameter, buffer in (*stage.inputs.items(), *stage.outputs.items())
        }
        if stage.kind is StageKind.ENGINE:
            return self._find(self._engines, stage.run, "engine").bind(tensors)
        schema = self._find(SCHEMAS, stage.run, "op")
        try:
            op = native.create(stage.run, tensors, stage.attributes)
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(f"program {self._program!r}, stage {stage.run}: {error}; build the plan again") from None
        return _with_extents(op, [names.SYMBOLS.index(symbol) for symbol in schema.extents])

    def array(self, buffer: str) -> NDArray[Any]:
        return self._find(self._step.arrays, buffer, "buffer")

    def _find(self, table: Mapping[str, _T], key: str, kind: str) -> _T:
        if key not in table:
            raise PlanError(f"program {self._program!r} names {kind} {key!r}, which the plan lacks; build it again")
        return table[key]


def _draft(drafter: Drafter, step: Step) -> Call:
    def stage(sizes: list[int]) -> None:
        if step.draft_limit > 0:
            root = step.new_tokens - 1
            step.append_nodes(drafter.draft(step.draft_limit, step.token_ids, step.parent, root))

    return stage


def _with_extents(op: Callable[..., None], indices: list[int]) -> Call:
    """Pass an op the sizes its schema asks for. Spelled out by number: this runs every step."""
    match indices:
        case []:
            return lambda sizes: op()
        case [a]:
            return lambda sizes: op(sizes[a])
        case [a, b]:
            return lambda sizes: op(sizes[a], sizes[b])
        case _:
            return lambda sizes: op(*(sizes[i] for i in indices))
