"""The buffers that every session has, because the host itself reads and writes them: their dtypes and shapes.

The compiler writes them into a plan, `plans.check` holds a plan to them. A plan may have more: those only
its stages use.
"""

from __future__ import annotations

from plans import names
from plans.buffers import DType, Tensor
from plans.manifest import Geometry


def step_buffers(geometry: Geometry, kv_dtype: DType) -> tuple[Tensor, ...]:
    """Every buffer of one session, in-one-sequence mode (one row)."""
    g = geometry
    kv_shape = (2 * g.layers, g.kv_heads, g.capacity, g.head_dim)
    new, view, picked = names.NEW, names.VIEW, names.LOGITS
    table: dict[str, tuple[DType, tuple[int | str, ...]]] = {
        names.TOKEN_IDS: (DType.INT64, (new,)),
        names.POSITIONS: (DType.INT64, (new,)),
        names.BRANCH: (DType.INT64, (new,)),
        names.PARENT: (DType.INT64, (new,)),
        names.LOGIT_ROWS: (DType.INT64, (picked,)),
        names.ATTN_BIAS: (DType.FLOAT32, (1, 1, new, view)),
        names.LOGITS_OUT: (DType.FLOAT32, (picked, g.vocab_size)),
        names.BIM: (DType.INT64, (g.capacity,)),
        names.PAST_LENGTH: (DType.INT64, (1,)),
        names.KV: (kv_dtype, kv_shape),
        names.COMMITTED: (DType.INT64, (picked,)),
        names.ACCEPTED_COUNT: (DType.INT64, (g.branches,)),
        names.KEPT_ROWS: (DType.INT64, (new,)),
        names.KEPT_COUNT: (DType.INT64, (1,)),
        names.TEMPERATURE: (DType.FLOAT64, (g.branches,)),
        names.TOP_K: (DType.INT64, (g.branches,)),
        names.TOP_P: (DType.FLOAT64, (g.branches,)),
        names.FILTER_ORDER: (DType.INT64, (g.branches,)),
        names.SEED: (DType.UINT64, (g.branches,)),
        names.STREAM: (DType.INT64, (g.branches,)),
    }
    return tuple(Tensor(name=name, dtype=dtype, shape=shape) for name, (dtype, shape) in table.items())
