"""Ops of engines as the graph of a probe, and the probe that a plan carries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx_ir as ir

from outrider.compiler.probes.attention import add_attention, siblings_function
from outrider.compiler.probes.choice import ProbedOp, probed_ops, widest
from outrider.compiler.probes.ops import (
    ProbePart,
    ProbeTape,
    add_experts,
    add_product,
    add_route,
    add_row_op,
    sizes_of,
    weight_of,
)
from outrider.plans.manifest import Probe
from outrider.plugins.onnx_ops import OPSET
from outrider.plugins.schema import CPU_DOMAIN

FILE = "probe.onnx"

_WEIGHTS = 2**19
"""Most weights of a product in the probe of a plan, about: a few milliseconds for packing and running them."""


def write_probe(engines: Mapping[str, ir.Model], folder: Path) -> Probe:
    """Write the probe of lowered graphs, whose weights are in a file of `folder`, beside them."""
    model, outputs = probe_graph(widest(probed_ops(engines)), _WEIGHTS)
    path = folder / FILE
    path.write_bytes(ir.to_proto(model).SerializeToString(deterministic=True))
    return Probe(file=f"engines/{folder.name}/{FILE}", ops={name: op.text for name, op in outputs.items()})


def probe_graph(ops: Sequence[ProbedOp], most: int | None = None) -> tuple[ir.Model, dict[str, ProbedOp]]:
    """Return a graph that has each op once, and the op that each of its outputs is of.

    Products have `most` weights, about, all where that is None. Where the weights are in a file, the graph reads them
    there.
    """
    tape = ProbeTape()
    inputs: list[ir.Value] = []
    outputs: list[ir.Value] = []
    probed: dict[str, ProbedOp] = {}
    for index, op in enumerate(ops):
        added = _add(tape, op, f"{index}", most)
        inputs += added.inputs
        for number, output in enumerate(added.outputs):
            output.name = f"{index}.out.{number}"
            probed[output.name] = op
            outputs.append(output)
    opsets = {"": OPSET, CPU_DOMAIN: 1, siblings_function().domain: 1}
    opsets |= {op.node.domain: 1 for op in ops if op.node.domain}
    graph = ir.Graph(
        inputs, outputs, nodes=tape.nodes, initializers=tape.initializers, opset_imports=opsets, name="probe"
    )
    return ir.Model(graph, ir_version=10, functions=[siblings_function()]), probed


def _add(tape: ProbeTape, op: ProbedOp, label: str, most: int | None) -> ProbePart:
    if weight_of(op.node) is not None:
        return add_product(tape, op.node, label, most)
    if op.node.op_type == "BranchAttention":
        return add_attention(tape, op.node, label)
    if op.node.op_type == "Route":
        return add_route(tape, op.node, label)
    if sizes_of(op.node) is not None:
        return add_experts(tape, op.node, label)
    return add_row_op(tape, op.node, label, op.width)
