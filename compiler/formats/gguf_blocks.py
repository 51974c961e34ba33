"""Blocks of GGUF tensors as integers, scales and minimums.

A number is `scale * integer`, or `scale * integer + minimum`. Scales and minimums are those of llama.cpp's own
dequantisation in float32, and exact: a product of a float16 (11 bits) with 6 or 8 bits fits float32's 24.
Source: `ggml-common.h` and `ggml-quants.c` of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.compiler.quantization.form import QuantizedWeight
from outrider.plugins.quant_layout import BLOCK

Bytes = NDArray[np.uint8]
Float32 = NDArray[np.float32]


class Blocks(NamedTuple):
    """Blocks: integers `[blocks, numbers]`, int8, or uint8 with minimums; scales and minimums `[blocks, parts]`."""

    integers: NDArray[Any]
    scales: Float32
    minimums: Float32 | None = None


@dataclass(frozen=True)
class BlockType:
    """A way of storing `numbers` numbers in `size` bytes; `width` of them share a scale. Integers have `bits` bits.

    Scales and minimums are float16 numbers, or, where `wide`, products of one with an integer.
    """

    numbers: int
    size: int
    width: int
    bits: int
    minimums: bool
    wide: bool
    split: Callable[[Bytes], Blocks]

    @property
    def has_form(self) -> bool:
        """Whether `QuantizedWeight` holds it: with a scale for each 32 numbers."""
        return self.width == BLOCK

    def quantized(self, rows: Bytes) -> QuantizedWeight:
        """Return rows `[N, bytes]` with their integers and scales kept exactly."""
        integers, scales, minimums = self.split(rows.reshape(-1, self.size))
        outputs = len(rows)
        least = None if minimums is None else minimums.reshape(outputs, -1)
        return QuantizedWeight(self.bits, integers.reshape(outputs, -1), scales.reshape(outputs, -1), least)

    def numbers_of(self, rows: Bytes) -> Float32:
        """Return the numbers that rows `[N, bytes]` stand for, `[N, K]`."""
        integers, scales, minimums = self.split(rows.reshape(-1, self.size))
        with np.errstate(invalid="ignore"):  # scales that are not finite, which readers of the numbers refuse
            found = integers.reshape(*scales.shape, self.width).astype(np.float32) * scales[:, :, None]
        if minimums is not None:
            found = found + minimums[:, :, None]
        return np.ascontiguousarray(found.reshape(len(rows), -1))


def _q5_k(blocks: Bytes) -> Blocks:
    # Bit i of byte j is the fifth bit of number j of part i.
    fifth = (blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    integers = _nibbles_of_pairs(blocks[:, 48:]) | (fifth << 4).reshape(len(blocks), -1)
    return Blocks(integers, *_six_bit_scales(blocks))


def _q6_k(blocks: Bytes) -> Blocks:
    # Two halves of 128 numbers: 64 bytes of lower four bits, 32 bytes of upper two.
    low = blocks[:, :128].reshape(-1, 2, 1, 64) >> np.array([0, 4], np.uint8)[:, None]
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]
    integers = (low & np.uint8(15)).reshape(-1, 256) | ((high & np.uint8(3)) << np.uint8(4)).reshape(-1, 256)
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    return Blocks(_signed(integers, 32), scales * _halves(blocks, 208))


def _halves(blocks: Bytes, at: int) -> Float32:
    """Return the float16 at byte `at` of every block, as float32 `[blocks, 1]`."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """Return all lower halves of bytes, then all upper halves."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _nibbles_of_pairs(packed: Bytes) -> Bytes:
    """Return parts of 32 numbers: of each 32 bytes the lower halves, then the upper halves."""
    halves: Bytes = packed.reshape(len(packed), -1, 1, BLOCK) >> np.array([0, 4], np.uint8)[:, None]
    return (halves & np.uint8(15)).reshape(len(packed), -1)


def _fives(packed: Bytes) -> Bytes:
    """Return numbers of five bits: the fifth ones of all stand in four bytes before the nibbles."""
    fifth: Bytes = np.unpackbits(packed[:, :4], axis=1, bitorder="little") << np.uint8(4)
    return _nibbles(packed[:, 4:]) | fifth


def _signed(integers: Bytes, zero: int) -> NDArray[np.int8]:
    return (integers - np.uint8(zero)).view(np.int8)  # modulo 256


def _six_bit_scales(blocks: Bytes) -> tuple[Float32, Float32]:
    """Return scales and minimums of the eight parts of a block: 6 bits each, packed in 12 bytes after two float16."""
    packed = blocks[:, 4:16]
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6) << 4], axis=1).astype(np.float32)
    minimums = np.concatenate([second & 63, (third >> 4) | (second >> 6) << 4], axis=1).astype(np.float32)
    return scales * _halves(blocks, 0), -(minimums * _halves(blocks, 2))


BLOCK_TYPES = {
    "Q8_0": BlockType(32, 34, 32, 8, False, False, lambda b: Blocks(b[:, 2:].view(np.int8), _halves(b, 0))),
    "Q4_0": BlockType(32, 18, 32, 4, False, False, lambda b: Blocks(_signed(_nibbles(b[:, 2:]), 8), _halves(b, 0))),
    "Q4_1": BlockType(32, 20, 32, 4, True, False, lambda b: Blocks(_nibbles(b[:, 4:]), _halves(b, 0), _halves(b, 2))),
    "Q5_0": BlockType(32, 22, 32, 8, False, False, lambda b: Blocks(_signed(_fives(b[:, 2:]), 16), _halves(b, 0))),
    "Q5_1": BlockType(32, 24, 32, 8, True, False, lambda b: Blocks(_fives(b[:, 4:]), _halves(b, 0), _halves(b, 2))),
    "Q4_K": BlockType(256, 144, 32, 4, True, True, lambda b: Blocks(_nibbles_of_pairs(b[:, 16:]), *_six_bit_scales(b))),
    "Q5_K": BlockType(256, 176, 32, 8, True, True, _q5_k),
    "Q6_K": BlockType(256, 210, 16, 8, False, True, _q6_k),
}
"""Those that are read, by name. Five bits are kept in eight; 16 numbers to a scale have no form of blocks of 32."""
