"""A program of the plan, resolved against one session's buffers: afterwards it only runs.

Names are looked up here, once. A stage is then a call without arguments; the loop below knows no model,
drafter or backend.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter_ns
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from outrider.plans import names
from outrider.plans.errors import OpError, PlanError
from outrider.plans.manifest import Program as ProgramData
from outrider.plans.manifest import Stage, StageKind
from outrider.plugins.ops import OPS
from outrider.runtime.backends.base import LoadedEngine
from outrider.runtime.execution.buffers import Buffers, Call, Exchange
from outrider.runtime.execution.step import Step

_T = TypeVar("_T")
_BEHIND = 1_000_000  # the place of what comes after all stages


class Program:
    """Stages ready to run, and where their results lie: absent ones are None (see `plans.manifest.Results`)."""

    def __init__(
        self,
        name: str,
        data: ProgramData,
        buffers: Buffers,
        steps: Mapping[str, Step],
        engines: Mapping[str, LoadedEngine],
    ) -> None:
        self.name, self._exchange = name, buffers.exchange
        resolver = _Resolver(name, buffers, steps, engines)
        stages = [
            _Ready(stage.run, stage.kind, resolver.resolve(stage), place, stage.model)
            for place, stage in enumerate(data.stages)
        ]
        self.calls = tuple(stage.call for stage in stages)
        """Every stage of the plan alone: on a device it only enqueues, by who holds the device's lock."""
        verify, accept = _halts(data.stages)
        whole, parts = stages, (stages[:verify], stages[verify:accept], stages[accept:])
        self.launches = buffers.exchange is not None and name == names.DECODE
        """Whether it may be launched, and collected later."""
        self._landing = self._awaited = 0  # of the last launch, and of what is collected
        if buffers.exchange is not None:
            if self.launches:
                whole = self._apart(stages, buffers.exchange, steps)
            else:
                whole = _on_device(stages, buffers.exchange, steps)
            drafting, verifying, accepting = parts
            parts = (
                _on_device(drafting, buffers.exchange, steps) if drafting else [],
                _on_device(verifying, buffers.exchange, steps),
                _on_device(accepting, buffers.exchange, steps, uploads=False) if accepting else [],
            )
        self.stage_names = tuple(stage.name for stage in whole)
        self.is_engine = tuple(stage.kind is StageKind.ENGINE for stage in whole)
        self.nanoseconds = [0] * len(whole)
        self._stages = _timed(whole, whole)
        self._drafting, self._verifying, self._accepting = (_timed(part, whole) for part in parts)
        results = data.results
        self.tokens: NDArray[np.int64] | None = resolver.result(results.tokens if results else None)
        self.counts: NDArray[np.int64] | None = resolver.result(results.counts if results else None)
        self.kept: NDArray[np.int64] | None = resolver.result(results.kept if results else None)
        if self.launches:
            assert buffers.exchange is not None
            assert results is not None, "decoding chooses tokens"
            self._landed = buffers.exchange.landings(results.tokens)

    def _apart(self, stages: Sequence[_Ready], exchange: Exchange, steps: Mapping[str, Step]) -> list[_Ready]:
        """Put around the stages what a launch needs: tokens that the host has not seen come from the device's pool and
        go there, and a mark says when the host may write again. The last stage waits for what it collects."""
        first = next(place for place, stage in enumerate(stages) if stage.kind is StageKind.ENGINE)
        sizes = steps[names.TARGET].sizes
        take = _Ready("take tokens", None, partial(exchange.take_tokens, sizes), -1, names.TARGET)
        keep = _Ready("keep tokens", None, partial(exchange.keep_tokens, sizes), _BEHIND, names.TARGET)

        def land() -> None:
            self._landing = exchange.land()

        def wait() -> None:
            exchange.collect(self._awaited)

        return [
            _Ready("prepare", None, exchange.prepare, -1),
            *_joined([_Ready("upload", None, exchange.upload, -1), take, *stages[:first]], exchange, steps),
            _Ready("sent", None, exchange.sent, first - 0.5),
            *_joined([*stages[first:], keep], exchange, steps),
            _Ready("download", None, land, _BEHIND),
            _Ready("wait", None, wait, _BEHIND + 1),
        ]

    @property
    def halts(self) -> bool:
        """Whether it can halt before its accept stage: an engine that accepts itself cannot."""
        return bool(self._accepting)

    def run(self, before_verify: Call | None = None, before_accept: Call | None = None) -> None:
        """Run every stage once on the prepared step, and add up the time of each.

        `before_verify` is called after the drafter's stages, of a program that has some, and may change the target's
        step. `before_accept` is called before the accept stage, of a program that `halts`, and may change and send
        logits. What stages have written is on the host then.
        """
        if before_verify is None and before_accept is None:
            if self.launches:
                self.collect(self.launch())
            else:
                self._run(self._stages)
            return
        self._run(self._drafting)
        if before_verify is not None:
            self._guarded("before it verifies", before_verify)
        self._run(self._verifying)
        if before_accept is not None:
            self._guarded("before it accepts", before_accept)
        self._run(self._accepting)

    def launch(self) -> int:
        """Enqueue the prepared step, some of whose tokens the host may not have seen; return what to `collect`.

        Two launches may be outstanding. Before the next step is laid out, see `Buffers.taken`.
        """
        self._run(self._stages[:-1])
        return self._landing

    def collect(self, landing: int) -> None:
        """Wait for a launch: what it has chosen is in `tokens` then."""
        self._awaited = landing
        self._run(self._stages[-1:])
        assert self.tokens is not None
        np.copyto(self.tokens, self._landed[landing])

    def _guarded(self, place: str, call: Call) -> None:
        try:
            call()
        except ValueError as error:
            raise self._refused(place, error) from error

    def _refused(self, place: str, error: ValueError) -> OpError:
        return OpError(f"program {self.name!r}, {place}: {error}")

    def _run(self, stages: Sequence[tuple[int, Call]]) -> None:
        nanoseconds = self.nanoseconds
        before = perf_counter_ns()
        for index, stage in stages:
            try:
                stage()
            except BaseException as error:
                if self._exchange is not None:
                    with suppress(PlanError):  # the first one is raised
                        self._exchange.settle()
                if isinstance(error, ValueError):
                    raise self._refused(f"stage {self.stage_names[index]}", error) from error
                raise
            now = perf_counter_ns()
            nanoseconds[index] += now - before
            before = now


