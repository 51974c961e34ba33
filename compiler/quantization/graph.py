"""Quantise the weights of an exported graph: products and look-ups become ops that read integers and scales."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiler.deferred import StoredTensor
from compiler.graph_edits import replace
from compiler.quantization.form import QuantizedWeight, WeightSource
from compiler.quantization.keeping import kept
from compiler.quantization.rounding import round_to_nearest, too_large
from compiler.quantization.weight_form import WeightForm
from plans.manifest import RuleReport
from plugins.onnx_ops import DOMAIN
from plugins.quant_layout import BLOCK, fits_half

_HEAD = "lm_head.weight"
_SLICE = 1 << 20  # numbers rounded at once


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
        outputs, inputs = reversed(value.const_value.shape.numpy()) if turned else value.const_value.shape.numpy()
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
            source = WeightSource(bits, (outputs, inputs), False, _rounding(value.const_value, turned, bits))
        _replace(graph, name, value, users, source)
        applied += 1
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


def _rounding(tensor: ir.TensorProtocol, turned: bool, bits: int) -> Callable[[], QuantizedWeight]:
    """Return the function that reads and rounds a weight: some rows at a time, because copies in float32 are large.

    Results go into whole arrays. Kept in pieces, they would lie between the freed copies and keep all that memory.
    """

    def read() -> QuantizedWeight:
        weight = _read_rows(tensor, turned)
        outputs, inputs = weight.shape
        made = QuantizedWeight(
            bits, np.empty((outputs, inputs), np.int8), np.empty((outputs, inputs // BLOCK), np.float32)
        )
        step = max(1, _SLICE // inputs)
        for rows in (slice(begin, begin + step) for begin in range(0, outputs, step)):
            part = round_to_nearest(weight[rows].float().numpy(), bits)
            made.integers[rows], made.scales[rows] = part.integers, part.scales
        if not fits_half(made.scales):
            origin = tensor.origin if isinstance(tensor, StoredTensor) else str(tensor.name)
            raise too_large(origin, float(weight.abs().max()), bits)
        return made

    return read


def _read_rows(tensor: ir.TensorProtocol, turned: bool) -> Tensor:
    """Read a weight as `[outputs, inputs]`; one of a checkpoint in the type in which it is stored.

    A `turned` one has the other order in the graph.
    """
    if isinstance(tensor, StoredTensor):
        return tensor.read_stored()
    rows = tensor.numpy().T if turned else tensor.numpy()
    return torch.from_numpy(np.array(rows, np.float32, order="C"))


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
