"""Rounding of weights to the nearest steps."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.compiler.deferred import StoredTensor
from outrider.compiler.quantization.form import QuantizedWeight, WeightSource
from outrider.plans.errors import CheckpointError
from outrider.plugins.quant_layout import BLOCK, fits_half

_LARGEST_HALF = np.float32(65504)
_SLICE = 1 << 20  # numbers rounded at once


def integer_limits(bits: int) -> tuple[int, int]:
    """Return the smallest and the largest integer of weights."""
    return (-127, 127) if bits == 8 else (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)


def round_to_nearest(weight: NDArray[np.float32], bits: int) -> QuantizedWeight:
    """Round weights `[N, K]` block by block, each to the nearest step, without minimums.

    The largest magnitude of a block of 8 bits is 127 steps. With fewer bits it is the smallest integer, of either sign,
    since a step more counts there. Scales are rounded to float16 first, as they are stored.
    """
    outputs, inputs = weight.shape
    blocks = weight.reshape(outputs, inputs // BLOCK, BLOCK).astype(np.float32, copy=False)
    low, high = integer_limits(bits)
    if low == -high:
        scales = np.abs(blocks).max(axis=2) / np.float32(high)
    else:
        at = np.abs(blocks).argmax(axis=2)
        scales = np.take_along_axis(blocks, at[:, :, None], axis=2)[:, :, 0] / np.float32(low)
    scales = stored_scales(scales)
    return QuantizedWeight(bits, in_steps(blocks, scales, low, high).reshape(outputs, inputs), scales)


def rounded(tensor: ir.TensorProtocol, turned: bool, bits: int) -> WeightSource:
    """Return a weight of a graph as one that is read and rounded at each call: some rows at a time, because copies in
    float32 are large.

    A `turned` one is `[K, N]` in the graph. Results go into whole arrays. Kept in pieces, they would lie between the
    freed copies and keep all that memory.
    """

    def read() -> QuantizedWeight:
        weight = _read_rows(tensor, turned)
        outputs, inputs = weight.shape
        made = QuantizedWeight(
            bits, np.empty((outputs, inputs), np.int8), np.empty((outputs, inputs // BLOCK), np.float32)
        )
        step = max(1, _SLICE // inputs)
        for rows in (slice(begin, begin + step) for begin in range(0, outputs, step)):
            part = round_to_nearest(weight[rows].float().numpy(), bits)
            made.integers[rows], made.scales[rows] = part.integers, part.scales
        if not fits_half(made.scales):
            origin = tensor.origin if isinstance(tensor, StoredTensor) else str(tensor.name)
            raise too_large(origin, float(weight.abs().max()), bits)
        return made

    outputs, inputs = tensor.shape.numpy()[::-1] if turned else tensor.shape.numpy()
    return WeightSource(bits, (outputs, inputs), False, read)


def _read_rows(tensor: ir.TensorProtocol, turned: bool) -> Tensor:
    """Read a weight as `[outputs, inputs]`; one of a checkpoint in the type in which it is stored."""
    if isinstance(tensor, StoredTensor):
        return tensor.read_stored()
    rows = tensor.numpy().T if turned else tensor.numpy()
    return torch.from_numpy(np.array(rows, np.float32, order="C"))


def too_large(origin: str, largest: float, bits: int) -> CheckpointError:
    """Return the error about weights whose scales no float16 holds; `largest` is their largest magnitude."""
    return CheckpointError(
        f"{origin} has values of {largest:.3g}, too large for int{bits}, whose scales are float16; leave out the "
        "recipe's `weights` for this model"
    )


def stored_scales(scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return scales as they are stored: the nearest float16, or unchanged where one is too large for it."""
    if np.abs(scales).max(initial=0) > _LARGEST_HALF:
        return scales
    return scales.astype(np.float16).astype(np.float32)


def in_steps(blocks: NDArray[np.float32], scales: NDArray[np.float32], low: int, high: int) -> NDArray[np.int8]:
    """Return the nearest multiples of `scales` `[N, B]` to `blocks` `[N, B, 32]`, within the limits; of scale 0, 0."""
    safe = np.where(scales == 0, np.float32(1), scales)
    steps = np.rint(np.where((scales == 0)[:, :, None], np.float32(0), blocks / safe[:, :, None]))
    return np.clip(steps, low, high).astype(np.int8)
