"""What is not exact: real ops of ONNX Runtime that give a row other bits in other company."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from outrider.plans import names
from outrider.plans.plan import open_plan
from tests.plans.damage import BACKEND, edit, list_again

INEXACT_OPS = ("DynamicQuantizeLinear", "MatMulInteger")


def quantised_by_the_whole(x: str, weight: np.ndarray, y: str) -> tuple[list[onnx.NodeProto], list[onnx.TensorProto]]:
    """The product of `x` with `weight` `[K, N]` in integers, as dynamic quantisation has it: one scale for all rows."""
    scale = float(np.abs(weight).max() / 127)
    integers = numpy_helper.from_array(np.round(weight / scale).astype(np.int8), f"{y}.integers")
    constant = numpy_helper.from_array(np.float32(scale), f"{y}.scale")
    nodes = [
        helper.make_node("DynamicQuantizeLinear", [x], [f"{y}.x", f"{y}.x_scale", f"{y}.x_zero"]),
        helper.make_node("MatMulInteger", [f"{y}.x", integers.name, f"{y}.x_zero"], [f"{y}.sums"]),
        helper.make_node("Cast", [f"{y}.sums"], [f"{y}.float"], to=TensorProto.FLOAT),
        helper.make_node("Mul", [f"{y}.float", f"{y}.x_scale"], [f"{y}.scaled"]),
        helper.make_node("Mul", [f"{y}.scaled", constant.name], [y]),
    ]
    return nodes, [integers, constant]


def probe_of_a_product(path: Path) -> None:
    """Write a probe of such a product; its output is `y`."""
    weight = np.random.default_rng(0).standard_normal((32, 8)).astype(np.float32)
    nodes, constants = quantised_by_the_whole("x", weight, "y")
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, names.PROBED, size])
        for name, size in (("x", 32), ("y", 8))
    )
    model = helper.make_model(
        helper.make_graph(nodes, "probe", [x], [y], constants),
        opset_imports=[helper.make_opsetid("", 21)],
        ir_version=10,
    )
    onnx.save(model, str(path))


def make_probe_inexact(plan: Path, text: str) -> None:
    """Let the probe of `plan` find that the op `text` is not exact."""
    probe = open_plan(plan, verify=False).manifest.backends[BACKEND].probe
    assert probe is not None
    probe_of_a_product(plan / probe.file)
    edit(plan, lambda manifest: manifest["backends"][BACKEND]["probe"].update(ops={"y": text}))
    list_again(plan)


def make_target_inexact(plan: Path) -> None:
    """Let the target of `plan` quantise the rows of its first product all by one scale."""
    engine = open_plan(plan, verify=False).manifest.backends[BACKEND].engines[names.TARGET]
    path = plan / engine.file
    whole = onnx.load(str(path))
    weights = {tensor.name: tensor for tensor in whole.graph.initializer}
    model = onnx.load(str(path), load_external_data=False)
    nodes = list(model.graph.node)
    index = next(i for i, node in enumerate(nodes) if node.op_type == "MatMul")
    product = nodes[index]
    weight = numpy_helper.to_array(weights[product.input[1]])
    nodes[index : index + 1], constants = quantised_by_the_whole(product.input[0], weight, product.output[0])
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    model.graph.initializer.extend(constants)
    path.write_bytes(model.SerializeToString())
    list_again(plan)
