"""Packed weights of `outrider.cpu.QuantMatMul`: the order in which its kernels read them, as one array of bytes.

Outputs lie in groups of 32, and in a group block after block: the integers of 32 outputs by 32 inputs, then 32 scales,
then 32 minimums where there are some. The C++ side is `csrc/onnxruntime/quant_kernel.h`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK = 32
"""Inputs that share a scale."""

GROUP = 32
"""Outputs whose weights lie together."""

_QUAD = 4
_SLICE = 64  # groups packed at once, so that copies stay small


@dataclass(frozen=True)
class QuantLayout:
    """What packed weights hold; its fields are the attributes of the nodes that read them.

    `wide` scales and minimums are float32, others float16.
    """

    outputs: int
    inputs: int
    bits: int
    wide: bool
    minimums: bool

    @property
    def attributes(self) -> dict[str, int]:
        """The node's attributes."""
        return {
            "N": self.outputs,
            "K": self.inputs,
            "bits": self.bits,
            "wide": int(self.wide),
            "minimums": int(self.minimums),
        }

    @property
    def groups(self) -> int:
        return -(-self.outputs // GROUP)

    @property
    def size(self) -> int:
        """Bytes of the packed weights."""
        scales = GROUP * (4 if self.wide else 2) * (2 if self.minimums else 1)
        return self.groups * (self.inputs // BLOCK) * (BLOCK * GROUP * self.bits // 8 + scales)


def pack(
    integers: NDArray[Any], scales: NDArray[np.float32], minimums: NDArray[np.float32] | None, layout: QuantLayout
) -> NDArray[np.uint8]:
    """Pack weights `[N, K]` with scales (and minimums) `[N, K / 32]` into bytes `[layout.size]`.

    Integers are signed where there are no minimums, else unsigned. Nothing is rounded: raises `ValueError` for scales
    that the layout cannot hold, as for shapes that do not fit and integers out of range.
    """
    bits, offset = layout.bits, 0 if layout.minimums else 1 << (layout.bits - 1)
    outputs, inputs = integers.shape
    blocks = inputs // BLOCK
    if inputs % BLOCK or scales.shape != (outputs, blocks):
        raise ValueError(f"weights {integers.shape} and scales {scales.shape} are no blocks of {BLOCK}")
    if minimums is not None and minimums.shape != scales.shape:
        raise ValueError(f"scales {scales.shape} and minimums {minimums.shape} differ in shape")
    if (outputs, inputs, minimums is not None) != (layout.outputs, layout.inputs, layout.minimums):
        raise ValueError(f"weights {integers.shape} are not those of {layout}")
    if integers.min(initial=0) < -offset or integers.max(initial=0) >= (1 << bits) - offset:
        raise ValueError(f"an integer does not fit into {bits} bits")
    parts = [scales] if minimums is None else [scales, minimums]
    if not layout.wide and not all(fits_half(part) for part in parts):
        raise ValueError("a scale or minimum is no number of float16")

    size = BLOCK * GROUP * bits // 8
    packed = np.empty((layout.groups, blocks, layout.size // (layout.groups * blocks)), np.uint8)
    for first in range(0, layout.groups, _SLICE):
        out = packed[first : first + _SLICE]
        rows = slice(first * GROUP, (first + len(out)) * GROUP)
        given = integers[rows]
        padded: NDArray[np.uint8] = np.full((len(out) * GROUP, inputs), offset, np.uint8)
        padded[: len(given)] = given.view(np.uint8) + np.uint8(offset)  # modulo 256: signed integers become unsigned
        quads = padded.reshape(len(out), GROUP, blocks, BLOCK // _QUAD, _QUAD).transpose(0, 2, 3, 1, 4)
        if bits == 4:
            low, high = quads[:, :, : BLOCK // _QUAD // 2], quads[:, :, BLOCK // _QUAD // 2 :]
            quads = np.bitwise_or(low, high << 4, dtype=np.uint8)
        out[:, :, :size] = np.ascontiguousarray(quads).reshape(len(out), blocks, -1)
        at = size
        for part in parts:
            whole = np.zeros((len(out) * GROUP, blocks), np.float32 if layout.wide else np.float16)
            whole[: len(given)] = part[rows]
            columns = np.ascontiguousarray(whole.reshape(len(out), GROUP, blocks).transpose(0, 2, 1))
            section = columns.view(np.uint8).reshape(len(out), blocks, -1)
            out[:, :, at : at + section.shape[2]] = section
            at += section.shape[2]
    return packed.reshape(-1)


def unpack(
    packed: NDArray[np.uint8], layout: QuantLayout
) -> tuple[NDArray[Any], NDArray[np.float32], NDArray[np.float32] | None]:
    """Undo `pack`: integers `[N, K]` (int8, or uint8 where there are minimums), scales and minimums `[N, K / 32]`."""
    groups, blocks = layout.groups, layout.inputs // BLOCK
    sections = packed.reshape(groups, blocks, -1)
    size = BLOCK * GROUP * layout.bits // 8
    quads = sections[:, :, :size].reshape(groups, blocks, -1, GROUP, _QUAD)
    if layout.bits == 4:
        quads = np.concatenate([quads & 15, quads >> 4], axis=2)
    integers = quads.transpose(0, 3, 1, 2, 4).reshape(groups * GROUP, layout.inputs)[: layout.outputs]
    kind = np.float32 if layout.wide else np.float16

    def section(index: int) -> NDArray[np.float32]:
        width = GROUP * np.dtype(kind).itemsize
        part = np.ascontiguousarray(sections[:, :, size + index * width : size + (index + 1) * width]).view(kind)
        whole = part.transpose(0, 2, 1).reshape(groups * GROUP, blocks)[: layout.outputs]
        return np.ascontiguousarray(whole, np.float32)

    if layout.minimums:
        return integers, section(0), section(1)
    return (integers.astype(np.int16) - (1 << (layout.bits - 1))).astype(np.int8), section(0), None


def fits_half(values: NDArray[np.float32]) -> bool:
    """Return whether float16 holds all values exactly."""
    with np.errstate(over="ignore"):
        return bool(np.array_equal(values.astype(np.float16).astype(np.float32), values))
