"""The buffers that every session has, because the host itself reads and writes them: their dtypes and shapes.

The compiler writes them into a plan, `plans.check` holds a plan to them. A plan may have more: those only
its stages use.
"""

from __future__ import annotations

from outrider.plans import names
from outrider.plans.buffers import DType, Tensor
from outrider.plans.kv_slots import slot_size
from outrider.plans.manifest import Geometry, GraphDrafter
from outrider.plans.partial_kv import PartialKv
from outrider.plans.sampling import SETTINGS

_Table = dict[str, tuple[DType, tuple[int | str, ...]]]


def target_buffers(geometry: Geometry, kv_dtype: DType, *, rejection: bool) -> tuple[Tensor, ...]:
    """Buffers that the target owns: its step, its KV cache with the slot table, and its results.

    `rejection`: a drafter's distributions as well, and what became of them.
    """
    new, picked = names.NEW, names.LOGITS
    integer, real = DType.INT64, DType.FLOAT32
    table: _Table = {
        **_step(geometry, kv_dtype),
        names.LOGIT_INDICES: (integer, (picked,)),
        names.FREE_BIAS: (integer, (1,)),
        names.LOGITS_OUT: (real, (picked, geometry.vocab_size)),
        names.COMMITTED: (integer, (picked,)),
        names.ACCEPTED_COUNT: (integer, (geometry.branches,)),
        names.KEPT_INDICES: (integer, (new,)),
        names.KEPT_COUNT: (integer, (1,)),
    }
    if geometry.branches > 1:
        table[names.MOVE_TO] = (integer, (names.ROWS,))
    if (conv := geometry.convolutions) is not None:
        branches = (geometry.branches,)
        table |= {
            names.CONV_TAIL: (real, (conv.layers, *branches, conv.kernel - 1, conv.channels)),
            names.CONV_LOG: (real, (conv.layers, *branches, conv.log, conv.channels)),
            names.REPLAY: (integer, (*branches, conv.log)),
            names.REPLAYS: (integer, branches),
            names.FOLD: (integer, branches),
        }
    if rejection:
        table[names.DRAFT_PROBS] = (real, (picked, geometry.vocab_size))
        table[names.TRIALS] = (DType.FLOAT64, (picked, 2))
    if geometry.feature_size:
        table[names.FEATURES] = (real, (names.FEATURED, geometry.feature_size))
    return _named(names.TARGET, table)


def status_buffers() -> tuple[Tensor, ...]:
    """Buffers that the target owns besides where its engine accepts: the status."""
    return _named(names.TARGET, dict.fromkeys((names.STATUS, names.UNREAD_STATUS), (DType.INT64, (1,))))


def partial_buffers(g: Geometry, partial: PartialKv, kv_dtype: DType) -> tuple[Tensor, ...]:
    """The partial KV cache with its slot table, summaries of the full one, and the queries that choose from these."""
    integer, capacity = DType.INT64, partial.capacity(g.view_bucket)
    summary = (DType.FLOAT32, (g.rows, g.layers, g.kv_heads, g.head_dim, partial.summaries(g.capacity)))
    chosen = (g.layers, g.kv_heads, partial.n_retrieval_blocks)
    table: _Table = {
        names.KV: (kv_dtype, (2 * g.layers, g.rows, g.kv_heads, capacity, slot_size(kv_dtype, g.head_dim))),
        names.BIM: (integer, (g.rows, capacity)),
        names.SLOT_POSITIONS: (integer, (g.rows, capacity)),
        **dict.fromkeys((names.KEY_MAX, names.KEY_MIN), summary),
        names.LAYER_WINDOWS: (integer, (g.layers,)),
        names.SELECTED: (integer, chosen),
        names.RESIDENT: (integer, (g.rows, *chosen)),
        **dict.fromkeys((names.ROW, names.COVERED, names.SUMMARISED, names.BUDGET), (integer, (1,))),
    }
    queries: _Table = {names.QUERIES: (DType.FLOAT32, (g.layers, names.NEW, g.heads * g.head_dim))}
    return _named(names.PARTIAL, table) + _named(names.TARGET, queries)


def drafter_buffers(drafter: GraphDrafter, geometry: Geometry, target: Geometry, kv_dtype: DType) -> tuple[Tensor, ...]:
    """Buffers that a drafter with an engine owns: its step, its KV cache with the slot table, and a tree of its own."""
    grown = (geometry.branches * drafter.tree.nodes,)
    tree = {name: DType.FLOAT32 if name == names.TREE_SCORE else DType.INT64 for name in names.TREE}
    table = _step(geometry, kv_dtype) | {name: (dtype, grown) for name, dtype in tree.items()}
    if drafter.acceptance == "rejection":
        table[names.DRAFT_PROBS] = (DType.FLOAT32, (*grown, target.vocab_size))
    several = geometry.branches > 1
    if drafter.compacts:
        table[names.TREE_SLOTS] = (DType.INT64, grown)
    if drafter.compacts or several:
        table[names.KEPT_INDICES] = (DType.INT64, (geometry.capacity if several else drafter.grown,))
        table[names.KEPT_COUNT] = (DType.INT64, (1,))
        table[names.MOVE_TO] = (DType.INT64, (names.ROWS,))
    if several:
        table[names.TIP_INDICES] = table[names.TIP_BRANCH] = (DType.INT64, (names.ROWS, names.TIPS))
    table[names.TIP_POSITION] = (DType.INT64, (geometry.branches,))
    table[names.NOISE] = (DType.FLOAT32, (geometry.branches, drafter.tree.depth + 1, target.vocab_size))
    table[names.DRAFT_SAMPLING] = (DType.FLOAT32, (geometry.branches, SETTINGS))
    if drafter.reads_features:
        table[names.FEATURE_INDICES] = (DType.INT64, (names.NEW,))
    return _named(drafter.name, table)


def _step(g: Geometry, kv_dtype: DType) -> _Table:
    new, integer = names.NEW, DType.INT64
    return {
        names.TOKEN_IDS: (integer, (new,)),
        names.POSITIONS: (integer, (new,)),
        names.BRANCH: (integer, (new,)),
        names.PARENT: (integer, (new,)),
        names.ROW_SPLITS: (integer, (names.ROW_EDGES,)),
        names.ATTN_BIAS: (DType.FLOAT32, (names.ROWS, 1, names.PLACES, names.VIEW)),
        names.KV: (kv_dtype, (2 * g.layers, names.ROWS, g.kv_heads, g.capacity, slot_size(kv_dtype, g.head_dim))),
        names.BIM: (integer, (names.ROWS, g.capacity)),
        names.SLOT_POSITIONS: (integer, (names.ROWS, g.capacity)),
        names.PAST_LENGTH: (integer, (names.ROWS,)),
    }


def _named(model: str, table: _Table) -> tuple[Tensor, ...]:
    return tuple(
        Tensor(name=names.buffer_name(model, name), dtype=d, shape=shape) for name, (d, shape) in table.items()
    )


def sampling_buffers(branches: int) -> tuple[Tensor, ...]:
    """The sampling slots, which every model's draws read, and by which rule a branch's drafts are accepted."""
    rows = Tensor(name=names.SAMPLING, dtype=DType.FLOAT64, shape=(branches, SETTINGS))
    table = {
        names.SEED: DType.UINT64,
        names.STREAM: DType.INT64,
        names.SKIP_SAMPLE_ADJUSTMENT: DType.INT64,
        names.BY_REJECTION: DType.INT64,
    }
    return (rows, *(Tensor(name=name, dtype=dtype, shape=(branches,)) for name, dtype in table.items()))
