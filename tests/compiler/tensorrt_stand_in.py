"""A package `tensorrt` made of `tensorrt_rtx`, whose builder is nearly the same and needs no GPU.

Flags are set on real configurations, graphs parsed and built for real: but for plugins, which TensorRT for RTX has not.
In the place of each, its parser gets standard ops that read all of the plugin's inputs and give outputs of its shapes
and types.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import onnx
from onnx import TensorProto, helper

from outrider.plugins.tensorrt.expressions import Arithmetic
from outrider.plugins.tensorrt.plugin import Plugin, carried_as
from outrider.plugins.tensorrt.table import DISTINCT

VERSION = "10.16.1.11"
_TYPES = {"int64": TensorProto.INT64, "float32": TensorProto.FLOAT}


def stand_in_tensorrt(trt: Any) -> ModuleType:
    """The package; its `configs` are all configurations that were made, in order."""
    module = ModuleType("tensorrt")
    module.__dict__.update({name: value for name, value in vars(trt).items() if not name.startswith("__")})
    configs: list[Any] = []

    class Builder(trt.Builder):
        def create_builder_config(self) -> Any:
            config = super().create_builder_config()
            config.num_compute_capabilities = 1  # else the builder looks for a GPU
            config.set_compute_capability(trt.ComputeCapability.SM80, 0)
            configs.append(config)
            return config

    class OnnxParser(trt.OnnxParser):
        def parse_from_file(self, path: str) -> bool:
            without_plugins(Path(path))
            return bool(super().parse_from_file(path))

    module.__dict__.update(__version__=VERSION, Builder=Builder, OnnxParser=OnnxParser, configs=configs)
    return module


def without_plugins(path: Path) -> None:
    """Put standard ops in the place of every plugin of the graph at `path`."""
    model = onnx.load(str(path), load_external_data=False)
    plugins = {plugin.name: plugin for plugin in DISTINCT}
    nodes: list[onnx.NodeProto] = []
    for index, node in enumerate(model.graph.node):
        if node.domain == "outrider":
            nodes += _standard_ops(plugins[node.op_type], node, f"plugin.{index}")
        else:
            nodes.append(node)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    path.write_bytes(model.SerializeToString())


def _standard_ops(plugin: Plugin, node: onnx.NodeProto, prefix: str) -> list[onnx.NodeProto]:
    attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    assert (attributes.pop("plugin_namespace"), attributes.pop("plugin_version")) == (b"outrider", b"1")
    assert set(attributes) == set(plugin.attributes)
    assert len(node.input) == len(plugin.inputs)
    nodes: list[onnx.NodeProto] = []

    def emit(op: str, *inputs: str, **given: Any) -> str:
        name = f"{prefix}.{len(nodes)}"
        nodes.append(helper.make_node(op, list(inputs), [name], **given))
        return name

    total = emit("Constant", value_float=0.0)
    for name in node.input:
        total = emit("Add", total, emit("ReduceMax", emit("Cast", name, to=TensorProto.FLOAT), keepdims=0))

    class Length:
        """A size that only an engine's inputs have, int64 [1]; it can be multiplied."""

        def __init__(self, value: str) -> None:
            self.value = value

        def __mul__(self, factor: Length) -> Length:
            return Length(emit("Mul", self.value, factor.value))

    def constant(number: int) -> Length:
        return Length(emit("Constant", value_ints=[number]))

    def ceil_quotient(dividend: Length, divisor: int) -> Length:
        more = emit("Add", dividend.value, constant(divisor - 1).value)
        return Length(emit("Div", more, constant(divisor).value))

    sizes: dict[str, Any] = {
        symbol: Length(emit("Shape", node.input[index], start=axis, end=axis + 1))
        for symbol, (index, axis) in plugin.axes.items()
    }
    shapes = plugin.output_shapes(sizes | attributes, Arithmetic(constant, ceil_quotient))
    for spec, dims, name in zip(plugin.outputs, shapes, node.output, strict=True):
        value = emit("Cast", total, to=_TYPES[carried_as(spec)[0]])
        lengths = (dim if isinstance(dim, Length) else constant(dim) for dim in dims)
        shape = emit("Concat", *(length.value for length in lengths), axis=0)
        nodes.append(helper.make_node("Expand", [value, shape], [name]))
    return nodes
