"""Programs as data: which stages a prefill, a decoding step and a speculative step are, over which buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plans import names
from plans.manifest import Engine, Geometry, NgramDrafter, Program, Results, Stage, StageKind, View
from plugins.schemas import SCHEMAS

_SHARED = {names.TEMPERATURE, names.TOP_K, names.TOP_P, names.FILTER_ORDER, names.SEED, names.STREAM}
_COMPACT = {
    "source": names.KEPT_ROWS,
    "source_count": names.KEPT_COUNT,
    "source_base": names.PAST_LENGTH,
    "destination": names.PAST_LENGTH,
}


def symbol_limits(geometry: Geometry, drafters: Sequence[NgramDrafter]) -> dict[str, int]:
    """Largest step of the target in one row: a full prefill chunk with the longest draft hanging from its end."""
    nodes = 1 + max((d.max_draft for d in drafters), default=0)
    new = geometry.prefill_chunk + nodes - 1
    return {
        names.NEW: new,
        names.VIEW: geometry.capacity - geometry.view_bucket,
        names.LOGITS: nodes,
        names.ROWS: 1,
        names.ROW_EDGES: 2,
        names.PLACES: new,
    }


def cache_views(model: str, geometry: Geometry) -> dict[str, View]:
    """Each layer's K and V are planes of the one `kv` buffer, so that an op moves rows of all at once."""
    views = {}
    for layer in range(geometry.layers):
        for plane, cache in enumerate((names.k_cache(layer), names.v_cache(layer))):
            views[names.of(model, cache)] = View(buffer=names.of(model, names.KV), plane=2 * layer + plane)
    return views


def emit_programs(target: Engine, drafters: Sequence[NgramDrafter]) -> dict[str, Program]:
    """`prefill`, `decode` and one `speculate.NAME` per drafter."""
    model = names.TARGET
    mask, sample, accept = (_op(name, model) for name in ("BimMask", "Sample", "TreeAccept"))
    compact = _op("KvGather", model, _COMPACT)
    forward = Stage(
        kind=StageKind.ENGINE,
        run="target",
        model=model,
        inputs={t.name: names.of(model, t.name) for t in target.inputs},
        outputs={t.name: names.of(model, target.aliases.get(t.name, t.name)) for t in target.outputs},
    )
    tokens = names.of(model, names.COMMITTED)
    programs = {
        names.PREFILL: Program(stages=(mask, forward)),
        names.DECODE: Program(stages=(mask, forward, sample), results=Results(tokens=tokens)),
    }
    for drafter in drafters:
        draft = Stage(kind=StageKind.DRAFT, run=drafter.name, model=model)
        programs[names.speculate(drafter.name)] = Program(
            stages=(draft, mask, forward, accept, compact),
            results=Results(
                tokens=tokens,
                counts=names.of(model, names.ACCEPTED_COUNT),
                kept=names.of(model, names.KEPT_ROWS),
            ),
        )
    return programs


def _op(name: str, model: str, bound: Mapping[str, str] | None = None) -> Stage:
    """An op on the buffers of `model`: those with its parameters' names, unless `bound` says otherwise."""

    def buffer(parameter: str) -> str:
        tensor = (bound or {}).get(parameter, parameter)
        return tensor if tensor in _SHARED else names.of(model, tensor)

    schema = SCHEMAS[name]
    return Stage(
        kind=StageKind.OP,
        run=name,
        model=model,
        inputs={spec.name: buffer(spec.name) for spec in schema.inputs},
        outputs={spec.name: buffer(spec.name) for spec in schema.outputs},
    )
