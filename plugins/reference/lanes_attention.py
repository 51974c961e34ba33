"""Attention of the kernel for ONNX Runtime on the CPU, to the last bit: a query over the keys that it sees."""

from __future__ import annotations

import numpy as np

from outrider.plugins.reference.lanes import lanes_exp
from outrider.plugins.reference.quant_matmul import fma
from outrider.plugins.reference.quantize import Float32

_LANES = 16
_CHUNK = 256
_ONE = np.float32(1)
_TANH_SMALL = np.float32(0.625)
_TANH_TERMS = [np.float32(x) for x in (-0.0057049884, 0.020639089, -0.053739716, 0.13331442, -0.33333282)]


def attend(
    query: Float32, keys: Float32, values: Float32, *, scale: float, softcap: float = 0.0, sink: float | None = None
) -> Float32:
    """Return what a query `[D]` gets from the keys and values `[count, D]` that it sees, in their order: `[D]`.

    Each 256 keys are a chunk, which is summed by itself. Its weights are `exp(score - the chunk's highest)`. Chunks are
    then summed in ascending order, each times `exp(its highest score - the highest of all)`. `sink` is the score of a
    key without a value: it counts among all, and its weight is added last. Who sees nothing gets zeros.
    """
    out = np.zeros(len(query), np.float32)
    if len(keys) == 0:
        return out
    scores = _dot(query, keys) * np.float32(scale)
    if softcap != 0:
        scores = _tanh(scores / np.float32(softcap)) * np.float32(softcap)
    chunks = [slice(first, first + _CHUNK) for first in range(0, len(keys), _CHUNK)]
    highest = np.array([scores[chunk].max() for chunk in chunks])
    top = highest.max() if sink is None else np.maximum(highest.max(), np.float32(sink))
    total = np.zeros((), np.float32)
    for chunk, most, factor in zip(chunks, highest, lanes_exp(highest - top), strict=True):
        weights = lanes_exp(scores[chunk] - most)
        of_chunk = np.zeros_like(out)
        for weight, value in zip(weights, values[chunk], strict=True):
            of_chunk = fma(weight, value, of_chunk)
        total = fma(_sum(weights), factor, total)
        out = fma(of_chunk, factor, out)
    if sink is not None:
        total += lanes_exp(np.float32(sink) - top)
    return out / total


def _tanh(x: Float32) -> Float32:
    """Return tanh: a polynomial of small numbers, `1 - 2e / (1 + e)` with `e = exp(-2|x|)` of others."""
    size, z = np.abs(x), x * x
    p = np.full_like(z, _TANH_TERMS[0])
    for term in _TANH_TERMS[1:]:
        p = fma(p, z, np.full_like(z, term))
    small = x * fma(p, z, np.full_like(z, _ONE))
    e = lanes_exp(size * np.float32(-2))
    large = _ONE - (e + e) / (_ONE + e)
    return np.where(size < _TANH_SMALL, small, np.where(x < 0, -large, large))


def _dot(query: Float32, keys: Float32) -> Float32:
    """Return query `[D]` . each of the keys `[count, D]`: lane l sums the dimensions l, l + 16, l + 32, ..."""
    query, keys = _in_lanes(query), _in_lanes(keys)
    sums = np.zeros((len(keys), _LANES), np.float32)
    for d in range(len(query)):
        sums = fma(query[d], keys[:, d], sums)
    return _of_lanes(sums)


def _sum(weights: Float32) -> Float32:
    """Return the sum of weights: lane l sums those of rank l, l + 16, l + 32, ..."""
    sums = np.zeros(_LANES, np.float32)
    for sixteen in _in_lanes(weights):
        sums = sums + sixteen
    return _of_lanes(sums)


def _in_lanes(x: Float32) -> Float32:
    """Return `[..., n]` as `[..., n / 16, 16]`, with zeros after the last number."""
    padding = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % _LANES)]
    return np.pad(x, padding).reshape(*x.shape[:-1], -1, _LANES)


def _of_lanes(sums: Float32) -> Float32:
    """Return the sum of the lanes of `[..., 16]`, in the order of `csrc/onnxruntime/attention_tile.h`."""
    for _ in range(2):  # in each quarter of four lanes, then of the quarters
        fours = sums.reshape(*sums.shape[:-1], -1, 4)
        sums = (fours[..., 0] + fours[..., 2]) + (fours[..., 1] + fours[..., 3])
    return sums[..., 0]
