"""Random quantised weights, drawn once for each width."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.plugins.quant_layout import BLOCK, GROUP
from outrider.tools.lab.matmul.shapes import Product


@dataclass(frozen=True)
class RandomWeight:
    """Signed integers of `bits` bits, int8 `[N, K]`, and their scales, float32 `[N, K / 32]`, exact in float16."""

    bits: int
    integers: NDArray[np.int8]
    scales: NDArray[np.float32]


def draw_weight(product: Product, bits: int) -> RandomWeight:
    """Return weights under which outputs are about as large as inputs, so that a chain of products stays finite."""
    rng = np.random.default_rng(product.inputs * product.outputs + bits)
    most = (1 << (bits - 1)) - 1
    integers = rng.integers(-most, most + 1, (product.outputs, product.inputs), dtype=np.int8)
    spread = (3 / product.inputs) ** 0.5 / most
    scales = spread * rng.uniform(0.8, 1.2, (product.outputs, product.inputs // BLOCK))
    return RandomWeight(bits, integers, scales.astype(np.float16).astype(np.float32))


def of_layer(array: NDArray[Any], product: Product) -> NDArray[Any]:
    """Return a copy of the array with groups of outputs, which lie one after another, turned round by the layer.

    Every layer then has memory and bytes of its own, so that none is still in a cache, or kept once for all.
    """
    group = array.size * GROUP // product.outputs
    return np.roll(array.reshape(-1), product.layer * group).reshape(array.shape)
