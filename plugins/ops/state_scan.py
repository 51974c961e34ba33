"""StateScan: linear attention by matrix states that recur along each token's path: the delta rule, or Mamba2's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.plans import names
from outrider.plugins.ops.op import Op
from outrider.plugins.reference.lanes import lanes_exp, lanes_softplus, lanes_sum, sigmoid
from outrider.plugins.reference.quant_matmul import fma
from outrider.plugins.reference.quantize import Float32
from outrider.plugins.schema import STATE_PATH, AttributeSpec, OpSchema, TensorSpec
from outrider.plugins.tensorrt.plugin import Declined

COLUMNS = 32
"""Values of a tile: a state is kept as tiles `[keys, 32]`, the last one with columns that nobody reads."""

_GATE = ("float32", (1, names.NEW, "heads"))
_BY_HEAD = ("float32", ("heads",))
_STATE = ("float32", ("branches", "heads", "tiles", "keys", COLUMNS))
_LOG = ("float32", ("branches", "log", "record"))

SCHEMA = OpSchema(
    name="StateScan",
    version=1,
    doc="""Linear attention by matrix states that recur along each token's path: the delta rule, or Mamba2's.

    x holds of each token q | k | v: q and k of `key_heads` heads, v of all heads, `values` numbers each; head h reads
    key head h // (heads / key_heads). Head h has the state S [keys, values], zeros at first. With step = log(1 +
    exp(a + step_bias)) within [least_step, most_step] and g = exp(-exp(decay_log) * step), a token makes of the state S
    of its parent S' = g S + k d^T, and gets q^T S' + skip * v, computed as g (q^T S) + (q . k) d. With `delta`, q and k
    are first divided by the root of their sum of squares + 1e-6, q by the root of keys too, and d = beta (v - g (k^T
    S)), beta = scale / (1 + exp(-b)); without, d = step * v.
    States, `fold`, and what is replayed are by branch as those of PathConv. A record is k | v | g | beta, or step.
    Sums over keys are fused and ascend, one a value; q . k and sums of squares are in sixteen lanes (`lanes_sum`). So a
    token's result has the same bits in any chunk, tree and company.
    Errors: those of PathConv.
    Source: gated delta networks, arXiv 2412.06464; Mamba2, arXiv 2405.21060.""",
    inputs=(
        TensorSpec("x", "float32", (1, names.NEW, "channels")),
        TensorSpec("a", *_GATE),
        TensorSpec("decay_log", *_BY_HEAD),
        TensorSpec("step_bias", *_BY_HEAD),
        TensorSpec(names.STATE, *_STATE),
        TensorSpec(names.STATE_LOG, *_LOG),
        *STATE_PATH,
        TensorSpec("b", *_GATE, optional=True),
        TensorSpec("skip", *_BY_HEAD, optional=True),
    ),
    outputs=(
        TensorSpec("out", "float32", (1, names.NEW, "heads * values")),
        TensorSpec(names.cache_output(names.STATE), *_STATE),
        TensorSpec(names.cache_output(names.STATE_LOG), *_LOG),
    ),
    attributes=(
        AttributeSpec("key_heads", int),
        AttributeSpec("values", int),
        AttributeSpec("delta", int, 1),
        AttributeSpec("scale", float, 1.0),
        AttributeSpec("least_step", float, 0.0),
        AttributeSpec("most_step", float, float("inf")),
    ),
)

OP = Op(SCHEMA, Declined("it has no kernel for GPUs"))

_Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Scan:
    """The constants of a scan: `decay_log`, `step_bias` and `skip` `[heads]`, and the op's attributes."""

    decay_log: Float32
    step_bias: Float32
    key_heads: int
    values: int
    delta: bool = True
    scale: float = 1.0
    least_step: float = 0.0
    most_step: float = float("inf")
    skip: Float32 | None = None

    def record(self, x: Float32, a: Float32, b: Float32 | None) -> tuple[Float32, Float32, Float32, Float32, Float32]:
        """Return q and k `[key_heads, keys]`, v `[heads, values]`, g and beta `[heads]` of a token."""
        heads = len(a)
        both, v = np.split(x, [len(x) - heads * self.values])
        q, k = both.reshape(2, self.key_heads, -1)
        if self.delta:
            root = np.float32(1) / np.sqrt(np.float32(q.shape[1]))
            q, k = _unit(q, root), _unit(k, np.float32(1))
        step = np.clip(lanes_softplus(a + self.step_bias), np.float32(self.least_step), np.float32(self.most_step))
        low = lanes_exp(-np.abs(self.decay_log))
        g = lanes_exp(-(np.where(self.decay_log < 0, low, np.float32(1) / low) * step))
        return q, k, v.reshape(heads, -1), g, step if b is None else sigmoid(b) * np.float32(self.scale)

    def change(self, state: Float32, k: Float32, v: Float32, g: Float32, beta: Float32) -> tuple[Float32, Float32]:
        """Return the state `[heads, keys, values]` after a token, and its d `[heads, values]`."""
        k, seen = np.repeat(k, len(v) // len(k), 0), np.zeros_like(v)
        if self.delta:
            for key in range(k.shape[1]):
                seen = fma(np.broadcast_to(k[:, key : key + 1], seen.shape), state[:, key], seen)
        d = beta[:, None] * (v - g[:, None] * seen if self.delta else v)
        shape = state.shape
        return fma(
            np.broadcast_to(k[:, :, None], shape), np.broadcast_to(d[:, None], shape), g[:, None, None] * state
        ), d

    def ask(self, state: Float32, q: Float32, k: Float32, v: Float32, g: Float32, d: Float32) -> Float32:
        """Return what a token gets, `[heads, values]`, where its parent left `state`."""
        repeats = len(v) // len(k)
        product, queries, found = np.repeat(lanes_sum(q, k), repeats), np.repeat(q, repeats, 0), np.zeros_like(v)
        for key in range(queries.shape[1]):
            found = fma(np.broadcast_to(queries[:, key : key + 1], found.shape), state[:, key], found)
        found = fma(np.broadcast_to(product[:, None], found.shape), d, g[:, None] * found)
        if self.skip is None:
            return found
        return np.where(self.skip[:, None] == 0, found, fma(np.broadcast_to(self.skip[:, None], v.shape), v, found))


def _unit(x: Float32, scale: np.float32) -> Float32:
    unit: Float32 = x * ((np.float32(1) / np.sqrt(lanes_sum(x, x) + np.float32(1e-6))) * scale)[:, None]
    return unit


def state_scan(
    scan: Scan,
    inputs: tuple[Float32, Float32, Float32 | None],
    state: tuple[Float32, Float32],
    path: tuple[_Integers, _Integers],
    kept: tuple[_Integers, _Integers, _Integers],
) -> tuple[Float32, Float32, Float32]:
    """Return `(out, state, log)`: `inputs` are x `[N, C]`, a and b `[N, heads]`; `state`, `path` and `kept` as for
    `path_conv`, the state in tiles."""
    (x, a, b), (tiles, log), (parent, branch), (replay, replays, fold) = inputs, state, path, kept
    heads, keys = tiles.shape[1], tiles.shape[3]
    out, new_tiles, new_log = np.zeros((len(x), heads * scan.values), np.float32), tiles.copy(), log.copy()
    cuts = np.cumsum([scan.key_heads * keys, heads * scan.values, heads])
    for number in range(len(tiles)):
        tokens = np.flatnonzero(branch == number)
        if not len(tokens):
            continue
        known = untiled(tiles[number], scan.values)
        for row in replay[number, : replays[number]]:
            k, v, g, beta = np.split(log[number, row], cuts)
            known, _ = scan.change(known, k.reshape(scan.key_heads, -1), v.reshape(heads, -1), g, beta)
        after: dict[int, Float32] = {-1: known}
        for place, token in enumerate(tokens):
            q, k, v, g, beta = scan.record(x[token], a[token], None if b is None else b[token])
            met = after[int(parent[token])]
            after[int(token)], d = scan.change(met, k, v, g, beta)
            out[token] = scan.ask(met, q, k, v, g, d).reshape(-1)
            if place >= fold[number]:
                new_log[number, place - fold[number]] = np.concatenate((k.reshape(-1), v.reshape(-1), g, beta))
        folded = after[-1 if fold[number] == 0 else int(tokens[fold[number] - 1])]
        new_tiles[number] = tiled(folded, tiles[number])
    return out, new_tiles, new_log


def untiled(tiles: Float32, values: int) -> Float32:
    """Return states `[heads, keys, values]` of their tiles `[heads, tiles, keys, 32]`."""
    heads, _, keys, _ = tiles.shape
    return tiles.swapaxes(1, 2).reshape(heads, keys, -1)[..., :values]


def tiled(state: Float32, like: Float32) -> Float32:
    """Return the tiles of states `[heads, keys, values]`; the columns of no value are as in `like`."""
    heads, tiles, keys, columns = like.shape
    whole = like.swapaxes(1, 2).reshape(heads, keys, -1).copy()
    whole[..., : state.shape[2]] = state
    return whole.reshape(heads, keys, tiles, columns).swapaxes(1, 2)
