"""Programs as data: the stages of prefill, decoding, beam search and speculation, and the buffers they use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outrider.compiler.design import PlanDesign
from outrider.plans import names
from outrider.plans.manifest import Engine, GraphDrafter, Program, Results, Stage, StageKind, rejects
from outrider.plans.partial_kv import PartialKv
from outrider.plans.program_list import program_list
from outrider.plans.step_buffers import sampling_buffers
from outrider.plugins.ops import OPS
from outrider.plugins.schema import Purpose, Reduction

_SHARED = {tensor.name for tensor in sampling_buffers(1)}
_ACCEPTED = {
    "source": names.KEPT_INDICES,
    "source_count": names.KEPT_COUNT,
    "source_base": names.PAST_LENGTH,
    "destination": names.PAST_LENGTH,
}
_CACHES = ("k_cache.", "v_cache.")
_COMPACT = _ACCEPTED | {"destination": names.MOVE_TO}


def stages_around(model: str, drafter: GraphDrafter | None = None) -> tuple[tuple[Stage, ...], tuple[Stage, ...]]:
    """Return the ops before and after the engine of `model` that a backend may inline into the engine.

    TreeAccept also samples: one token is a tree of one node. `drafter` is the drafter of `model`; None for the target.
    """
    mask = _op("BimMask", model)
    if drafter is None:
        return (mask,), (_op("TreeAccept", model),)
    noise = _op("RaceNoise", model)
    if drafter.acceptance == "rejection":  # the drafter must not use the target's noise
        noise = noise.model_copy(update={"attributes": {"purpose": int(Purpose.DRAFT)}})
    return (noise, mask), ()


def emit_programs(engines: Mapping[str, Engine], design: PlanDesign) -> dict[str, Program]:
    """Emit the programs that `plans.program_list` lists.

    An op that an engine holds needs no stage. Where the engine accepts but the program does not, or accepts by another
    rule, the engine's status goes to a buffer that nobody reads.
    """
    model, drafters, branches, partial = names.TARGET, design.drafters, design.target.branches, design.partial
    (mask,), (walk,) = stages_around(model)
    forward = _engine(model, engines[model])
    masked = (*_needed(engines[model], mask), forward)
    gather = _op("KvGather", model, _ACCEPTED)

    def verify(accept: Stage) -> tuple[Stage, ...]:
        judged = _needed(engines[model], accept)
        return (*(_unasked(masked) if judged else masked), *judged, gather)

    by_rejection = _op("ChainAccept", model)  # ChainAccept also serves trees with coupled acceptance
    rejecting = [drafter for drafter in drafters if rejects([drafter])]
    tokens = names.buffer_name(model, names.COMMITTED)
    results = Results(
        tokens=tokens,
        counts=names.buffer_name(model, names.ACCEPTED_COUNT),
        kept=names.buffer_name(model, names.KEPT_INDICES),
    )
    listed = program_list(drafters, branches, engines, partial=partial is not None)
    programs = {
        names.PREFILL: Program(stages=_unasked(masked)),
        names.DECODE: Program(
            stages=(*masked, *_needed(engines[model], _op("Sample", model))), results=Results(tokens=tokens)
        ),
        names.VERIFY: Program(stages=verify(by_rejection if rejecting and branches > 1 else walk), results=results),
        names.BEAM: Program(stages=_unasked((forward,))),
    }
    if names.compact(model) in listed:
        programs[names.compact(model)] = Program(stages=(_op("KvGather", model, _COMPACT),))
    for drafter in drafters:
        if not isinstance(drafter, GraphDrafter):
            continue
        name, engine = drafter.name, engines[drafter.name]
        (noise, own_mask), _ = stages_around(name, drafter)
        around, apart = _needed(engine, noise, own_mask), _engine(name, engine)
        into_step = _engine(name, engine, names.DRAFTED)
        judged = verify(by_rejection if drafter in rejecting else walk)
        programs[names.speculate(name)] = Program(stages=(*around, into_step, *judged), results=results)
        if names.draft(name) in listed:
            programs[names.draft(name)] = Program(stages=(*around, apart))
        programs[names.extend(name)] = Program(stages=(*_needed(engine, own_mask), apart))
        if names.compact(name) in listed:
            programs[names.compact(name)] = Program(stages=(_op("KvGather", name, _COMPACT),))
    if partial is not None:
        committing = [name for name, program in programs.items() if program.results is not None]
        programs |= {names.partial(name): _over_partial(programs[name]) for name in committing}
        programs[names.REFRESH] = _refresh(partial)
    return programs


def _over_partial(program: Program) -> Program:
    """Return `program` with the target's stages on the partial KV cache and its slot table."""
    own = {
        names.buffer_name(names.TARGET, tensor): names.buffer_name(names.PARTIAL, tensor)
        for tensor in (names.KV, names.BIM)
    }

    def moved(bound: Mapping[str, str]) -> dict[str, str]:
        return {
            parameter: own.get(buffer, _in_partial(buffer) if parameter.startswith(_CACHES) else buffer)
            for parameter, buffer in bound.items()
        }

    stages = tuple(
        stage.model_copy(update={"inputs": moved(stage.inputs), "outputs": moved(stage.outputs)})
        if stage.model == names.TARGET
        else stage
        for stage in program.stages
    )
    return program.model_copy(update={"stages": stages})


