"""Graphs of the target `tensorrt`: ops as nodes of their plugins.

`test_tensorrt.py` has such nodes of whole plans; what they compute is tested in tests/integration/test_inlined_ops.py.
"""

from __future__ import annotations

import onnx_ir as ir
import pytest

from outrider.compiler.lowering import lower
from outrider.plugins.onnx_ops import DOMAIN, VERSION
from outrider.plugins.ops import OPS
from outrider.plugins.tensorrt.plugin import Declined
from outrider.plugins.tensorrt.table import PLUGINS

TENSORRT = "tensorrt"


def value(name: str, dtype: ir.DataType, *shape: int | str) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))


def model(inputs: list[ir.Value], nodes: list[ir.Node]) -> ir.Model:
    graph = ir.Graph(inputs, nodes[-1].outputs, nodes=nodes, opset_imports={"": 24, DOMAIN: VERSION, "test": 1})
    return ir.Model(graph, ir_version=10)


def test_what_is_no_plugin_gets_its_body_and_the_reason_is_reported() -> None:
    """Attention over several rows, which is not lowered to TensorRT's own layers."""
    q, cache = (1, "N", 8), ("R", 1, 80, 4)
    shapes = [q, (1, "N", 4), (1, "N", 4), cache, cache, ("R", 1, "S", "T"), ("R",), ("E",)]
    kinds = [ir.DataType.FLOAT] * 6 + [ir.DataType.INT64] * 2
    specs = OPS["BranchAttention"].schema.inputs[: len(shapes)]  # without sinks
    inputs = [value(spec.name, kind, *shape) for spec, kind, shape in zip(specs, kinds, shapes, strict=True)]
    attributes = {"num_heads": 2, "kv_num_heads": 1, "scale": 0.5}
    node = ir.node("BranchAttention", inputs, attributes, domain=DOMAIN, num_outputs=3)
    made = model(inputs, [node])
    reports = {report.rule: report for report in lower("x", made, TENSORRT, rows=2)}
    declined = PLUGINS["BranchAttention"]
    assert isinstance(declined, Declined)
    assert reports["PluginNodes"].declined == {declined.reason: 1}
    assert [name for _, name, _ in made.functions] == ["BranchAttention"]


def test_what_a_builder_cannot_know_is_named() -> None:
    given = [value(spec.name, ir.DataType.INT64, "N") for spec in OPS["RaceNoise"].schema.inputs]
    node = ir.node("RaceNoise", given, domain=DOMAIN, num_outputs=4)
    with pytest.raises(ValueError, match="the plugin of RaceNoise wants 'depths', which its node does not have"):
        lower("x", model(given, [node]), TENSORRT, rows=1)
