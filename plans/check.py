"""Whether a manifest agrees with itself: every name resolves, every shape fits, no size is absurd.

Nothing is allocated or loaded before these questions are answered, so that a wrong plan costs a sentence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod

from outrider.plans import names
from outrider.plans.buffers import DType, Tensor
from outrider.plans.check_partial import kv_problems, partial_problems, refresh_problems
from outrider.plans.host_drafters import HostDrafter
from outrider.plans.manifest import (
    BackendPlan,
    Buckets,
    Drafter,
    Engine,
    Geometry,
    GraphDrafter,
    Manifest,
    Program,
    Stage,
    StageKind,
    longest_draft,
    rejects,
)
from outrider.plans.partial_kv import PartialKv
from outrider.plans.program_list import ProgramKind, program_list
from outrider.plans.step_buffers import drafter_buffers, partial_buffers, sampling_buffers, target_buffers

LARGEST_SESSION = 2**40  # bytes of one session's buffers; far above any plan of ours
LARGEST_TREE = 1024  # nodes; likewise

Memory = Mapping[str, Tensor]  # buffers and views by name, at their largest shapes


def problems(manifest: Manifest) -> Iterator[str]:
    """List faults of a plan, a clause each. A later one is only meaningful when there is no earlier one."""
    if names.TARGET not in manifest.models:
        yield f"models: {names.TARGET!r} is missing"
        return
    for name, g in manifest.models.items():
        if g.heads % g.kv_heads:
            yield f"models.{name}.heads: {g.heads} is no multiple of kv_heads {g.kv_heads}"
        if g.prefill_chunk > g.context:
            yield f"models.{name}.prefill_chunk: {g.prefill_chunk} is more than the context, {g.context}"
        if len(g.layer_windows) not in (0, g.layers):
            yield f"models.{name}.layer_windows: are of {len(g.layer_windows)} layers, and the model has {g.layers}"
        if g.widest_window >= g.context:
            yield f"models.{name}.layer_windows: {g.widest_window} tokens are no part of the context, {g.context}"
    drafter_names = [drafter.name for drafter in manifest.drafters]
    for name in drafter_names:
        if name in ("none", names.TARGET, names.PARTIAL) or drafter_names.count(name) > 1:
            yield f"drafters: the name {name!r} is taken"
    graphs = [drafter for drafter in manifest.drafters if isinstance(drafter, GraphDrafter)]
    if (expected := {names.TARGET, *(drafter.name for drafter in graphs)}) != set(manifest.models):
        yield f"models: are {', '.join(sorted(manifest.models))}, must be {', '.join(sorted(expected))}"
        return
    for drafter in graphs:
        yield from _drafter(drafter, manifest.models)
    coupled = {drafter.name for drafter in graphs if drafter.acceptance == "coupled"}
    for host in manifest.drafters:
        if isinstance(host, HostDrafter) and host.otherwise not in (None, *coupled):
            yield f"drafters.{host.name}: {host.otherwise!r} is no drafter with an engine and coupled acceptance"
    partial = manifest.partial_kv
    if partial is not None:
        yield from (f"partial_kv: {problem}" for problem in partial_problems(partial, manifest))
    for name, backend in manifest.backends.items():
        for problem in _backend(backend, manifest.models, manifest.drafters, partial):
            yield f"backends.{name}.{problem}"


def _drafter(drafter: GraphDrafter, models: Mapping[str, Geometry]) -> Iterator[str]:
    tree, own, backend = drafter.tree, models[drafter.name], models[names.TARGET]
    where = f"drafters.{drafter.name}"
    if tree.nodes > LARGEST_TREE or tree.nodes - 1 > tree.candidates or tree.top_k > own.vocab_size:
        yield f"{where}.tree: {tree.nodes} nodes, {tree.top_k} children each and {tree.depth} levels are no tree"
    if drafter.acceptance == "rejection" and tree.top_k != 1:
        yield f"{where}: rejection is for chains, and the tree has {tree.top_k} children a node"
    if (drafter.kind == "block") != (drafter.block is not None):
        yield f"{where}: block, the number of slots, is of drafters of kind block"
    if drafter.reads_features and not backend.feature_size:
        yield f"{where}: reads features, and the target gives none"
    if (own.context, own.prefill_chunk) != (backend.context, backend.prefill_chunk):
        yield f"models.{drafter.name}: context and prefill_chunk are not the target's"
    if own.window and not own.prefill_chunk <= own.window:
        yield f"models.{drafter.name}: a window of {own.window} slots is less than a chunk of {own.prefill_chunk}"


def buffer_shape(backend: BackendPlan, buffer: Tensor) -> tuple[int, ...]:
    """The largest shape of a buffer; its symbols are those of the model that owns it."""
    return buffer.resolve(backend.symbols.get(buffer.name.rpartition(".")[0], {}))


def session_bytes(backend: BackendPlan) -> int:
    """Bytes that the buffers of one session take."""
    return sum(prod(buffer_shape(backend, buffer)) * buffer.dtype.itemsize for buffer in backend.buffers)


def kv_caches(backend: BackendPlan) -> dict[str, Tensor]:
    """KV caches at their largest shape, `[planes, rows, heads, slots, slot_size]`, by model, the partial one too."""
    ending = f".{names.KV}"
    return {
        buffer.name.removesuffix(ending): buffer.model_copy(update={"shape": buffer_shape(backend, buffer)})
        for buffer in backend.buffers
        if buffer.name.endswith(ending)
    }


def kv_bytes(backend: BackendPlan) -> dict[str, int]:
    """Bytes of `kv_caches`, by model."""
    return {model: kv.elements({}) * kv.dtype.itemsize for model, kv in kv_caches(backend).items()}


def _backend(
    backend: BackendPlan, models: Mapping[str, Geometry], drafters: Sequence[Drafter], partial: PartialKv | None
) -> Iterator[str]:
    if set(backend.symbols) != set(models):
        yield f"symbols: are of {', '.join(sorted(backend.symbols))}, the models are {', '.join(sorted(models))}"
        return
    graphs = {drafter.name: drafter for drafter in drafters if isinstance(drafter, GraphDrafter)}
    for model, geometry in models.items():
        least = partial.n_spec_tokens_buf if partial is not None else 0
        for problem in _symbols(backend.symbols[model], geometry, graphs.get(model), drafters, least):
            yield f"symbols.{model}{problem}"
    for model, buckets in backend.buckets.items():
        yield from (f"buckets.{model}.{problem}" for problem in _buckets(buckets, backend.symbols.get(model, {})))
    found: dict[str, Tensor] = {}
    for problem in _buffers(backend, models, graphs, partial, found):
        yield problem
        if not found:
            return
    memory = {
        name: Tensor(name=name, dtype=buffer.dtype, shape=buffer_shape(backend, buffer))
        for name, buffer in found.items()
    }
    for name, view in backend.views.items():
        whole = memory.get(view.buffer)
        if name in memory or whole is None or len(whole.shape) < 2 or view.plane >= int(whole.shape[0]):
            yield f"views.{name}: is no plane of a buffer ({view.buffer!r}, plane {view.plane})"
            return
        memory[name] = Tensor(name=name, dtype=whole.dtype, shape=whole.shape[1:])
    for name, engine in backend.engines.items():
        for problem in _engine(engine):
            yield f"engines.{name}: {problem}"
    resolver = _Names(memory, backend, partial)
    branches = models[names.TARGET].branches
    required = program_list(drafters, branches, backend.engines, partial=partial is not None)
    for name in sorted(required):
        if name not in backend.programs:
            yield f"programs: {name!r} is missing"
    for name, program in backend.programs.items():
        for problem in resolver.program(program, name, required.get(name, ProgramKind())):
            yield f"programs.{name}: {problem}"


def _symbols(
    symbols: Mapping[str, int], g: Geometry, own: GraphDrafter | None, drafters: Iterable[Drafter], least: int
) -> Iterator[str]:
    """`own` is the drafter whose model it is; None for the target, which checks `least` tokens at once."""
    if set(symbols) != set(names.SYMBOLS):
        yield f": are {', '.join(sorted(symbols))}, must be {', '.join(sorted(names.SYMBOLS))}"
        return
    new, view, picked, rows, edges, places, featured, tips, nodes = (symbols[name] for name in names.SYMBOLS)
    grown = 0
    if own is None:
        longest = max(longest_draft(drafters), least)
        if not 1 + longest <= picked <= LARGEST_TREE * g.branches:
            yield f".{names.LOGITS}: {picked} is no size for a tip and a draft of {longest}"
        if not g.prefill_chunk + picked - 1 <= new <= g.prefill_chunk + picked * g.branches:
            yield f".{names.NEW}: {new} is no size for a chunk of {g.prefill_chunk} and a draft of {picked - 1}"
        if featured < new + (g.branches > 1):
            yield f".{names.FEATURED}: {featured} features are too few for {new} new tokens"
    else:
        grown = own.grown * g.branches
        if picked != 1 or new < g.prefill_chunk or (g.branches == 1 and new != g.prefill_chunk):
            yield f": {new} new tokens and {picked} with logits, must be {g.prefill_chunk} and 1"
        if (tips, nodes) != (g.branches, g.branches * own.tree.nodes):
            yield f".{names.TIPS}: {tips} tips and {nodes} nodes, must be {g.branches} and as many trees"
    if not g.held + grown <= view < g.capacity:
        yield f".{names.VIEW}: {view} does not lie between context {g.held + grown} and capacity {g.capacity}"
    if (rows, edges, places) != (g.rows, g.rows + 1, new) or g.rows not in (1, g.branches):
        yield f".{names.ROWS}: {rows} rows, {edges} edges and {places} places are not those of {g.rows}"


def _buckets(buckets: Buckets, symbols: Mapping[str, int]) -> Iterator[str]:
    for name, sizes, most in (
        ("new", buckets.new, symbols.get(names.NEW)),
        ("view", buckets.view, symbols.get(names.VIEW)),
    ):
        if most is None:
            yield f"{name}: the plan has no such model"
        elif list(sizes) != sorted(set(sizes)) or sizes[-1] > most:
            yield f"{name}: {', '.join(map(str, sizes))} do not ascend to at most {most}"
    most = symbols.get(names.NEW, 0)
    if any(max(size.sequences, size.each) > size.tokens or size.tokens > most for size in buckets.batch):
        yield f"batch: a size has more sequences than tokens, or more than {most} of these"
    if buckets.view[-1] != symbols.get(names.VIEW):
        yield f"view: ends at {buckets.view[-1]}, not at the largest view, {symbols.get(names.VIEW)}"


def _buffers(
    backend: BackendPlan,
    models: Mapping[str, Geometry],
    graphs: Mapping[str, GraphDrafter],
    partial: PartialKv | None,
    found: dict[str, Tensor],
) -> Iterator[str]:
    for buffer in backend.buffers:
        if buffer.name in found:
            yield f"buffers: {buffer.name!r} is there twice"
        symbols = backend.symbols.get(buffer.name.rpartition(".")[0], {})
        unknown = [d for d in buffer.shape if isinstance(d, str) and d not in symbols]
        if unknown:
            found.clear()
            yield f"buffers: {buffer.name!r} has the unknown symbol {unknown[0]!r}"
            return
        found[buffer.name] = buffer
    total = session_bytes(backend)
    if total > LARGEST_SESSION:
        yield f"buffers: are {total} bytes together, more than the {LARGEST_SESSION} a session may have"
    needed: list[Tensor] = []
    for model, geometry in models.items():
        kv = found.get(names.buffer_name(model, names.KV))
        kv_dtype = kv.dtype if kv is not None else DType.FLOAT32
        if model in graphs:
            needed += drafter_buffers(graphs[model], geometry, models[names.TARGET], kv_dtype)
        else:
            needed += target_buffers(geometry, kv_dtype, rejection=rejects(graphs.values()))
            if partial is not None:
                needed += partial_buffers(geometry, partial, kv_dtype)
    for expected in (*needed, *sampling_buffers(models[names.TARGET].branches)):
        if found.get(expected.name) != expected:
            yield f"buffers: {expected.name!r} must be {_spell(expected)}, is {_spell(found.get(expected.name))}"


def _engine(engine: Engine) -> Iterator[str]:
    for kind, tensors in (("inputs", engine.inputs), ("outputs", engine.outputs)):
        if len({tensor.name for tensor in tensors}) < len(tensors):
            yield f"two {kind} have the same name"
        for tensor in tensors:
            if any(isinstance(d, str) and d not in (*names.SYMBOLS, names.CAPACITY) for d in tensor.shape):
                yield f"{kind} {tensor.name!r} has an unknown symbol in {_spell(tensor)}"
    for output, source in engine.aliases.items():
        if all(t.name != output for t in engine.outputs) or all(t.name != source for t in engine.inputs):
            yield f"the alias of {output!r} to {source!r} names no output and input"


class _Names:
    """Names that a stage may use: memory and engines of one backend."""

    def __init__(self, memory: Memory, backend: BackendPlan, partial: PartialKv | None) -> None:
        self._memory, self._backend, self._partial = memory, backend, partial

    def program(self, program: Program, name: str, kind: ProgramKind) -> Iterator[str]:
        for index, stage in enumerate(program.stages):
            for problem in (*self._stage(stage), *kv_problems(stage, name, kind.partial)):
                yield f"stage {index}, {stage.run!r}: {problem}"
        if kind.compacting:
            if [stage.run for stage in program.stages] != ["KvGather"] or program.results is not None:
                yield "must be KvGather alone, without results: it moves slots that are filled"
        elif name == names.REFRESH:
            assert self._partial is not None, "a program that is required"
            yield from refresh_problems(program, self._partial)
        elif all(stage.kind is not StageKind.ENGINE for stage in program.stages):
            yield "runs no engine"
        if name == names.BEAM and (len(program.stages) > 1 or program.results is not None):
            yield "must be one engine without results: the host writes its bias and reads its logits"
        yield from self._results(program, kind)

    def _stage(self, stage: Stage) -> Iterator[str]:
        if stage.model not in self._backend.symbols:
            yield f"runs for the model {stage.model!r}, which the plan lacks"
            return
        for parameter, buffer in (*stage.inputs.items(), *stage.outputs.items()):
            if buffer not in self._memory:
                yield f"{parameter!r} is bound to buffer {buffer!r}, which the plan lacks"
                return
            if stage.inputs.get(parameter, buffer) != buffer:
                yield f"{parameter!r} is bound to two buffers"
        for buffer in stage.outputs.values():
            if buffer not in self._backend.views and not _writes(stage, *buffer.rpartition(".")[::2]):
                yield f"writes {buffer!r}, which only the host may write"
        if stage.kind is StageKind.ENGINE and stage.run not in self._backend.engines:
            yield "the plan has no engine of this name"
        elif stage.kind is StageKind.ENGINE:
            yield from self._engine_stage(stage, self._backend.engines[stage.run])

    def _engine_stage(self, stage: Stage, engine: Engine) -> Iterator[str]:
        symbols = self._backend.symbols[stage.model]
        for bound, tensors in ((stage.inputs, engine.inputs), (stage.outputs, engine.outputs)):
            if set(bound) != {tensor.name for tensor in tensors}:
                yield "does not bind the engine's inputs and outputs, each once"
                return
            for tensor in tensors:
                memory = self._memory[bound[tensor.name]]
                sizes = dict(symbols)
                if names.CAPACITY in tensor.shape:
                    place = tensor.shape.index(names.CAPACITY)
                    sizes[names.CAPACITY] = int(memory.shape[place]) if place < len(memory.shape) else 0
                if tensor.dtype is not memory.dtype or not _fits(tensor.resolve(sizes), memory.shape):
                    yield f"{tensor.name!r} is {_spell(tensor)}, its buffer {memory.name!r} {_spell(memory)}"
        for output, source in engine.aliases.items():
            if stage.outputs[output] != stage.inputs[source]:
                yield f"{output!r} must be bound to the memory of {source!r}"

    def _results(self, program: Program, kind: ProgramKind) -> Iterator[str]:
        results = program.results
        if results is None:
            if kind.plain or kind.speculative:
                yield "has no results"
            return
        if (results.counts is not None) != kind.speculative or (results.kept is not None) != kind.speculative:
            yield "results.counts and results.kept belong to programs that speculate, and to no other"
        written = {buffer for stage in program.stages for buffer in stage.outputs.values()}
        for buffer, tensor in (
            (results.tokens, names.COMMITTED),
            (results.counts, names.ACCEPTED_COUNT),
            (results.kept, names.KEPT_INDICES),
        ):
            if buffer is not None and (buffer not in written or buffer != names.buffer_name(names.TARGET, tensor)):
                yield f"the results in {buffer!r} are not the target's {tensor!r}, written by a stage"


def _writes(stage: Stage, model: str, tensor: str) -> bool:
    """Whether the stage may write `tensor` of `model`: results, and a drafter's engine the target's next step."""
    if model == names.TARGET and stage.model != names.TARGET:
        return stage.kind is StageKind.ENGINE and tensor in names.DRAFTED.values()
    if model == names.PARTIAL:
        return stage.model == names.TARGET and tensor in names.PARTIAL_WRITTEN
    return model == stage.model and tensor in names.STAGE_WRITTEN


def _fits(shape: Sequence[int], memory: Sequence[int | str]) -> bool:
    if len(shape) != len(memory) or not shape:
        return tuple(shape) == tuple(memory)
    return tuple(shape[1:]) == tuple(memory[1:]) and shape[0] <= int(memory[0])


def _spell(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else f"{tensor.dtype}[{', '.join(map(str, tensor.shape))}]"
