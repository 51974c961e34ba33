"""How sure a drafter is: an entropy, which exports spell as LogSoftmax, Exp, Mul and ReduceSum, is one launch."""

from __future__ import annotations

import onnx_ir as ir

from outrider.compiler.kernels.code import Word
from outrider.compiler.kernels.emitter import Emitter
from outrider.compiler.kernels.sizes import product, size
from outrider.compiler.kernels.values import EntropyTerm, RuleTensor, ZeroedSum


def log_softmax(e: Emitter, node: ir.Node) -> None:
    """Note that a value is the logarithms of a softmax."""
    of = e.stored(e.value(node.inputs[0]))
    if node.attributes.get_int("axis", -1) not in (-1, len(of.shape) - 1):
        raise e.refusal("LogSoftmax along another dimension than the last")
    e.set(node.outputs[0], EntropyTerm(of, "log p"))


def multiply_parts(e: Emitter, node: ir.Node) -> None:
    """Multiply parts of an entropy, or what stands for its time by zero."""
    values = [e.value(each) for each in node.inputs]
    logs = [value for value in values if isinstance(value, EntropyTerm)]
    if node.op_type == "Mul" and len(logs) == 2 and {each.times for each in logs} == {"p", "log p"}:
        e.set(node.outputs[0], EntropyTerm(logs[0].of, "p log p"))
        return
    others = [each for each in node.inputs if not isinstance(e.value(each), EntropyTerm | ZeroedSum)]
    if node.op_type == "Mul" and not logs and len(others) == 1:
        factor = e.ruled(e.value(others[0])).at(e.nodes.index)
        if factor.word is Word.CONSTANT and factor.of == 0:
            zero = e.nodes.constant(0)
            e.set(node.outputs[0], RuleTensor("real", e.ruled(e.value(others[0])).shape, lambda index: zero))
            return
    raise e.refusal(f"{node.op_type} of a softmax or of a sum of everything")


def reduce_sum(e: Emitter, node: ir.Node) -> None:
    """Launch the kernel for the entropy of rows; any other sum waits for the product by zero that it was made for."""
    value = e.value(node.inputs[0])
    if isinstance(value, EntropyTerm) and value.times == "p log p":
        vocabulary, rows = value.of.shape[-1], value.of.shape[:-1]
        keeps = node.attributes.get_int("keepdims", 1) == 1
        to = e.new("real", (*rows, size(1)) if keeps else rows, node.outputs[0])
        e.launch(
            "outrider_entropy", {"logits": value.of.name, "to": to.name}, {"vocabulary": vocabulary}, product(rows),
            part="entropy of a draft",
        )  # fmt: skip
        e.set(node.outputs[0], to)
        return
    e.set(node.outputs[0], ZeroedSum())
