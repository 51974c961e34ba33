"""Numbers under a soft cap, logits for one, as one node."""

from __future__ import annotations

import onnx_ir as ir

from outrider.compiler.graph_edits import replace
from outrider.compiler.lowering.rule import Lowering, Rule
from outrider.plugins.schema import CPU_DOMAIN


class FuseSoftcap(Rule):
    """onnxruntime-cpu: `cap * tanh(x / cap)` becomes one `outrider.cpu.Softcap`.

    One pass over the logits instead of three. The node is ours, and has the same bits on every processor and at any
    place.
    """

    def pattern(self, node: ir.Node) -> bool:
        return _tanh_of(node) is not None

    def check(self, node: ir.Node, lowering: Lowering) -> str | None:
        tanh = _tanh_of(node)
        divided = None if tanh is None or tanh.inputs[0] is None else tanh.inputs[0].producer()
        if tanh is None or divided is None or divided.op_type != "Div":
            return "what tanh takes is no quotient"
        cap = _cap(node)
        if cap is None or cap <= 0 or divided.inputs[1] is None or _number(divided.inputs[1]) != cap:
            return "it is multiplied with another number than it was divided by"
        x = divided.inputs[0]
        if x is None or x.dtype != ir.DataType.FLOAT:
            return "its kernel computes in float32"
        if any(
            len(each.outputs[0].uses()) != 1 or each.outputs[0] in lowering.graph.outputs for each in (tanh, divided)
        ):
            return "a part of it is read by others too"
        return None

    def rewrite(self, node: ir.Node, lowering: Lowering) -> None:
        graph, tanh, cap = lowering.graph, _tanh_of(node), _cap(node)
        assert tanh is not None
        assert tanh.inputs[0] is not None
        divided = tanh.inputs[0].producer()
        assert divided is not None
        capped = ir.node("Softcap", [divided.inputs[0]], {"cap": cap}, domain=CPU_DOMAIN)
        graph.insert_before(node, [capped])
        lowering.model.opset_imports.setdefault(CPU_DOMAIN, 1)
        replace(graph, node, [capped.outputs[0]])
        for each in (tanh, divided):
            graph.remove(each, safe=True)


def _tanh_of(product: ir.Node) -> ir.Node | None:
    """Return the Tanh that a product with a constant number multiplies; None where there is none."""
    if product.op_type != "Mul" or _cap(product) is None:
        return None
    made = [value.producer() for value in product.inputs if value is not None]
    return next((node for node in made if node is not None and node.op_type == "Tanh"), None)


def _cap(product: ir.Node) -> float | None:
    return next((number for value in product.inputs if (number := _number(value)) is not None), None)


def _number(value: ir.Value | None) -> float | None:
    constant = None if value is None else value.const_value
    return float(constant.numpy().reshape(-1)[0]) if constant is not None and constant.size == 1 else None