def _in_partial(buffer: str) -> str:
    return names.buffer_name(names.PARTIAL, buffer.removeprefix(f"{names.TARGET}."))


def _refresh(partial: PartialKv) -> Program:
    """Return the program that summarises new blocks of the full KV cache, selects blocks, and gathers their KV."""
    of_target = {names.KV, names.QUERIES, names.KEPT_INDICES, names.KEPT_COUNT}
    own = {"partial_kv": names.KV}
    layout: dict[str, int | float] = {
        "block_size": partial.block_size,
        "sink_blocks": partial.n_sink_blocks,
        "window_blocks": partial.n_window_blocks,
    }
    choice = {"reduction": int(Reduction[partial.reduction.upper()]), "most_queries": partial.most_queries}

    def stage(name: str, more: Mapping[str, int]) -> Stage:
        def buffer(parameter: str) -> str:
            return names.buffer_name(
                names.TARGET if parameter in of_target else names.PARTIAL, own.get(parameter, parameter)
            )

        schema = OPS[name].schema
        return Stage(
            kind=StageKind.OP,
            run=name,
            inputs={spec.name: buffer(spec.name) for spec in schema.inputs},
            outputs={spec.name: buffer(spec.name) for spec in schema.outputs},
            attributes={**layout, **more},
        )

    return Program(stages=(stage("BlockSummary", {}), stage("BlockSelect", choice), stage("PartialKvGather", {})))


def _needed(engine: Engine, *ops: Stage) -> tuple[Stage, ...]:
    """Return the `ops` that the engine does not hold, and whose outputs are not all outputs of the engine."""
    given = {tensor.name for tensor in engine.outputs}
    return tuple(op for op in ops if op.run not in engine.holds and not given.issuperset(op.outputs))


def _unasked(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """Return the stages with the accept status of their engines sent to a buffer that nobody reads."""

    def unread(stage: Stage) -> dict[str, str]:
        if names.STATUS not in stage.outputs:
            return stage.outputs
        return stage.outputs | {names.STATUS: names.buffer_name(stage.model, names.UNREAD_STATUS)}

    return tuple(stage.model_copy(update={"outputs": unread(stage)}) for stage in stages)


def _engine(model: str, engine: Engine, drafted: Mapping[str, str] | None = None) -> Stage:
    """Return the stage of the engine of `model` on its buffers; a drafter's engine reads the target's features.

    `drafted` maps outputs of a drafter's engine to the buffers of the target's next step.
    """

    def buffer(tensor: str) -> str:
        if model != names.TARGET and tensor == names.FEATURES:
            return names.buffer_name(names.TARGET, tensor)
        if drafted and tensor in drafted:
            return names.buffer_name(names.TARGET, drafted[tensor])
        if tensor in _SHARED:
            return tensor
        return names.buffer_name(model, tensor)

    return Stage(
        kind=StageKind.ENGINE,
        run=model,
        model=model,
        inputs={t.name: buffer(t.name) for t in engine.inputs},
        outputs={t.name: buffer(engine.aliases.get(t.name, t.name)) for t in engine.outputs},
    )


def _op(name: str, model: str, bound: Mapping[str, str] | None = None) -> Stage:
    """Return an op's stage on the buffers of `model` that have its parameters' names, unless `bound` renames them."""

    def buffer(parameter: str) -> str:
        tensor = (bound or {}).get(parameter, parameter)
        return tensor if tensor in _SHARED else names.buffer_name(model, tensor)

    schema = OPS[name].schema
    return Stage(
        kind=StageKind.OP,
        run=name,
        model=model,
        inputs={spec.name: buffer(spec.name) for spec in schema.inputs},
        outputs={spec.name: buffer(spec.name) for spec in schema.outputs},
    )
