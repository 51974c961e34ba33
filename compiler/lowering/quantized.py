"""Quantised weights as the kernels on the CPU read them, and those of ONNX Runtime's CUDA provider; for TensorRT, which
cannot compile drafts that dequantise, a drafter's as numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from outrider.compiler.graph_edits import attributes_of, given
from outrider.compiler.lowering.rule import CONTRIBUTED, Lowering, Rule
from outrider.compiler.quantization.form import QuantizedWeight, QuantTensor, WeightSource, product_source
from outrider.plans import names
from outrider.plugins.onnx_ops import DOMAIN
from outrider.plugins.quant_layout import BLOCK, pack
from outrider.plugins.reference import dequantize
from outrider.plugins.schema import CPU_DOMAIN, EXPERT_OPS

_OF_TARGETS = "the target's weights stay integers"


class PackQuantized(Rule):
    """onnxruntime-cpu: integers and scales become one array, in the order in which `outrider.cpu.QuantMatMul` reads it.

    A row's product is then a function of the row alone, with the same bits on any processor. All nodes that read a
    matrix read the same array.
    """

    def pattern(self, node: ir.Node) -> bool:
        return product_source(node) is not None and _readers(node)[0] is node

    def check(self, node: ir.Node, lowering: Lowering) -> str | None:
        return None if given(node.inputs)[2].dtype == ir.DataType.FLOAT else "its kernels compute in float32"

    def rewrite(self, node: ir.Node, lowering: Lowering) -> None:
        source, integers = product_source(node), given(node.inputs)[1]
        assert source is not None
        layout = source.layout

        def packed() -> ir.TensorProtocol:
            weight = source.read()
            return ir.tensor(pack(weight.integers, weight.scales, weight.minimums, layout))

        name = f"{(integers.name or '').rpartition('.')[0]}.int{source.bits}"
        constant = lowering.deferred(name, ir.LazyTensor(packed, ir.DataType.UINT8, ir.Shape([layout.size])))
        for reader in _readers(node):
            kind, inputs = reader.op_type.removeprefix("Asymmetric"), [reader.inputs[0], constant]
            lowering.put(reader, ir.node(kind, inputs, layout.attributes, domain=CPU_DOMAIN))


def _readers(node: ir.Node) -> list[ir.Node]:
    return [use.node for use in given(node.inputs)[1].uses()]


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
        source, (first, integers, scales) = product_source(node), given(node.inputs[:3])
        assert source is not None
        (n, k), bits = source.shape, source.bits
        lookup, stem = node.op_type.endswith("Gather"), (integers.name or "").rpartition(".")[0]
        name, shape = ("rows", (n, k * bits // 8)) if lookup else ("blocks", (n, k // BLOCK, BLOCK * bits // 8))
        weights = [_constant(f"{stem}.{name}", shape, source, _stored, lowering), scales]
        if source.minimums:
            zeros = (n, -(-(k // BLOCK) * bits // 8))
            weights.append(_constant(f"{stem}.zero_points", zeros, source, _stored_zero_points, lowering))
        if lookup:
            attributes = {"bits": bits, "block_size": BLOCK, "gather_axis": 0, "quantize_axis": 1}
            inputs = [weights[0], first, *weights[1:]]
            new = ir.node("GatherBlockQuantized", inputs, attributes, domain=CONTRIBUTED)
        else:
            attributes = {"bits": bits, "block_size": BLOCK, "K": k, "N": n}
            new = ir.node("MatMulNBits", [first, *weights], attributes, domain=CONTRIBUTED)
        lowering.put(node, new)


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


class FloatDrafts(Rule):
    """TensorRT: products and look-ups of a drafter read weights as floats, however the checkpoint stores them.

    TensorRT for RTX 1.7 fails inside on draft graphs that dequantise blocks of 32 inputs, of 4 and of 8 bits. Drafters
    are small, so floats take little.
    """

    def pattern(self, node: ir.Node) -> bool:
        return product_source(node) is not None

    def check(self, node: ir.Node, lowering: Lowering) -> str | None:
        return _OF_TARGETS if lowering.engine == names.TARGET else None

    def rewrite(self, node: ir.Node, lowering: Lowering) -> None:
        source, (x, integers, scales) = product_source(node), given(node.inputs[:3])
        assert source is not None
        assert scales.dtype is not None
        dtype, lookup = scales.dtype, node.op_type.endswith("Gather")

        def numbers() -> ir.TensorProtocol:
            weight = source.read()
            table = dequantize(weight.integers, weight.scales, weight.minimums)
            return ir.Tensor(np.ascontiguousarray(table if lookup else table.T).astype(dtype.numpy()), dtype=dtype)

        (n, k), stem = source.shape, (integers.name or "").rpartition(".")[0]
        name, shape = (f"{stem}.table", (n, k)) if lookup else (f"{stem}.numbers", (k, n))
        weight = lowering.deferred(name, ir.LazyTensor(numbers, dtype, ir.Shape(shape)))
        lowering.put(node, ir.node("Gather", [weight, x], {"axis": 0}) if lookup else ir.node("MatMul", [x, weight]))


class FloatDraftExperts(Rule):
    """TensorRT: experts of a drafter read weights as floats too, as `FloatDrafts` has them."""

    def pattern(self, node: ir.Node) -> bool:
        return node.domain == DOMAIN and node.op_type in EXPERT_OPS and "Quant" in node.op_type

    def check(self, node: ir.Node, lowering: Lowering) -> str | None:
        return _OF_TARGETS if lowering.engine == names.TARGET else None

    def rewrite(self, node: ir.Node, lowering: Lowering) -> None:
        first, last = 2, 8  # integers and scales of gate, up and down
        parts = given(node.inputs[first:last])
        widths = [part.shape[1] for part in parts[::2] if part.shape is not None]
        hidden, _, inner = (int(width) for width in widths)  # type: ignore[arg-type]
        weights = [
            _stacked(lowering, integers, scales, outputs)
            for integers, scales, outputs in zip(parts[::2], parts[1::2], (inner, inner, hidden), strict=True)
        ]
        kind, inputs = node.op_type.replace("Quant", ""), [*node.inputs[:first], *weights, *node.inputs[last:]]
        lowering.put(node, ir.node(kind, inputs, attributes_of(node), domain=DOMAIN))


def _stacked(lowering: Lowering, integers: ir.Value, scales: ir.Value, outputs: int) -> ir.Value:
    """Return the numbers `[E, in, out]` of integers `[E * out, in]` and their scales."""
    assert scales.dtype is not None
    tensor, dtype = integers.const_value, scales.dtype
    assert isinstance(tensor, QuantTensor)
    source = tensor.source
    rows, inputs = source.shape

    def numbers() -> ir.TensorProtocol:
        weight = source.read()
        table = dequantize(weight.integers, weight.scales).reshape(-1, outputs, inputs)
        return ir.Tensor(np.ascontiguousarray(table.transpose(0, 2, 1)).astype(dtype.numpy()), dtype=dtype)

    name = f"{(integers.name or '').rpartition('.')[0]}.numbers"
    return lowering.deferred(name, ir.LazyTensor(numbers, dtype, ir.Shape([rows // outputs, inputs, outputs])))
