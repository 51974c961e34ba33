"""WindowBias: the bias under which each query sees its last keys alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outrider.plans import names
from outrider.plugins.ops.bim_mask import MASKED
from outrider.plugins.ops.op import Op
from outrider.plugins.schema import ATTN_BIAS, AttributeSpec, OpSchema, TensorSpec
from outrider.plugins.tensorrt.plugin import Declined

SCHEMA = OpSchema(
    name="WindowBias",
    version=1,
    doc="""The bias under which each query sees no more than the last `window` keys of those that it sees.

    Of the keys with bias 0 in attn_bias[r, 0, s], the last `window` >= 1 have bias 0 in the output, the query's own key
    among them; every other key has float32's lowest. Slots ascend along a path, so this is a window over distance along
    the path, for chains, trees, branches and rows alike. Stands in graphs only: a function body of standard ops, or
    part of attention on the CPU.
    Source: sliding windows of Mistral (arXiv 2310.06825) and Gemma 2 (arXiv 2408.00118).""",
    inputs=(ATTN_BIAS,),
    outputs=(TensorSpec("window_bias", "float32", (names.ROWS, 1, names.PLACES, names.VIEW)),),
    attributes=(AttributeSpec("window", int),),
)

OP = Op(SCHEMA, Declined("standard ops compute it once for all layers that share a window"))


def window_bias(attn_bias: NDArray[np.float32], window: int) -> NDArray[np.float32]:
    """Return the bias f32 `[R, 1, S, T]` under which each query sees the last `window` >= 1 keys of those that it sees
    under `attn_bias`.
    """
    visible = attn_bias == 0
    from_here = np.flip(np.cumsum(np.flip(visible, -1), axis=-1), -1)  # keys that are visible, from this one on
    return np.where(visible & (from_here <= window), np.float32(0), MASKED)
