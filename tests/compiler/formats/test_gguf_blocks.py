"""Blocks of GGUF files against the package `gguf`, whose dequantisation is llama.cpp's."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from outrider.compiler.formats.gguf_blocks import BLOCK_TYPES
from outrider.plugins.quant_layout import QuantLayout, pack, unpack
from outrider.plugins.reference import dequantize

from .ggufs import stored_as

KINDS = tuple(BLOCK_TYPES)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_the_packages_bit_for_bit(kind: str) -> None:
    for size in (1e-3, 1.0, 300.0):
        weight = (np.random.default_rng(3).normal(size=(6, 512)) * size).astype(np.float32)
        rows = stored_as(kind, weight, 7)
        found = BLOCK_TYPES[kind].numbers_of(rows)
        np.testing.assert_array_equal(found, gguf.quants.dequantize(rows, Type[kind]))


@pytest.mark.parametrize("kind", sorted({*KINDS} - {"Q6_K"}))  # Q6_K alone has no form of blocks of 32
def test_integers_and_scales_survive_packing_bit_for_bit(kind: str) -> None:
    rows = stored_as(kind, np.random.default_rng(4).normal(size=(21, 256)).astype(np.float32), 8)
    block = BLOCK_TYPES[kind]
    made = block.quantized(rows)
    layout = QuantLayout(*made.integers.shape, block.bits, block.wide, block.minimums)
    packed = pack(made.integers, made.scales, made.minimums, layout)
    integers, scales, minimums = unpack(packed, layout)
    np.testing.assert_array_equal(dequantize(integers, scales, minimums), gguf.quants.dequantize(rows, Type[kind]))
