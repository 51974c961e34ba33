"""The buffers that every session has, because the host itself reads and writes them: their dtypes and shapes.

The compiler writes them into a plan, `plans.check` holds a plan to them. A plan may have more: those only
its stages use.
"""

from __future__ import annotations

from plans import names
from plans.buffers import DType, Tensor
from plans.manifest import Geometry


def step_buffers(model: str, geometry: Geometry, kv_dtype: DType) -> tuple[Tensor, ...]:
    """The buffers that `model` owns: its step, its arena with the slot map, and its results."""
    g = geometry
    new, view, picked = names.NEW, names.VIEW, names.LOGITS
    rows, edges, places = names.ROWS, names.ROW_EDGES, names.PLACES
    integer, real = DType.INT64, DType.FLOAT32
    table: dict[str, tuple[DType, tuple[int | str, ...]]] = {
        names.TOKEN_IDS: (integer, (new,)),
        names.POSITIONS: (integer, (new,)),
        names.BRANCH: (integer, (new,)),
        names.PARENT: (integer, (new,)),
        names.ROW_SPLITS: (integer, (edges,)),
        names.LOGIT_ROWS: (integer, (picked,)),
        names.ATTN_BIAS: (real, (rows, 1, places, view)),
        names.LOGITS_OUT: (real, (picked, g.vocab_size)),
        names.KV: (kv_dtype, (2 * g.layers, rows, g.kv_heads, g.capacity, g.head_dim)),
        names.BIM: (integer, (rows, g.capacity)),
        names.SLOT_POSITIONS: (integer, (rows, g.capacity)),
        names.PAST_LENGTH: (integer, (rows,)),
        names.COMMITTED: (integer, (picked,)),
        names.ACCEPTED_COUNT: (integer, (g.branches,)),
        names.KEPT_ROWS: (integer, (new,)),
        names.KEPT_COUNT: (integer, (1,)),
    }
    return tuple(Tensor(name=names.of(model, name), dtype=d, shape=shape) for name, (d, shape) in table.items())


def sampling_buffers(branches: int) -> tuple[Tensor, ...]:
    """The sampling slots, which every model's draws read."""
    table = {
        names.TEMPERATURE: DType.FLOAT64,
        names.TOP_K: DType.INT64,
        names.TOP_P: DType.FLOAT64,
        names.FILTER_ORDER: DType.INT64,
        names.SEED: DType.UINT64,
        names.STREAM: DType.INT64,
    }
    return tuple(Tensor(name=name, dtype=dtype, shape=(branches,)) for name, dtype in table.items())
