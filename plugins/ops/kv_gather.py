"""KvGather: compact slots of a KV cache in place."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.plans import names
from outrider.plugins.cuda.launches import THREADS, make_launch
from outrider.plugins.ops.op import Op
from outrider.plugins.schema import KV, ROW_SPLITS, SLOT, OpSchema, one, per_new_token, per_row
from outrider.plugins.tensorrt.plugin import Plugin

SCHEMA = OpSchema(
    name="KvGather",
    version=1,
    doc="""Compact slots of a KV cache in place.

    source[:source_count] are new tokens of the step; row_splits says, as in BimMask, which row owns which.
    For i = 0 .. source_count-1, one after another, with r the row of source[i], in every plane and head of that row:
    slot source_base[r] + (source[i] - row_splits[r]) -> slot destination[r] + (entries before i that r owns).
    Tokens that ascend within a row and slots that do not lie below their destinations arrive whole. Slots that stay
    where they are cost nothing. A step may have fewer rows than the cache: its first ones.
    Errors: ValueError for splits, tokens after the last split, and slots outside the cache, before any move.""",
    inputs=(
        KV,
        per_new_token("source"),
        one("source_count"),
        ROW_SPLITS,
        per_row("source_base"),
        per_row("destination"),
    ),
    outputs=(KV,),
    extents=(names.ROWS,),
)

_LAUNCH = make_launch(
    SCHEMA,
    kernel="outrider_kv_gather",
    numbers=(names.ROWS, "cache_rows", "heads", "capacity", "units", "unit"),
    blocks=lambda s: s["planes"] * s[names.ROWS] * s["heads"],
    threads=lambda s: min(THREADS, max(32, s["units"])),
)
_PLUGIN = Plugin(
    name="KvGather",
    launch=_LAUNCH,
    inputs=SCHEMA.inputs,
    outputs=SCHEMA.outputs,
    guard="moves_fit(source_count, row_splits, source_base, destination, R, block_index() / heads % R, N, capacity)",
    extra=(names.NEW,),
    aliased={names.KV: names.KV},
    constants=(SLOT,),
)
OP = Op(SCHEMA, (_PLUGIN,), _LAUNCH)


def kv_gather(
    kv: NDArray[Any],
    source: NDArray[np.int64],
    row_splits: NDArray[np.int64],
    source_base: NDArray[np.int64],
    destination: NDArray[np.int64],
) -> None:
    """Move the slots of new tokens `source` within their rows of `kv` `[planes, R, heads, capacity, head_dim]`.

    In the order of `source`, the token at place s of row r moves from slot source_base[r] + s to the next slot from
    destination[r] on.
    """
    following = destination.copy()
    for token in source.tolist():
        row = int(np.searchsorted(row_splits, token, side="right")) - 1
        kv[:, row, :, following[row]] = kv[:, row, :, source_base[row] + token - row_splits[row]]
        following[row] += 1
