"""Our ops as TensorRT plugins."""

from __future__ import annotations

import onnx_ir as ir

from outrider.compiler.graph_edits import replace
from outrider.compiler.inlining import IR_TYPES, node_inputs, node_outputs
from outrider.compiler.lowering.functions import FunctionBody
from outrider.compiler.lowering.rule import Lowering, Rule
from outrider.plugins.onnx_ops import DOMAIN
from outrider.plugins.ops import OPS
from outrider.plugins.schema import TensorSpec
from outrider.plugins.tensorrt.plugin import NAMESPACE, Declined
from outrider.plugins.tensorrt.table import PLUGINS


class PluginNodes(Rule):
    """TensorRT: an op that has plugins becomes one node per plugin, in the order of `PLUGINS`.

    The engine then holds their kernels, so that the op needs no stage and no Python. The parser finds plugins by name,
    version and namespace.
    """

    def pattern(self, node: ir.Node) -> bool:
        return node.domain == DOMAIN

    def check(self, node: ir.Node, lowering: Lowering) -> str | None:
        entry = PLUGINS[node.op_type]
        return entry.reason if isinstance(entry, Declined) else None

    def rewrite(self, node: ir.Node, lowering: Lowering) -> None:
        plugins = PLUGINS[node.op_type]
        assert not isinstance(plugins, Declined)
        tensors, lengths = dict[str, ir.Value](), dict[str, ir.Value]()
        for spec, value in zip(node_inputs(node.op_type), node.inputs, strict=False):
            assert value is not None
            tensors[spec.name] = value
            if _only_a_length(spec):
                lengths.setdefault(str(spec.shape[0]), value)
        for plugin in plugins:
            attributes = {name: _attribute(node, name) for name in plugin.attributes}
            made = ir.node(
                plugin.name,
                [tensors[s.name] if s.name in tensors else lengths[str(s.shape[0])] for s in plugin.inputs],
                {**attributes, "plugin_version": "1", "plugin_namespace": NAMESPACE},
                domain=DOMAIN,
                num_outputs=len(plugin.outputs),
            )
            for spec, output in zip(plugin.outputs, made.outputs, strict=True):
                tensors[spec.name] = output
                if spec.dtype in IR_TYPES:
                    output.type = ir.TensorType(IR_TYPES[spec.dtype])
            lowering.graph.insert_before(node, [made])
        given = node_outputs(node.op_type)[: len(node.outputs)]
        replace(lowering.graph, node, [tensors[spec.name] for spec in given])


class BodyOfDeclined(FunctionBody):
    """TensorRT: an op without plugins keeps its node and gets a body in standard ops. An op with plugins must not get
    one, because a plugin may have the op's name."""

    def pattern(self, node: ir.Node) -> bool:
        return super().pattern(node) and isinstance(PLUGINS.get(node.op_type), Declined)


def _only_a_length(spec: TensorSpec) -> bool:
    return spec.dtype == "int64" and len(spec.shape) == 1 and isinstance(spec.shape[0], str)


def _attribute(node: ir.Node, name: str) -> int | float:
    """Return an attribute of the op, its default, or a size of the op's tensors, known when an engine is built.

    Raises `ValueError` where the node has none of them.
    """
    if name in node.attributes:
        return node.attributes[name].value  # type: ignore[no-any-return]
    schema = OPS[node.op_type].schema
    defaults = {spec.name: spec.default for spec in schema.attributes}
    if (default := defaults.get(name)) is not None:
        return default
    for specs, values in ((node_inputs(node.op_type), node.inputs), (node_outputs(node.op_type), node.outputs)):
        for spec, value in zip(specs, values, strict=False):
            if name in spec.shape and value is not None and value.shape is not None:
                size = value.shape[spec.shape.index(name)]
                if isinstance(size, int):
                    return size
    raise ValueError(f"the plugin of {node.op_type} wants {name!r}, which its node does not have")
