"""One op of an engine on random rows of its own: products, norms, gated units, soft caps; a layer's experts, which are
chosen at random as well, and their router."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from outrider.compiler.graph_edits import attributes_of, given
from outrider.plans import names
from outrider.plugins.panel_layout import panel_shape
from outrider.plugins.quant_layout import GROUP, QuantLayout
from outrider.plugins.schema import CPU_DOMAIN

_MOST = 4
"""Experts of a probe: one has the same work as another."""
_FIRST, _LAST = 2, 5
"""Where the weights of gate, up and down stand among the inputs of a node of experts."""


@dataclass(frozen=True)
class Weight:
    """The matrix of a product: `inputs` by `columns`, the latter stored along dimension `axis` of `[2]`.

    Packed weights (`layout`) are stored in one dimension.
    """

    inputs: int
    columns: int
    axis: int = 1
    layout: QuantLayout | None = None


@dataclass(frozen=True)
class ProbePart:
    """What an op has of its own in a probe: inputs and outputs of the graph."""

    inputs: list[ir.Value]
    outputs: list[ir.Value]


class ProbeTape(Tape):
    """The nodes and constants of a probe. A constant is made once per name."""

    def initializer(self, tensor: ir.TensorProtocol, name: str | None = None) -> ir.Value:
        made = next((value for value in self.initializers if value.name == (name or tensor.name)), None)
        return super().initializer(tensor, name) if made is None else made


def weight_of(node: ir.Node) -> Weight | None:
    """Return the constant matrix that a product reads; None for any other node."""
    if node.domain == CPU_DOMAIN and node.op_type == "QuantMatMul":
        n, k, bits, wide, minimums = (node.attributes[a].as_int() for a in ("N", "K", "bits", "wide", "minimums"))
        return Weight(k, n, layout=QuantLayout(n, k, bits, bool(wide), bool(minimums)))
    if node.domain != "" or node.op_type not in ("MatMul", "Gemm"):
        return None
    constant = None if node.inputs[1] is None else node.inputs[1].const_value
    if constant is None or len(constant.shape) != 2:
        return None
    shape = constant.shape.numpy()
    axis = 0 if attributes_of(node).get("transB") else 1
    return Weight(shape[1 - axis], shape[axis], axis)


def add_product(tape: ProbeTape, node: ir.Node, label: str, most: int | None) -> ProbePart:
    """Add the product `node`, with at most about `most` of its weights: with fewer columns, all where that is None."""
    weight = weight_of(node)
    assert weight is not None
    columns = weight.columns
    if most is not None:
        # Kernels of float32 take columns that are left over in another way, and share work out by rows where these are
        # more than the columns.
        least, tail = (GROUP, 0) if weight.layout is not None else (2 * GROUP, columns % GROUP)
        columns = min(columns, max(least, most // weight.inputs // GROUP * GROUP) + tail)
    attributes = attributes_of(node)
    if weight.layout is None:
        shape = [weight.inputs, columns] if weight.axis == 1 else [columns, weight.inputs]
    else:
        layout = replace(weight.layout, outputs=columns)
        attributes, shape = dict(layout.attributes), [layout.size]
    rank = 2 if node.op_type == "Gemm" else 3
    rows = rows_input(f"{label}.x", weight.inputs, rank)
    constants = [leading(tape, node.inputs[1], shape), *(leading(tape, value, [columns]) for value in node.inputs[2:])]
    made = tape.op(node.op_type, [rows, *constants], attributes, domain=node.domain)
    return ProbePart([rows], [as_rows(made, columns, rank)])


def add_row_op(tape: ProbeTape, node: ir.Node, label: str, width: int) -> ProbePart:
    """Add `node` with its constants, and rows of `width` in place of its other inputs. Its first output is probed."""
    inputs: list[ir.Value | None] = []
    rows = []
    for index, value in enumerate(node.inputs):
        if value is not None and value.const_value is None:
            rows.append(rows_input(f"{label}.{index}", width))
            inputs.append(rows[-1])
        else:
            inputs.append(leading(tape, value))
    made = tape.op_multi_out(
        node.op_type, inputs, attributes_of(node), num_outputs=len(node.outputs), domain=node.domain
    )
    return ProbePart(rows, [as_rows(made[0], width // 2 if node.op_type == "GatedUnit" else width)])


@dataclass(frozen=True)
class ExpertSizes:
    """Of a node: how many experts there are, the width of tokens, and that between the products."""

    experts: int
    hidden: int
    inner: int


def sizes_of(node: ir.Node) -> ExpertSizes | None:
    """Return the sizes of a node that computes experts; None for any other node."""
    if node.domain != CPU_DOMAIN or node.op_type not in ("MixtureOfExperts", "QuantMixtureOfExperts"):
        return None
    return ExpertSizes(*(node.attributes[name].as_int() for name in ("experts", "hidden", "size")))


def add_route(tape: ProbeTape, node: ir.Node, label: str) -> ProbePart:
    """Add the router `node`."""
    attributes, router = attributes_of(node), given(node.inputs)[1]
    assert router.const_value is not None
    rows = rows_input(f"{label}.x", router.const_value.shape.numpy()[2])
    made = tape.op("Route", [rows, *(leading(tape, v) for v in node.inputs[1:])], attributes, domain=node.domain)
    return ProbePart([rows], [as_rows(made, attributes["experts"])])


def add_experts(tape: ProbeTape, node: ir.Node, label: str) -> ProbePart:
    """Add the first experts of `node`. A row chooses those whose random weight is positive, about half of them."""
    sizes = sizes_of(node)
    assert sizes is not None
    count = min(sizes.experts, _MOST)
    rows, chosen = rows_input(f"{label}.x", sizes.hidden), rows_input(f"{label}.weights", count)
    matrices = ((sizes.hidden, sizes.inner), (sizes.hidden, sizes.inner), (sizes.inner, sizes.hidden))
    weights = [
        leading(tape, value, _stored_shape(node, count, *matrix))
        for value, matrix in zip(node.inputs[_FIRST:_LAST], matrices, strict=True)
    ]
    biases = [
        leading(tape, value, [count, outputs])
        for value, (_, outputs) in zip(node.inputs[_LAST:], matrices, strict=False)
    ]
    inputs: Sequence[ir.Value | None] = [rows, tape.op("Relu", [chosen]), *weights, *biases]
    made = tape.op(node.op_type, inputs, attributes_of(node) | {"experts": count}, domain=node.domain)
    return ProbePart([rows, chosen], [as_rows(made, sizes.hidden)])


def _stored_shape(node: ir.Node, count: int, inputs: int, outputs: int) -> list[int]:
    if node.op_type == "MixtureOfExperts":
        return list(panel_shape(count, inputs, outputs))
    bits, wide, minimums = (node.attributes[name].as_int() for name in ("bits", "wide", "minimums"))
    return [QuantLayout(count * outputs, inputs, bits, bool(wide), bool(minimums)).size]


def rows_input(name: str, width: int, rank: int = 3) -> ir.Value:
    """Return a graph input of rows, float32 `[1, P, width]`, or `[P, width]`."""
    return as_rows(ir.Value(name=name), width, rank)


def as_rows(value: ir.Value, width: int, rank: int = 3) -> ir.Value:
    """Return `value` with the type and shape of rows."""
    extents: list[int | str] = [1, names.PROBED, width]
    value.type, value.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(extents[3 - rank :])
    return value


def extent(value: ir.Value | None, axis: int) -> int:
    """Return the extent of a value in a dimension that has no symbol."""
    assert value is not None
    assert value.shape is not None
    size = value.shape[axis]
    assert isinstance(size, int)
    return size


def leading(tape: ProbeTape, value: ir.Value | None, shape: list[int] | None = None) -> ir.Value | None:
    """Return the leading elements of a constant in `shape`, all of it by default; of a file they are not read."""
    tensor = None if value is None else value.const_value
    if tensor is None:
        return None
    shape = list(tensor.shape.numpy()) if shape is None else shape
    size, name = prod(shape), f"{tensor.name}.{'x'.join(map(str, shape))}"
    if isinstance(tensor, ir.ExternalTensor):
        part: ir.TensorProtocol = ir.ExternalTensor(
            tensor.location, tensor.offset, int(size * tensor.dtype.itemsize), tensor.dtype,
            shape=ir.Shape(shape), name=name, base_dir=tensor.base_dir,
        )  # fmt: skip
    else:
        part = ir.Tensor(np.ascontiguousarray(tensor.numpy().reshape(-1)[:size].reshape(shape)), name=name)
    return tape.initializer(part, name)
