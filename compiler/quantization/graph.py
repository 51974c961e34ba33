"""Quantise the weights of an exported graph: products and look-ups become ops that read integers and scales."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from outrider.compiler.deferred import StackedTensor, StoredTensor
from outrider.compiler.graph_edits import attributes_of, drop_unread, replace
from outrider.compiler.quantization.form import WeightSource, side_by_side
from outrider.compiler.quantization.keeping import kept
from outrider.compiler.quantization.rounding import rounded
from outrider.compiler.quantization.weight_form import WeightForm
from outrider.plans.manifest import RuleReport
from outrider.plugins.onnx_ops import DOMAIN
from outrider.plugins.quant_layout import BLOCK
from outrider.plugins.schema import EXPERT_OPS

_HEAD = "lm_head.weight"
GATES = ("delta.a.weight", "delta.b.weight")
_OF_NUMBERS = [op for op in EXPERT_OPS if "Quant" not in op]
_FIRST, _LAST = 2, 5
"""Where the products stand among the inputs of a node of experts."""


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
        if name.endswith(GATES):  # a few outputs, which a state is multiplied by token after token
            declined["it makes the gates of a state"] += form is not None
            continue
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
        applied += _quantize_experts(model, form.bits, declined)
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
    attributes = attributes_of(node)
    if node.op_type == "Gather":
        return index == 0 and attributes.get("axis", 0) == 0
    plain = attributes.get("alpha", 1.0) == attributes.get("beta", 1.0) == 1.0
    bare = len(node.inputs) < 3 or node.inputs[2] is None
    return node.op_type == "Gemm" and index == 1 and attributes.get("transB") == 1 and plain and bare


def _replace(graph: ir.Graph, name: str, value: ir.Value, users: list[ir.Node], source: WeightSource) -> None:
    parts = _initializers(graph, value, source)
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


def _initializers(graph: ir.Graph, weight: ir.Value, source: WeightSource) -> list[ir.Value]:
    """Return the integers, scales and minimums of a weight, as initializers."""
    parts = []
    assert weight.const_value is not None
    for tensor in source.tensors(weight.const_value.dtype):
        name = f"{weight.name}.{tensor.part}"
        part = ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
        graph.register_initializer(part)
        parts.append(part)
    return parts


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


# Experts: each expert's matrices on their own, the router not at all.


@dataclass(frozen=True)
class _Product:
    """The weights `[E, in, out]` of a product of all experts, in the graph."""

    value: ir.Value
    tensor: ir.TensorProtocol

    @property
    def experts(self) -> int:
        return int(self.tensor.shape.numpy()[0])

    def sources(self, bits: int) -> Iterator[WeightSource]:
        """Yield the matrix `[out, in]` of each expert."""
        for expert in range(self.experts):
            yield rounded(self._matrix(expert), True, bits)

    def _matrix(self, expert: int) -> ir.TensorProtocol:
        if isinstance(self.tensor, StackedTensor):
            return self.tensor.parts[expert]

        def read() -> ir.TensorProtocol:
            return ir.tensor(np.asarray(self.tensor.numpy()[expert], np.float32))

        shape = ir.Shape(self.tensor.shape.numpy()[1:])
        return ir.LazyTensor(read, ir.DataType.FLOAT, shape, name=f"{self.value.name}.{expert}")


def _quantize_experts(model: ir.Model, bits: int, declined: Counter[str]) -> int:
    """Replace the weights of experts by integers of `bits` bits and scales; return the number of such products.

    The products of a layer are quantised together, or none of them is: `declined` counts the reasons. Weights that
    several nodes read are quantised once.
    """
    made: dict[ir.Value, list[ir.Value]] = {}
    for node in [node for node in model.graph if node.domain == DOMAIN and node.op_type in _OF_NUMBERS]:
        products = [_product(value) for value in node.inputs[_FIRST:_LAST]]
        reason = _reason_against(products)
        if reason is not None:
            declined[reason] += len(products)
            continue
        parts = []
        for product in products:
            assert product is not None
            if product.value not in made:
                source = side_by_side(list(product.sources(bits)))
                made[product.value] = _initializers(model.graph, product.value, source)
            parts += made[product.value]
        kind, weights = node.op_type.replace("MixtureOfExperts", "QuantMixtureOfExperts"), node.inputs[_FIRST:_LAST]
        inputs = [*node.inputs[:_FIRST], *parts, *node.inputs[_LAST:]]
        new = ir.node(kind, inputs, attributes_of(node), domain=DOMAIN)
        model.graph.insert_before(node, [new])
        replace(model.graph, node, list(new.outputs))
        drop_unread(model.graph, weights)
    return len(made)


def _product(value: ir.Value | None) -> _Product | None:
    return None if value is None or value.const_value is None else _Product(value, value.const_value)


def _reason_against(products: list[_Product | None]) -> str | None:
    if any(product is None for product in products):
        return "experts are no constants"
    if any(size % BLOCK for product in products if product is not None for size in product.tensor.shape.numpy()[1:]):
        return f"sizes of experts are no multiples of {BLOCK}"
    return None
