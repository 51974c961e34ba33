"""Quantised weights in ONNX Runtime's own operators, which its CUDA provider has kernels for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from outrider.compiler.graph_edits import drop_unread, replace
from outrider.compiler.lowering.rule import CONTRIBUTED, Lowering, Rule
from outrider.compiler.quantization.form import QuantizedWeight, WeightSource, product_source
from outrider.plugins.quant_layout import BLOCK


class BlockQuantized(Rule):
    """onnxruntime-cuda: products become `MatMulNBits`, look-ups `GatherBlockQuantized`, both weight-only.

    Their bodies would make all weights floats again in every step. Where weights have minimums, each must be a multiple
    of its scale from 0 to 15 (255), the operators' zero points.
    """

    def pattern(self, node: ir.Node) -> bool:
        return product_source(node) is not None

    def check(self, node: ir.Node, lowering: Lowering) -> str | None:
        source = product_source(node)
        assert source is not None
        if source.minimums and _zero_points(source.read()) is None:
            return "its minimums are no multiples of its scales"
        return None

    def rewrite(self, node: ir.Node, lowering: Lowering) -> None:
        source, integers, scales = product_source(node), node.inputs[1], node.inputs[2]
        assert source is not None
        assert integers is not None
        assert scales is not None
        (n, k), bits = source.shape, source.bits
        lookup, stem = node.op_type.endswith("Gather"), (integers.name or "").rpartition(".")[0]
        name, shape = ("rows", (n, k * bits // 8)) if lookup else ("blocks", (n, k // BLOCK, BLOCK * bits // 8))
        weights = [_constant(f"{stem}.{name}", shape, source, _stored, lowering), scales]
        if source.minimums:
            zeros = (n, -(-(k // BLOCK) * bits // 8))
            weights.append(_constant(f"{stem}.zero_points", zeros, source, _stored_zero_points, lowering))
        if lookup:
            attributes = {"bits": bits, "block_size": BLOCK, "gather_axis": 0, "quantize_axis": 1}
            inputs = [weights[0], node.inputs[0], *weights[1:]]
            new = ir.node("GatherBlockQuantized", inputs, attributes, domain=CONTRIBUTED)
        else:
            attributes = {"bits": bits, "block_size": BLOCK, "K": k, "N": n}
            new = ir.node("MatMulNBits", [node.inputs[0], *weights], attributes, domain=CONTRIBUTED)
        old = node.inputs[1:]
        lowering.graph.insert_before(node, [new])
        replace(lowering.graph, node, [new.outputs[0]])
        drop_unread(lowering.graph, old)
        lowering.model.opset_imports.setdefault(CONTRIBUTED, 1)


def _constant(
    name: str,
    shape: tuple[int, ...],
    source: WeightSource,
    part: Callable[[QuantizedWeight], NDArray[np.uint8]],
    lowering: Lowering,
) -> ir.Value:
    def compute() -> ir.TensorProtocol:
        return ir.tensor(part(source.read()).reshape(shape))

    return lowering.deferred(name, ir.LazyTensor(compute, dtype=ir.DataType.UINT8, shape=ir.Shape(shape)))


def _stored(weight: QuantizedWeight) -> NDArray[np.uint8]:
    """Return the integers as unsigned ones, two of 4 bits a byte, the first in the lower half."""
    offset = 0 if weight.minimums is not None else 1 << (weight.bits - 1)
    return _packed(weight.integers.astype(np.int16) + offset, weight.bits)


def _stored_zero_points(weight: QuantizedWeight) -> NDArray[np.uint8]:
    zeros = _zero_points(weight)
    assert zeros is not None
    return _packed(zeros, weight.bits)


def _packed(values: NDArray[Any], bits: int) -> NDArray[np.uint8]:
    stored = values.astype(np.uint8)
    if bits == 8:
        return stored
    if stored.shape[1] % 2:
        stored = np.pad(stored, ((0, 0), (0, 1)))
    both: NDArray[np.uint8] = np.bitwise_or(stored[:, ::2], stored[:, 1::2] << 4)
    return both


def _zero_points(weight: QuantizedWeight) -> NDArray[np.uint8] | None:
    """Return the integers `[N, K / 32]` that stand for 0; None where a minimum is no such multiple of its scale."""
    assert weight.minimums is not None
    safe = np.where(weight.scales == 0, np.float32(1), weight.scales)
    zeros = np.rint(-weight.minimums / safe)
    fits = (zeros >= 0) & (zeros < 1 << weight.bits)
    if not (fits & (-zeros * weight.scales == weight.minimums)).all():
        return None
    return zeros.astype(np.uint8)
