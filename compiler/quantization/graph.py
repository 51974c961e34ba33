"""Quantise the weights of an exported graph: products and look-ups become ops that read integers and scales."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from compiler.graph_edits import replace
from compiler.quantization.form import QuantizedWeight, WeightSource
from compiler.quantization.rounding import round_to_nearest
from compiler.quantization.weight_form import WeightForm
from plans.manifest import RuleReport
from plugins.onnx_ops import DOMAIN
from plugins.quant_layout import BLOCK

_HEAD = "lm_head.weight"


def quantize(engine: str, model: ir.Model, form: WeightForm) -> RuleReport:
    """Replace the large weights of `model` by quantised ones, in place, and report which stay as they are, and why.

    A matrix that several nodes read, such as a tied embedding, is quantised once.
    """
    graph, applied, declined = model.graph, 0, Counter[str]()
    for name, value in list(graph.initializers.items()):
        read = _reader_of(value)
        if read is None:
            continue
        users = [use.node for use in value.uses()]
        is_head = name.endswith(_HEAD) or any(node.op_type == "Gather" for node in users)
        bits = form.head_bits if is_head else form.bits
        outputs, inputs = _extents(value, users[0])
        if bits is None:
            declined["the recipe leaves it as it is"] += 1
        elif inputs % BLOCK:
            declined[f"its inputs are no multiple of {BLOCK}"] += 1
        else:
            source = WeightSource(bits, (outputs, inputs), False, _rounding(read, bits))
            _replace(graph, name, value, users, source)
            applied += 1
    if applied:
        model.opset_imports.setdefault(DOMAIN, 1)
    return RuleReport(engine=engine, rule="Quantize", applied=applied, declined=dict(declined))


def _reader_of(value: ir.Value) -> Callable[[], np.ndarray] | None:
    """Return what reads `value` as weights `[outputs, inputs]`, float32; None where it is no weight of products."""
    tensor, uses = value.const_value, value.uses()
    if tensor is None or tensor.dtype not in (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
        return None
    if len(tensor.shape) != 2 or not uses:
        return None
    if all(use.node.op_type == "MatMul" and use.idx == 1 for use in uses):
        return lambda: np.ascontiguousarray(tensor.numpy().T, np.float32)
    if all(_is_row_reader(use.node, use.idx) for use in uses):
        return lambda: np.ascontiguousarray(tensor.numpy(), np.float32)
    return None


def _is_row_reader(node: ir.Node, index: int) -> bool:
    """Return whether the node reads its input `index` as weights `[outputs, inputs]`."""
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    if node.op_type == "Gather":
        return index == 0 and attributes.get("axis", 0) == 0
    plain = attributes.get("alpha", 1.0) == attributes.get("beta", 1.0) == 1.0
    bare = len(node.inputs) < 3 or node.inputs[2] is None
    return node.op_type == "Gemm" and index == 1 and attributes.get("transB") == 1 and plain and bare


def _extents(value: ir.Value, user: ir.Node) -> tuple[int, int]:
    assert value.const_value is not None
    first, second = value.const_value.shape.numpy()
    return (second, first) if user.op_type == "MatMul" else (first, second)


def _rounding(read: Callable[[], np.ndarray], bits: int) -> Callable[[], QuantizedWeight]:
    return lambda: round_to_nearest(read(), bits)


def _replace(graph: ir.Graph, name: str, value: ir.Value, users: list[ir.Node], source: WeightSource) -> None:
    assert value.const_value is not None
    parts = []
    for tensor in source.tensors(value.const_value.dtype):
        part = ir.Value(
            name=f"{name}.{tensor.part}", shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor
        )
        graph.register_initializer(part)
        parts.append(part)
    kind = "Asymmetric" if source.minimums else ""
    for node in users:
        lookup = node.op_type == "Gather"
        first = node.inputs[1 if lookup else 0]
        new = ir.node(f"{kind}{'QuantGather' if lookup else 'QuantMatMul'}", [first, *parts], domain=DOMAIN)
        graph.insert_before(node, [new])
        replace(graph, node, list(new.outputs))
    del graph.initializers[name]