@dataclass(frozen=True)
class _Ready:
    """A stage that needs no arguments any more, at a `place` in its program; several that were joined have that of the
    first. `kind` is None for what no plan lists, `model` whose sizes it has."""

    name: str
    kind: StageKind | None
    call: Call
    place: float
    model: str | None = None


def _halts(stages: Sequence[Stage]) -> tuple[int, int]:
    """Return the places of the first stage of the target after a drafter's, 0 without one, and of the accept stage: the
    op that commits tokens."""
    drafted = stages[0].model not in (None, names.TARGET)
    verifying = (place for place, stage in enumerate(stages) if drafted and stage.model == names.TARGET)
    accepting = (
        place for place, stage in enumerate(stages) if stage.kind is StageKind.OP and names.COMMITTED in stage.outputs
    )
    return next(verifying, 0), next(accepting, len(stages))


def _timed(stages: Sequence[_Ready], whole: Sequence[_Ready]) -> tuple[tuple[int, Call], ...]:
    """Return the calls of `stages`, each with the place of the stage of the `whole` that its time is counted to."""
    places = [stage.place for stage in whole]
    return tuple((bisect_right(places, stage.place) - 1, stage.call) for stage in stages)


def _on_device(
    stages: list[_Ready], exchange: Exchange, steps: Mapping[str, Step], *, uploads: bool = True
) -> list[_Ready]:
    """Put uploading before the stages, and downloading and waiting after them."""
    there, back = _Ready("upload", None, exchange.upload, -1), _Ready("download", None, exchange.download, _BEHIND)
    prepare, wait = _Ready("prepare", None, exchange.prepare, -1), _Ready("wait", None, exchange.wait, _BEHIND + 1)
    before, whole = ([prepare], [there, *stages, back]) if uploads else ([], [*stages, back])
    return [*before, *_joined(whole, exchange, steps), wait]


def _joined(stages: Sequence[_Ready], exchange: Exchange, steps: Mapping[str, Step]) -> list[_Ready]:
    """Join consecutive stages that can be recorded into stretches."""
    ready, stretch = list[_Ready](), list[_Ready]()

    def close() -> None:
        if stretch:
            models = dict.fromkeys(stage.model for stage in stretch if stage.model is not None)
            call = exchange.stretch([stage.call for stage in stretch], [steps[model].sizes for model in models])
            kind = StageKind.ENGINE if any(stage.kind is StageKind.ENGINE for stage in stretch) else None
            ready.append(_Ready("+".join(stage.name for stage in stretch), kind, call, stretch[0].place))
            stretch.clear()

    for stage in stages:
        if stage.kind is StageKind.ENGINE and not exchange.records_engines:
            close()
            ready.append(replace(stage, call=exchange.singly(stage.call)))
        else:
            stretch.append(stage)
    close()
    return ready


class _Resolver:
    def __init__(
        self,
        program: str,
        buffers: Buffers,
        steps: Mapping[str, Step],
        engines: Mapping[str, LoadedEngine],
    ) -> None:
        self._program, self._buffers, self._steps, self._engines = program, buffers, steps, engines

    def resolve(self, stage: Stage) -> Call:
        step = self._find(self._steps, stage.model, "model")
        bound = {**stage.inputs, **stage.outputs}
        for buffer in bound.values():
            self._find(self._buffers.arrays, buffer, "buffer")
        if stage.kind is StageKind.ENGINE:
            return partial(self._find(self._engines, stage.run, "engine").bind(self._buffers, bound), step.sizes)
        schema = self._find(OPS, stage.run, "op").schema
        try:
            op = self._buffers.op(stage.run, bound, stage.attributes)
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(f"program {self._program!r}, stage {stage.run}: {error}; build the plan again") from None
        return _with_extents(op, step.sizes, [names.SYMBOLS.index(symbol) for symbol in schema.extents])

    def result(self, buffer: str | None) -> NDArray[np.int64] | None:
        return None if buffer is None else self._find(self._buffers.arrays, buffer, "buffer")

    def _find(self, table: Mapping[str, _T], key: str, kind: str) -> _T:
        if key not in table:
            raise PlanError(f"program {self._program!r} names {kind} {key!r}, which the plan lacks; build it again")
        return table[key]


def _with_extents(op: Callable[..., None], sizes: list[int], indices: list[int]) -> Call:
    """Pass an op the current sizes its schema asks for. Spelled out by number: this runs every step."""
    match indices:
        case [a]:
            return lambda: op(sizes[a])
        case [a, b]:
            return lambda: op(sizes[a], sizes[b])
        case [a, b, c, d]:
            return lambda: op(sizes[a], sizes[b], sizes[c], sizes[d])
        case _:
            return lambda: op(*(sizes[i] for i in indices))
