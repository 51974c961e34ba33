"""Programs as data: which stages a prefill, a decoding step and a speculative step are, over which buffers."""

from __future__ import annotations

from collections.abc import Sequence

from plans import names
from plans.manifest import Engine, Geometry, NgramDrafter, Program, Results, Stage, StageKind, View

_SAMPLING = (names.TEMPERATURE, names.TOP_K, names.TOP_P, names.FILTER_ORDER, names.SEED, names.STREAM)


def symbol_limits(geometry: Geometry, drafters: Sequence[NgramDrafter]) -> dict[str, int]:
    """Largest step: a full prefill chunk with the longest draft hanging from its end."""
    nodes = 1 + max((d.max_draft for d in drafters), default=0)
    return {
        names.NEW: geometry.prefill_chunk + nodes - 1,
        names.VIEW: geometry.capacity - geometry.view_bucket,
        names.LOGITS: nodes,
    }


def cache_views(geometry: Geometry) -> dict[str, View]:
    """Each layer's K and V are planes of the one `kv` buffer, so that an op moves rows of all at once."""
    views = {}
    for layer in range(geometry.layers):
        views[names.k_cache(layer)] = View(buffer=names.KV, plane=2 * layer)
        views[names.v_cache(layer)] = View(buffer=names.KV, plane=2 * layer + 1)
    return views


def emit_programs(target: Engine, drafters: Sequence[NgramDrafter]) -> dict[str, Program]:
    """`prefill`, `decode` and one `speculate.NAME` per drafter."""
    mask = _op("BimMask", (names.BIM, names.PAST_LENGTH, names.BRANCH, names.PARENT), (names.ATTN_BIAS,))
    forward = Stage(
        kind=StageKind.ENGINE,
        run="target",
        inputs={tensor.name: tensor.name for tensor in target.inputs},
        outputs={tensor.name: target.aliases.get(tensor.name, tensor.name) for tensor in target.outputs},
    )
    drawn = (names.LOGITS_OUT, names.LOGIT_ROWS, names.POSITIONS, names.BRANCH)
    sample = _op("Sample", (*drawn, *_SAMPLING), (names.COMMITTED,))
    accept = _op(
        "TreeAccept",
        (*drawn, names.TOKEN_IDS, names.PARENT, *_SAMPLING),
        (names.COMMITTED, names.ACCEPTED_COUNT, names.KEPT_ROWS, names.KEPT_COUNT),
    )
    compact = Stage(
        kind=StageKind.OP,
        run="KvGather",
        inputs={
            "kv": names.KV,
            "source": names.KEPT_ROWS,
            "source_count": names.KEPT_COUNT,
            "source_base": names.PAST_LENGTH,
            "destination": names.PAST_LENGTH,
        },
    )
    programs = {
        names.PREFILL: Program(stages=(mask, forward)),
        names.DECODE: Program(stages=(mask, forward, sample), results=Results(tokens=names.COMMITTED)),
    }
    for drafter in drafters:
        draft = Stage(kind=StageKind.DRAFT, run=drafter.name)
        programs[names.speculate(drafter.name)] = Program(
            stages=(draft, mask, forward, accept, compact),
            results=Results(tokens=names.COMMITTED, counts=names.ACCEPTED_COUNT),
        )
    return programs


def _op(name: str, inputs: Sequence[str], outputs: Sequence[str]) -> Stage:
    """An op whose parameters have the names of the buffers they are bound to."""
    return Stage(kind=StageKind.OP, run=name, inputs={n: n for n in inputs}, outputs={n: n for n in outputs})
