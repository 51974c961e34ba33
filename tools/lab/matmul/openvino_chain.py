"""A chain of products in OpenVINO: MatMul of weights that are stored in few bits, as its own tools write them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops

from outrider.plugins.quant_layout import BLOCK
from outrider.tools.lab.matmul.shapes import Product
from outrider.tools.lab.matmul.weights import RandomWeight, draw_weight, of_layer

_TYPES = {4: ov.Type.i4, 8: ov.Type.i8}


class OpenVinoChain:
    """All `products`, float32 `[1, rows, K of the first]` to `[1, rows, N of the last]`; symmetric groups of 32.

    Activations are quantised to 8 bits in groups of 32, as our op does.
    """

    def __init__(self, products: Sequence[Product], bits: int, threads: int) -> None:
        encoded = cache(lambda inputs, outputs: _encode(draw_weight(Product(0, inputs, outputs), bits)))
        self._integers: list[NDArray[Any]] = []  # whose memory the constants read
        value = parameter = ops.parameter([1, -1, products[0].inputs], np.float32, name="x")
        width = products[0].inputs
        for product in products:
            if width > product.inputs:
                value = ops.slice(value, [0], [product.inputs], [1], [2])
            integers, scales = (of_layer(array, product) for array in encoded(product.inputs, product.outputs))
            self._integers.append(integers)
            value = ops.matmul(value, _weight(integers, scales, product, bits), False, True)
            width = product.outputs
        settings = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": "f32",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": BLOCK,
        }
        self.compiled = ov.Core().compile_model(ov.Model([value], [parameter], "products"), "CPU", settings)
        self._outputs = width

    def bind(self, x: NDArray[np.float32]) -> BoundChain:
        """Return a pass over `x`, whose memory is read at each call."""
        return BoundChain(self.compiled, x, np.empty((*x.shape[:2], self._outputs), np.float32))


class BoundChain:
    """One pass; `output` is what the last one gave."""

    def __init__(self, compiled: ov.CompiledModel, x: NDArray[np.float32], output: NDArray[np.float32]) -> None:
        self._request, self.output = compiled.create_infer_request(), output
        self._request.set_input_tensor(ov.Tensor(x, shared_memory=True))
        self._request.set_output_tensor(ov.Tensor(output, shared_memory=True))

    def __call__(self) -> None:
        self._request.infer(share_inputs=True, share_outputs=True)


def _encode(weight: RandomWeight) -> tuple[NDArray[Any], NDArray[np.float16]]:
    """Return the integers' bytes, two of 4 bits in a byte, the first one low, and the scales."""
    integers = weight.integers
    if weight.bits == 4:
        nibbles = integers.view(np.uint8) & 15
        integers = nibbles[:, ::2] | nibbles[:, 1::2] << 4
    return integers, weight.scales.astype(np.float16)


def _weight(integers: NDArray[Any], scales: NDArray[np.float16], product: Product, bits: int) -> ov.Node:
    blocks = [product.outputs, product.inputs // BLOCK, BLOCK]
    stored = ops.constant(ov.Tensor(integers, blocks, _TYPES[bits]))
    scaled = ops.multiply(ops.convert(stored, "f16"), ops.constant(scales[:, :, None]))
    return ops.convert(ops.reshape(scaled, [product.outputs, product.inputs], False), "f32")
