"""A chain of products in ONNX Runtime: with our op, or with its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from outrider.plugins.onnxruntime_ops import THREADS, cpu_library
from outrider.plugins.quant_layout import BLOCK, QuantLayout, pack
from outrider.plugins.schema import CPU_DOMAIN
from outrider.tools.lab.matmul.shapes import Product
from outrider.tools.lab.matmul.weights import RandomWeight, draw_weight, of_layer

SPIN_MS = 2  # how long threads spin after their work: what the runtime sets for a target's engine
_MICROSOFT = "com.microsoft"

Encoded = tuple[str, str, list[NDArray[Any]], dict[str, Any]]
"""A product's op, its domain, its inputs after the first, and its attributes."""


class OnnxChain:
    """All `products`, float32 `[1, rows, K of the first]` to `[1, rows, N of the last]`, as `encode` stores them."""

    def __init__(
        self, products: Sequence[Product], bits: int, threads: int, encode: Callable[[RandomWeight], Encoded]
    ) -> None:
        encoded = cache(lambda inputs, outputs: encode(draw_weight(Product(0, inputs, outputs), bits)))
        weights: dict[str, NDArray[Any]] = {}
        ends = {"first": np.array([0]), "width": np.array([2])}
        nodes, value, width = [], "x", products[0].inputs
        for index, product in enumerate(products):
            if width > product.inputs:
                end = f"to {product.inputs}"
                ends[end] = np.array([product.inputs])
                nodes.append(helper.make_node("Slice", [value, "first", end, "width"], [f"{value} {end}"]))
                value = f"{value} {end}"
            op, domain, arrays, attributes = encoded(product.inputs, product.outputs)
            names = [f"{index}.{place}" for place in range(len(arrays))]
            weights |= {name: of_layer(array, product) for name, array in zip(names, arrays, strict=True)}
            nodes.append(helper.make_node(op, [value, *names], [f"y{index}"], domain=domain, **attributes))
            value, width = f"y{index}", product.outputs
        self._weights = weights  # whose memory the session reads
        self._name, self._outputs = value, width
        self._session = ort.InferenceSession(
            _model(nodes, weights, ends, value).SerializeToString(),
            _options(weights, threads),
            providers=["CPUExecutionProvider"],
        )

    def bind(self, x: NDArray[np.float32]) -> BoundChain:
        """Return a pass over `x`, whose memory is read at each call."""
        return BoundChain(self._session, x, self._name, np.empty((*x.shape[:2], self._outputs), np.float32))


class BoundChain:
    """One pass; `output` is what the last one gave."""

    def __init__(
        self, session: ort.InferenceSession, x: NDArray[np.float32], name: str, output: NDArray[np.float32]
    ) -> None:
        self._session, self._x, self.output = session, x, output
        self._binding = session.io_binding()
        self._binding.bind_input("x", "cpu", 0, np.float32, x.shape, x.ctypes.data)
        self._binding.bind_output(name, "cpu", 0, np.float32, output.shape, output.ctypes.data)

    def __call__(self) -> None:
        self._session.run_with_iobinding(self._binding)


def for_our_op(weight: RandomWeight) -> Encoded:
    """Encode for `outrider.cpu.QuantMatMul`."""
    outputs, inputs = weight.integers.shape
    layout = QuantLayout(outputs, inputs, weight.bits, wide=False, minimums=False)
    packed = pack(weight.integers, weight.scales, None, layout)
    return "QuantMatMul", CPU_DOMAIN, [packed], {**layout.attributes}


def for_matmul_nbits(weight: RandomWeight) -> Encoded:
    """Encode for ONNX Runtime's MatMulNBits: integers without a sign, two of 4 bits in a byte, the first one low.

    Accuracy level 4 lets it quantise activations to 8 bits, as our op does.
    """
    outputs, inputs = weight.integers.shape
    stored = (weight.integers + np.int16(1 << (weight.bits - 1))).astype(np.uint8)
    if weight.bits == 4:
        stored = np.bitwise_or(stored[:, ::2], stored[:, 1::2] << 4, dtype=np.uint8)
    blocks = stored.reshape(outputs, inputs // BLOCK, -1)
    attributes = {"K": inputs, "N": outputs, "bits": weight.bits, "block_size": BLOCK, "accuracy_level": 4}
    return "MatMulNBits", _MICROSOFT, [blocks, weight.scales.reshape(-1)], attributes


def _options(weights: dict[str, NDArray[Any]], threads: int) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    options.add_session_config_entry(THREADS, str(threads))
    options.add_session_config_entry("session.intra_op.spin_duration_us", str(1000 * SPIN_MS))
    options.add_session_config_entry("session.intra_op.spin_backoff_max", "1")
    options.register_custom_ops_library(str(cpu_library()))
    values = [ort.OrtValue.ortvalue_from_numpy(array) for array in weights.values()]
    options.add_external_initializers(list(weights), values)
    return options


def _model(
    nodes: list[onnx.NodeProto], weights: dict[str, NDArray[Any]], ends: dict[str, NDArray[Any]], output: str
) -> onnx.ModelProto:
    """Weights are declared alone, since a model's own file may have 2 GB; the session is given them."""
    declared = [numpy_helper.from_array(array, name) for name, array in ends.items()]
    for name, array in weights.items():
        tensor = TensorProto(name=name, data_type=helper.np_dtype_to_tensor_dtype(array.dtype), dims=array.shape)
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="given to the session")
        declared.append(tensor)
    graph = helper.make_graph(
        nodes, "products",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, "rows", None])],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, [1, "rows", None])],
        declared,
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(CPU_DOMAIN, 1), helper.make_opsetid(_MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)
