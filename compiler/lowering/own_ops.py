"""Ops that are kernels of ours as they are; RMS norms, with the residual sum before them, with one order of sums on any
processor, and as ONNX Runtime's op on CUDA."""

from __future__ import annotations

import onnx_ir as ir

from outrider.compiler.graph_edits import attributes_of, replace
from outrider.compiler.lowering.rule import CONTRIBUTED, Lowering, Rule
from outrider.plugins.onnx_ops import DOMAIN
from outrider.plugins.schema import CPU_DOMAIN


class CpuNorms(Rule):
    """onnxruntime-cpu: an RMS norm, with the residual sum before it or without, is one `outrider.cpu.RmsNorm`.

    With the sum, it is one pass over the data and one dispatch instead of two. ONNX Runtime's own norm sums in an order
    that the processor's vectors decide.
    """

    def pattern(self, node: ir.Node) -> bool:
        return node.op_type == "RMSNormalization" or (node.domain == DOMAIN and node.op_type == "AddNorm")

    def rewrite(self, node: ir.Node, lowering: Lowering) -> None:
        epsilon = {"epsilon": node.attributes.get_float("epsilon", 1e-5)}
        count = len(node.inputs) - 1
        lowering.put(node, ir.node("RmsNorm", node.inputs, epsilon, domain=CPU_DOMAIN, num_outputs=count))


class SkipNorm(Rule):
    """onnxruntime-cuda: a residual sum and its RMS norm are one `com.microsoft.SkipSimplifiedLayerNormalization`.

    One kernel instead of two. It adds up squares in float32 for inputs of any type (in ONNX Runtime 1.31, the
    oldest that runs plans; years before, float16 overflowed in it).
    """

    def pattern(self, node: ir.Node) -> bool:
        return node.domain == DOMAIN and node.op_type == "AddNorm"

    def rewrite(self, node: ir.Node, lowering: Lowering) -> None:
        residual, weight, added = node.inputs
        fused = ir.node(
            "SkipSimplifiedLayerNormalization",
            [residual, added, weight],
            attributes_of(node),
            domain=CONTRIBUTED,
            num_outputs=4,  # the second and third are for training
        )
        lowering.graph.insert_before(node, [fused])
        replace(lowering.graph, node, [fused.outputs[0], fused.outputs[-1]])
        lowering.model.opset_imports.setdefault(fused.domain, 1)


_KERNELS = ("PathConv", "Softcap", "StateScan", "TreeExpand", "TreeRerank")


class CpuSigmoids(Rule):
    """onnxruntime-cpu: a sigmoid becomes `outrider.cpu.Sigmoid`, whose exp is the same on any processor."""

    def pattern(self, node: ir.Node) -> bool:
        return node.domain == "" and node.op_type == "Sigmoid"

    def check(self, node: ir.Node, lowering: Lowering) -> str | None:
        return None if node.outputs[0].dtype == ir.DataType.FLOAT else "its kernel computes in float32"

    def rewrite(self, node: ir.Node, lowering: Lowering) -> None:
        lowering.put(node, ir.node("Sigmoid", node.inputs, domain=CPU_DOMAIN))


class OwnKernels(Rule):
    """Ops that have kernels of ours of the same name and inputs: on the CPU one node instead of a body's many.

    A drafter's engine runs on small tensors, where starting a node costs more than computing it.
    """

    def pattern(self, node: ir.Node) -> bool:
        return node.domain == DOMAIN and node.op_type in _KERNELS

    def rewrite(self, node: ir.Node, lowering: Lowering) -> None:
        count, attributes = len(node.outputs), attributes_of(node)
        lowering.put(node, ir.node(node.op_type, node.inputs, attributes, domain=CPU_DOMAIN, num_outputs=count))
