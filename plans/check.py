"""Whether a manifest agrees with itself: every name resolves, every shape fits, no size is absurd.

Nothing is allocated or loaded before these questions are answered, so that a wrong plan costs a sentence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from plans import names
from plans.buffers import DType, Tensor
from plans.manifest import Engine, Geometry, Manifest, NgramDrafter, Program, Stage, StageKind, TargetPlan
from plans.step_buffers import step_buffers

LARGEST_SESSION = 2**40  # bytes of one session's buffers; far above any plan of ours
LARGEST_TREE = 1024  # nodes; likewise

Memory = Mapping[str, Tensor]  # buffers and views by name


def problems(manifest: Manifest) -> Iterator[str]:
    """What is wrong, a clause each. A later one is only meaningful when there is no earlier one."""
    g = manifest.model
    if g.heads % g.kv_heads:
        yield f"model.heads: {g.heads} is no multiple of kv_heads {g.kv_heads}"
    if g.prefill_chunk > g.context:
        yield f"model.prefill_chunk: {g.prefill_chunk} is more than the context, {g.context}"
    drafter_names = [drafter.name for drafter in manifest.drafters]
    for name in drafter_names:
        if name == "none" or drafter_names.count(name) > 1:
            yield f"drafters: the name {name!r} is taken"
    for name, target in manifest.targets.items():
        for problem in _target(target, g, manifest.drafters):
            yield f"targets.{name}.{problem}"


def session_bytes(target: TargetPlan) -> int:
    """What the buffers of one session take."""
    return sum(buffer.elements(target.symbols) * buffer.dtype.itemsize for buffer in target.buffers)


def _target(target: TargetPlan, geometry: Geometry, drafters: Iterable[NgramDrafter]) -> Iterator[str]:
    yield from _symbols(target.symbols, geometry, drafters)
    yield from _buffers(target, geometry)
    memory: dict[str, Tensor] = {buffer.name: buffer for buffer in target.buffers}
    for name, view in target.views.items():
        whole = memory.get(view.buffer)
        if name in memory or whole is None or not whole.shape or view.plane >= whole.resolve(target.symbols)[0]:
            yield f"views.{name}: is no plane of a buffer ({view.buffer!r}, plane {view.plane})"
            return
        memory[name] = Tensor(name=name, dtype=whole.dtype, shape=(1, *whole.shape[1:]))
    for name, engine in target.engines.items():
        for problem in _engine(engine):
            yield f"engines.{name}: {problem}"
    resolver = _Names(memory, target, {drafter.name for drafter in drafters})
    needed = {names.PREFILL, names.DECODE, *(names.speculate(drafter.name) for drafter in drafters)}
    for name in sorted(needed - set(target.programs)):
        yield f"programs: {name!r} is missing"
    for name, program in target.programs.items():
        for problem in resolver.program(program, name):
            yield f"programs.{name}: {problem}"


def _symbols(symbols: Mapping[str, int], g: Geometry, drafters: Iterable[NgramDrafter]) -> Iterator[str]:
    if set(symbols) != set(names.SYMBOLS):
        yield f"symbols: are {', '.join(sorted(symbols))}, must be {', '.join(sorted(names.SYMBOLS))}"
        return
    new, view, picked = (symbols[name] for name in names.SYMBOLS)
    longest_draft = max((drafter.max_draft for drafter in drafters), default=0)
    if not 1 + longest_draft <= picked <= LARGEST_TREE * g.branches:
        yield f"symbols.{names.LOGITS}: {picked} is no size for a tip and a draft of {longest_draft}"
    if not g.prefill_chunk + picked - 1 <= new <= g.prefill_chunk + picked * g.branches:
        yield f"symbols.{names.NEW}: {new} is no size for a chunk of {g.prefill_chunk} and a draft of {picked - 1}"
    if not g.context <= view < g.capacity:
        yield f"symbols.{names.VIEW}: {view} does not lie between context {g.context} and capacity {g.capacity}"


def _buffers(target: TargetPlan, geometry: Geometry) -> Iterator[str]:
    found: dict[str, Tensor] = {}
    for buffer in target.buffers:
        if buffer.name in found:
            yield f"buffers: {buffer.name!r} is there twice"
        unknown = [d for d in buffer.shape if isinstance(d, str) and d not in target.symbols]
        if unknown:
            yield f"buffers: {buffer.name!r} has the unknown symbol {unknown[0]!r}"
            return
        found[buffer.name] = buffer
    total = session_bytes(target)
    if total > LARGEST_SESSION:
        yield f"buffers: are {total} bytes together, more than the {LARGEST_SESSION} a session may have"
    kv = found.get(names.KV)
    for expected in step_buffers(geometry, kv.dtype if kv is not None else DType.FLOAT32):
        if found.get(expected.name) != expected:
            yield f"buffers: {expected.name!r} must be {_spell(expected)}, is {_spell(found.get(expected.name))}"


def _engine(engine: Engine) -> Iterator[str]:
    for kind, tensors in (("inputs", engine.inputs), ("outputs", engine.outputs)):
        if len({tensor.name for tensor in tensors}) < len(tensors):
            yield f"two {kind} have the same name"
        for tensor in tensors:
            if any(isinstance(d, str) and d not in names.SYMBOLS for d in tensor.shape):
                yield f"{kind} {tensor.name!r} has an unknown symbol in {_spell(tensor)}"
    for output, source in engine.aliases.items():
        if all(t.name != output for t in engine.outputs) or all(t.name != source for t in engine.inputs):
            yield f"the alias of {output!r} to {source!r} names no output and input"


class _Names:
    """What a stage may name: memory, engines and drafters of one execution target."""

    def __init__(self, memory: Memory, target: TargetPlan, drafters: set[str]) -> None:
        self._memory, self._target, self._drafters = memory, target, drafters

    def program(self, program: Program, name: str) -> Iterator[str]:
        for index, stage in enumerate(program.stages):
            for problem in self._stage(stage):
                yield f"stage {index}, {stage.run!r}: {problem}"
        yield from self._results(program, name)

    def _stage(self, stage: Stage) -> Iterator[str]:
        for parameter, buffer in (*stage.inputs.items(), *stage.outputs.items()):
            if buffer not in self._memory:
                yield f"{parameter!r} is bound to buffer {buffer!r}, which the plan lacks"
                return
            if stage.inputs.get(parameter, buffer) != buffer:
                yield f"{parameter!r} is bound to two buffers"
        if stage.kind is StageKind.DRAFT and stage.run not in self._drafters:
            yield "the plan has no drafter of this name"
        elif stage.kind is StageKind.ENGINE and stage.run not in self._target.engines:
            yield "the plan has no engine of this name"
        elif stage.kind is StageKind.ENGINE:
            yield from self._engine_stage(stage, self._target.engines[stage.run])

    def _engine_stage(self, stage: Stage, engine: Engine) -> Iterator[str]:
        symbols = self._target.symbols
        for bound, tensors in ((stage.inputs, engine.inputs), (stage.outputs, engine.outputs)):
            if set(bound) != {tensor.name for tensor in tensors}:
                yield "does not bind the engine's inputs and outputs, each once"
                return
            for tensor in tensors:
                memory = self._memory[bound[tensor.name]]
                if tensor.dtype is not memory.dtype or tensor.resolve(symbols) != memory.resolve(symbols):
                    yield f"{tensor.name!r} is {_spell(tensor)}, its buffer {memory.name!r} {_spell(memory)}"
        for output, source in engine.aliases.items():
            if stage.outputs[output] != stage.inputs[source]:
                yield f"{output!r} must be bound to the memory of {source!r}"

    def _results(self, program: Program, name: str) -> Iterator[str]:
        speculative = name.startswith(names.speculate(""))
        results = program.results
        if results is None:
            if name == names.DECODE or speculative:
                yield "has no results"
            return
        if (results.counts is not None) != speculative:
            yield "results.counts belongs to programs that speculate, and to no other"
        written = {buffer for stage in program.stages for buffer in stage.outputs.values()}
        for buffer in (results.tokens, results.counts):
            tensor = None if buffer is None else self._memory.get(buffer)
            if buffer is None:
                continue
            if buffer not in written or tensor is None or tensor.dtype is not DType.INT64 or len(tensor.shape) != 1:
                yield f"the results in {buffer!r} are no list of whole numbers that a stage writes"


def _spell(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else f"{tensor.dtype}[{', '.join(map(str, tensor.shape))}]"
