"""Quantise the experts of an exported graph: each expert's matrices on their own, the router not at all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from outrider.compiler.deferred import StackedTensor
from outrider.compiler.graph_edits import drop_unread, replace
from outrider.compiler.quantization.form import WeightSource, side_by_side
from outrider.compiler.quantization.rounding import rounded
from outrider.plugins.onnx_ops import DOMAIN
from outrider.plugins.quant_layout import BLOCK
from outrider.plugins.schema import EXPERT_OPS

_OF_NUMBERS = [op for op in EXPERT_OPS if "Quant" not in op]
_FIRST, _LAST = 2, 5
"""Where the products stand among the inputs of a node."""


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


def quantize_experts(model: ir.Model, bits: int, declined: Counter[str]) -> int:
    """Replace the weights of experts by integers of so many bits and scales; return how many products that were.

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
                made[product.value] = _quantised(model.graph, product, bits)
            parts += made[product.value]
        _replace(model.graph, node, parts)
    return len(made)


def _product(value: ir.Value | None) -> _Product | None:
    return None if value is None or value.const_value is None else _Product(value, value.const_value)


def _reason_against(products: list[_Product | None]) -> str | None:
    if any(product is None for product in products):
        return "experts are no constants"
    if any(size % BLOCK for product in products if product is not None for size in product.tensor.shape.numpy()[1:]):
        return f"sizes of experts are no multiples of {BLOCK}"
    return None


def _quantised(graph: ir.Graph, product: _Product, bits: int) -> list[ir.Value]:
    """Return the integers and scales of a product, as initializers."""
    parts = []
    assert product.tensor.dtype is not None
    for tensor in side_by_side(list(product.sources(bits))).tensors(product.tensor.dtype):
        part = ir.Value(
            name=f"{product.value.name}.{tensor.part}",
            shape=tensor.shape,
            type=ir.TensorType(tensor.dtype),
            const_value=tensor,
        )
        graph.register_initializer(part)
        parts.append(part)
    return parts


def _replace(graph: ir.Graph, node: ir.Node, parts: list[ir.Value]) -> None:
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    kind = node.op_type.replace("MixtureOfExperts", "QuantMixtureOfExperts")
    weights = list(node.inputs[_FIRST:_LAST])
    new = ir.node(kind, [*node.inputs[:_FIRST], *parts, *node.inputs[_LAST:]], attributes, domain=DOMAIN)
    graph.insert_before(node, [new])
    replace(graph, node, list(new.outputs))
    drop_unread(graph, weights)
