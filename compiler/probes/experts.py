"""A layer's experts and their router on random rows. The experts of a row are chosen at random as well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from outrider.compiler.probes.ops import ProbePart, ProbeTape, as_rows, attributes_of, leading, rows_input
from outrider.plugins.panel_layout import panel_shape
from outrider.plugins.quant_layout import QuantLayout
from outrider.plugins.schema import CPU_DOMAIN

_MOST = 4
"""Experts of a probe: one has the same work as another."""

_FIRST, _LAST = 2, 5
"""Where the weights of gate, up and down stand among the inputs of a node."""


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
    attributes = attributes_of(node)
    router = node.inputs[1]
    assert router is not None
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
