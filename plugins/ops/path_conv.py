"""PathConv: a causal convolution of each token with those before it on its path, over a state of its branch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outrider.plans import names
from outrider.plugins.ops.op import Op
from outrider.plugins.reference.lanes import gated_unit
from outrider.plugins.reference.quant_matmul import fma
from outrider.plugins.reference.quantize import Float32
from outrider.plugins.schema import STATE_PATH, AttributeSpec, OpSchema, TensorSpec
from outrider.plugins.tensorrt.plugin import Declined

_X = ("float32", (1, names.NEW, "channels"))
_TAIL = ("float32", ("branches", "kernel - 1", "channels"))
_LOG = ("float32", ("branches", "log", "channels"))

SCHEMA = OpSchema(
    name="PathConv",
    version=1,
    doc="""A causal depthwise convolution of each token with those before it on its path, and the state that it leaves.

    Token n of branch b gives bias + the sum over t < kernel of weight[t] * row, the newest row its own, x[n], and the
    others those of its ancestors: by `parent` in the step, then the branch's committed tokens before it. Of these, the
    branch keeps `tail`, the last kernel - 1 rows before some position, and after it `log`, the rows of its tokens of
    its last step; those in `replay`, `replays` of them and a path, were accepted. With `silu`, the sum is multiplied by
    its sigmoid.
    Then the branch's state advances: its tail is that after the replayed rows and after the first `fold` of its tokens
    in the step, and its log has the rows of its others, in the step's order. Branches without tokens in the step keep
    what they have. Tokens of a number that no branch has give 0.
    Sums are fused and ascend from the oldest row. So a token's result has the same bits in any chunk, tree and company.
    Errors: parents that do not come before their tokens, more tokens than are folded and logged, records that are not
    there.
    Source: short convolutions of LFM2 (arXiv 2511.23404); inputs replayed in place of kept states, TensorRT-LLM.""",
    inputs=(
        TensorSpec("x", *_X),
        TensorSpec("weight", "float32", ("kernel", "channels")),
        TensorSpec(names.CONV_TAIL, *_TAIL),
        TensorSpec(names.CONV_LOG, *_LOG),
        *STATE_PATH,
        TensorSpec("bias", "float32", ("channels",), optional=True),
    ),
    outputs=(
        TensorSpec("out", *_X),
        TensorSpec(names.cache_output(names.CONV_TAIL), *_TAIL),
        TensorSpec(names.cache_output(names.CONV_LOG), *_LOG),
    ),
    attributes=(AttributeSpec("silu", int, 0),),
)

OP = Op(SCHEMA, Declined("it has no kernel for GPUs"))


def path_conv(
    x: Float32,
    weight: Float32,
    state: tuple[Float32, Float32],
    path: tuple[NDArray[np.int64], NDArray[np.int64]],
    kept: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]],
    bias: Float32 | None = None,
    *,
    silu: bool = False,
) -> tuple[Float32, Float32, Float32]:
    """Return `(out, tail, log)` for x `[N, C]`: `state` is (tail, log), `path` (parent, branch), `kept` (replay,
    replays, fold)."""
    (tail, log), (parent, branch), (replay, replays, fold) = state, path, kept
    out, new_tail, new_log = np.zeros_like(x), tail.copy(), log.copy()
    before = len(weight) - 1
    for number in range(len(tail)):
        tokens = np.flatnonzero(branch == number)
        if not len(tokens):
            continue
        known = np.concatenate((tail[number], log[number, replay[number, : replays[number]]]))
        for token in tokens:
            rows, node, back = list[Float32](), int(token), len(known)
            while len(rows) <= before:
                if node < 0:
                    back -= 1
                rows.append(x[node] if node >= 0 else known[back])
                node = int(parent[node]) if node >= 0 else node
            total = np.zeros_like(x[0]) if bias is None else bias
            for factor, row in zip(weight, reversed(rows), strict=True):
                total = fma(factor, row, total)
            out[token] = gated_unit(total, np.ones_like(total)) if silu else total
        fed, folded = x[tokens], int(fold[number])
        new_tail[number] = np.concatenate((known, fed[:folded]))[-before:]
        new_log[number, : len(fed) - folded] = fed[folded:]
    return out, new_tail, new_log
