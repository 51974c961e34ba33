"""Ops of draft graphs as our own kernels."""

from __future__ import annotations

import onnx_ir as ir

from outrider.compiler.graph_edits import replace
from outrider.compiler.lowering.rule import Lowering, Rule
from outrider.plugins.onnx_ops import DOMAIN
from outrider.plugins.schema import CPU_DOMAIN


class CpuDraftOps(Rule):
    """onnxruntime-cpu: TreeExpand and TreeRerank are one node each instead of twenty.

    A drafter's engine runs on small tensors, where starting a node costs more than computing it.
    """

    def pattern(self, node: ir.Node) -> bool:
        return node.domain == DOMAIN and node.op_type in ("TreeExpand", "TreeRerank")

    def rewrite(self, node: ir.Node, lowering: Lowering) -> None:
        own = ir.node(
            node.op_type,
            list(node.inputs),
            {name: attribute.value for name, attribute in node.attributes.items()},
            domain=CPU_DOMAIN,
            num_outputs=len(node.outputs),
        )
        lowering.graph.insert_before(node, [own])
        replace(lowering.graph, node, list(own.outputs))
        lowering.model.opset_imports.setdefault(CPU_DOMAIN, 1)
