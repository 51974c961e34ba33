"""Quantise the weights of an exported graph: products and look-ups become ops that read integers and scales."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from outrider.compiler.deferred import StoredTensor
from outrider.compiler.graph_edits import replace
from outrider.compiler.quantization.experts import quantize_experts
from outrider.compiler.quantization.form import WeightSource
from outrider.compiler.quantization.keeping import kept
from outrider.compiler.quantization.rounding import rounded
from outrider.compiler.quantization.weight_form import WeightForm
from outrider.plans.manifest import RuleReport
from outrider.plugins.onnx_ops import DOMAIN
from outrider.plugins.quant_layout import BLOCK

_HEAD = "lm_head.weight"


def quantize(engine: str, model: ir.Model, form: WeightForm | None) -> RuleReport:
    """Replace the large weights of `model` by quantised ones, in place, and report which stay as they are, and why.

    Weights that the checkpoint stores as integers keep these, unless `form` has fewer bits; without a `form` all others
    stay as they are. A matrix that several nodes read, such as a tied embedding, is quantised once.
    """
    graph, applied, declined = model.graph, 0, Counter[str]()
    for name, value in list(graph.initializers.items()):
        if not _is_weight(value):
            continue
        assert value.const_value is not None
        users = [use.node for use in value.uses()]
        is_head = name.endswith(_HEAD) or any(node.op_type == "Gather" for node in users)
        bits = None if form is None else form.head_bits if is_head else form.bits
        turned = users[0].op_type == "MatMul"
        inputs = value.const_value.shape.numpy()[0 if turned else 1]
        source = kept(value.const_value, bits) if isinstance(value.const_value, StoredTensor) else None
        if source is None and bits is None:
            if form is not None:
                declined["the recipe leaves it as it is"] += 1
            continue
        if source is None and inputs % BLOCK:
            declined[f"its inputs are no multiple of {BLOCK}"] += 1
            continue
        if source is None:
            assert bits is not None
            source = rounded(value.const_value, turned, bits)
        _replace(graph, name, value, users, source)
        applied += 1
    if form is not None:
        applied += quantize_experts(model, form.bits, declined)
    if applied:
        model.opset_imports.setdefault(DOMAIN, 1)
    return RuleReport(engine=engine, rule="Quantize", applied=applied, declined=dict(declined))


def _is_weight(value: ir.Value) -> bool:
    """Return whether `value` is a constant matrix that only products and look-ups read, as weights."""
    tensor, uses = value.const_value, value.uses()
    if tensor is None or tensor.dtype not in (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
        return False
    if len(tensor.shape) != 2 or not uses:
        return False
    products = all(use.node.op_type == "MatMul" and use.idx == 1 for use in uses)
    return products or all(_is_row_reader(use.node, use.idx) for use in uses)


def _is_row_reader(node: ir.Node, index: int) -> bool:
    """Return whether the node reads its input `index` as weights `[outputs, inputs]`."""
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    if node.op_type == "Gather":
        return index == 0 and attributes.get("axis", 0) == 0
    plain = attributes.get("alpha", 1.0) == attributes.get("beta", 1.0) == 1.0
    bare = len(node.inputs) < 3 or node.inputs[2] is None
    return node.op_type == "Gemm" and index == 1 and attributes.get("transB") == 1 and plain and bare


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
        if source.order is not None:
            assert first is not None
            first = _reordered(graph, first, source.order)
        new = ir.node(f"{kind}{'QuantGather' if lookup else 'QuantMatMul'}", [first, *parts], domain=DOMAIN)
        graph.insert_before(node, [new])
        replace(graph, node, list(new.outputs))
    del graph.initializers[name]


def _reordered(graph: ir.Graph, x: ir.Value, order: NDArray[np.int64]) -> ir.Value:
    """Return the inputs `x` `[..., K]` in another order; weights that share input and order share the Gather."""
    for use in x.uses():
        indices = use.node.inputs[1] if use.node.op_type == "Gather" and use.idx == 0 else None
        held = indices.const_value if indices is not None else None
        if held is not None and np.array_equal(held.numpy(), order):
            return use.node.outputs[0]
    producer = x.producer()
    assert producer is not None
    number = sum(use.node.op_type == "Gather" for use in x.uses())
    indices = ir.Value(
        name=f"{x.name}.order.{number}",
        shape=ir.Shape(order.shape),
        type=ir.TensorType(ir.DataType.INT64),
        const_value=ir.tensor(order),
    )
    graph.register_initializer(indices)
    gather = ir.node("Gather", [x, indices], {"axis": -1})
    graph.insert_after(producer, [gather])
    return gather.outputs[0]
