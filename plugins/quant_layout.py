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
    integers: NDArray[Any], scales: NDArray[np.float32], minimums: NDArray[np.float32] | None, bits: int
) -> tuple[NDArray[np.uint8], QuantLayout]:
    """Pack weights `[N, K]` with scales (and minimums) `[N, K / 32]`; return the bytes `[size]` and their layout.

    Integers are signed where there are no minimums, else unsigned. Scales are stored as float16 where that changes none
    of them, so nothing is rounded here. Raises `ValueError` for shapes that do not fit or integers out of range.
    """
    outputs, inputs = integers.shape
    offset = 0 if minimums is not None else 1 << (bits - 1)
    if inputs % BLOCK or scales.shape != (outputs, inputs // BLOCK):
        raise ValueError(f"weights {integers.shape} and scales {scales.shape} are no blocks of {BLOCK}")
    if minimums is not None and minimums.shape != scales.shape:
        raise ValueError(f"scales {scales.shape} and minimums {minimums.shape} differ in shape")
    if integers.min(initial=0) < -offset or integers.max(initial=0) >= (1 << bits) - offset:
        raise ValueError(f"an integer does not fit into {bits} bits")
    parts = [scales] if minimums is None else [scales, minimums]
    wide = not all(_fits_half(part) for part in parts)
    layout = QuantLayout(outputs, inputs, bits, wide, minimums is not None)
    groups, blocks = layout.groups, inputs // BLOCK

    padded: NDArray[np.uint8] = np.full((groups * GROUP, inputs), offset, np.uint8)
    padded[:outputs] = integers.view(np.uint8) + np.uint8(offset)  # modulo 256: signed integers become unsigned
    quads = padded.reshape(groups, GROUP, blocks, BLOCK // _QUAD, _QUAD).transpose(0, 2, 3, 1, 4)
    if bits == 4:
        low, high = quads[:, :, : BLOCK // _QUAD // 2], quads[:, :, BLOCK // _QUAD // 2 :]
        quads = np.bitwise_or(low, high << 4, dtype=np.uint8)
    sections = [np.ascontiguousarray(quads).reshape(groups, blocks, -1)]
    for part in parts:
        whole = np.zeros((groups * GROUP, blocks), np.float32 if wide else np.float16)
        whole[:outputs] = part
        columns = np.ascontiguousarray(whole.reshape(groups, GROUP, blocks).transpose(0, 2, 1))
        sections.append(columns.view(np.uint8).reshape(groups, blocks, -1))
    packed = np.concatenate(sections, axis=2).reshape(-1)
    assert packed.size == layout.size
    return packed, layout


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


def _fits_half(values: NDArray[np.float32]) -> bool:
    with np.errstate(over="ignore"):
        return bool(np.array_equal(values.astype(np.float16).astype(np.float32), values))
