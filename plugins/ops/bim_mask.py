"""BimMask: the attention bias of a step, from the branches and ancestors that each query sees."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outrider.plans import names
from outrider.plugins.cuda.launches import make_launch
from outrider.plugins.ops.op import Op
from outrider.plugins.schema import (
    ATTN_BIAS,
    CAPACITY,
    INTEGER,
    ROW_SPLITS,
    OpSchema,
    TensorSpec,
    per_new_token,
    per_row,
)
from outrider.plugins.tensorrt.plugin import Plugin

SCHEMA = OpSchema(
    name="BimMask",
    version=1,
    doc="""The attention bias of a step: 0 where a key is visible, float32's lowest where it is not.

    Row r owns new tokens row_splits[r] .. row_splits[r+1]-1 (0 = row_splits[0] <= ... <= row_splits[R] = N; a row may
    own none), and its bias is attn_bias[r]. Its token n stands at place s = n - row_splits[r]:
    a committed key j < past_length[r] is visible iff bim[r, j] is -1 or branch[n]; the key of the row's token at place
    j, at past_length[r] + j, is visible iff that token is n or an ancestor of n through parent (parent[n] < n, a token
    of the same row; -1: its parent is committed; a prefill is a chain). All other keys are masked.
    Places after a row's tokens fill up the rectangle: they see key 0 alone, so that no softmax is over nothing.
    S >= a row's tokens and T >= past_length[r] + its tokens, for every row.
    Errors: ValueError for extents, splits, past_length, parents or branches out of range, before any write.""",
    inputs=(
        TensorSpec(names.BIM, INTEGER, (names.ROWS, CAPACITY)),
        per_row(names.PAST_LENGTH),
        ROW_SPLITS,
        per_new_token(names.BRANCH),
        per_new_token(names.PARENT),
    ),
    outputs=(ATTN_BIAS,),
    extents=(names.NEW, names.VIEW, names.ROWS, names.PLACES),
)

_LAUNCH = make_launch(
    SCHEMA,
    kernel="outrider_bim_mask",
    numbers=("capacity", names.VIEW, names.ROWS, names.PLACES),
    blocks=lambda s: s[names.ROWS] * s[names.PLACES],
)
_PLUGIN = Plugin(
    name="BimMask",
    launch=_LAUNCH,
    inputs=(
        *SCHEMA.inputs,
        TensorSpec("places", INTEGER, (names.PLACES,)),
        TensorSpec("view", INTEGER, (names.VIEW,)),
    ),
    outputs=SCHEMA.outputs,
    guard="row_fits(row_splits, past_length, block_index() / S, N) && T <= capacity",
    extra=(names.NEW,),
)
OP = Op(SCHEMA, (_PLUGIN,), _LAUNCH)


SHARED_PREFIX = -1
MASKED = np.finfo(np.float32).min


def ancestors(parent: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return `[N, N]`: whether key j is query i or an ancestor of query i."""
    line = np.eye(len(parent), dtype=bool)
    for i, p in enumerate(parent.tolist()):  # parents come first, so their lines are already complete
        if p >= 0:
            line[i] |= line[p]
    return line


def bim_mask(
    bim: NDArray[np.int64],
    past_length: NDArray[np.int64],
    row_splits: NDArray[np.int64],
    branch: NDArray[np.int64],
    parent: NDArray[np.int64],
    view: int,
    places: int,
) -> NDArray[np.float32]:
    """Return the bias f32 `[R, 1, places, view]` of new tokens with `branch` and `parent` `[N]`, split by `row_splits`.

    Row r's tokens stand after the first `past_length[r]` slots of `bim[r]`.
    """
    rows = len(past_length)
    lineage = ancestors(parent)
    visible = np.zeros((rows, places, view), dtype=bool)
    for row, past in enumerate(past_length.tolist()):
        first, end = row_splits[row : row + 2].tolist()
        new = end - first
        committed = bim[row, None, :past]
        visible[row, :new, :past] = (committed == SHARED_PREFIX) | (committed == branch[first:end, None])
        visible[row, :new, past : past + new] = lineage[first:end, first:end]
        visible[row, new:, :1] = True  # padding of the rectangle: key 0 alone, so that no softmax is over nothing
    return np.where(visible, np.float32(0), MASKED)[:, None]
