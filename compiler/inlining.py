"""Inline the ops that stages run around an engine into the engine's graph, so that one launch is left.

The graph then has the ops' inputs and outputs, under the names of the buffers: programs lose these stages, and no
other stage changes. Ops that work in place on a KV cache stay outside.

The node of an op takes the op's inputs and, after them, one int64 tensor for each size of the op that no input has, of
which only the length counts. The node gives the op's outputs and, after them, `status` where the op can find a fault
(`plugins.cuda.launches.FAULTS`). Tensors at the end that a graph lacks may be left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from outrider.compiler.engines.onnx_file import DTYPES
from outrider.plans import names
from outrider.plans.buffers import Tensor
from outrider.plans.manifest import Stage
from outrider.plugins.onnx_ops import DOMAIN, VERSION
from outrider.plugins.ops import OPS
from outrider.plugins.schema import TensorSpec
from outrider.plugins.tensorrt.plugin import Declined
from outrider.plugins.tensorrt.table import PLUGINS

_TYPES = {dtype: own for own, dtype in DTYPES.items()}
_SAME_LENGTH = {names.PLACES: names.NEW}  # with one row, S equals N


IR_TYPES = {
    "float32": ir.DataType.FLOAT,
    "float64": ir.DataType.DOUBLE,
    "int64": ir.DataType.INT64,
    "uint64": ir.DataType.UINT64,
}
"""ONNX types by the schemas' dtype names; a dtype that stands for several types has no entry."""


def node_inputs(op: str) -> tuple[TensorSpec, ...]:
    schema = OPS[op].schema
    known = {dim for spec in schema.inputs for dim in spec.shape}
    missing = [size for size in schema.extents if size not in known]
    return (*schema.inputs, *(TensorSpec(f"length.{size}", "int64", (size,)) for size in missing))


def node_outputs(op: str) -> tuple[TensorSpec, ...]:
    entry = PLUGINS[op]
    given = [] if isinstance(entry, Declined) else [spec for plugin in entry for spec in plugin.outputs]
    return (*OPS[op].schema.outputs, *(spec for spec in given if spec.name == names.STATUS))


def inline_stages(
    model: ir.Model,
    before: Sequence[Stage],
    after: Sequence[Stage],
    memory: Mapping[str, Tensor],
    free: Mapping[str, str],
) -> tuple[str, ...]:
    """Inline ops into the graph of a model with one row; `before` ops make its inputs, `after` ops read its outputs.

    `memory` has every buffer by name. `free` maps inputs that the host may write in place of an op to the flag input
    that is not 0 when the host has written them. Returns the names of the ops.
    """
    graph = _Inliner(model.graph, memory)
    model.opset_imports.setdefault(DOMAIN, VERSION)
    for stage in before:
        graph.put_before(stage, free)
    for stage in after:
        graph.put_after(stage)
    return tuple(stage.run for stage in (*before, *after))


class _Inliner:
    def __init__(self, graph: ir.Graph, memory: Mapping[str, Tensor]) -> None:
        self._graph, self._memory, self._first = graph, memory, graph[0]

    def put_before(self, stage: Stage, free: Mapping[str, str]) -> None:
        """Replace graph inputs by the op's outputs of the same names; a flag chooses the input or output where `free`.

        An input that no node reads any more is removed.
        """
        model_inputs = {value.name: value for value in self._graph.inputs}
        read = [(value, list(value.uses())) for name in stage.outputs if (value := model_inputs.get(name)) is not None]
        node, nodes = self._node(stage)
        for output, spec in zip(node.outputs, node_outputs(stage.run), strict=True):
            output.name = f"{stage.run}.{spec.name}"
            if (given := model_inputs.get(spec.name)) is not None:
                output.shape = given.shape
        made = {spec.name: output for spec, output in zip(node_outputs(stage.run), node.outputs, strict=True)}
        for value, uses in read:
            assert value.name
            replacement = made[value.name]
            if value.name in free:
                flag = self._input(free[value.name], names.buffer_name(stage.model, free[value.name]))
                chosen = ir.node("Cast", [flag], {"to": ir.DataType.BOOL})
                select = ir.node("Where", [chosen.outputs[0], value, replacement])
                nodes += [chosen, select]
                replacement = select.outputs[0]
            for use in uses:
                use.node.replace_input_with(use.idx, replacement)
            if not value.uses():
                self._graph.inputs.remove(value)
        self._graph.insert_before(self._first, nodes)

    def put_after(self, stage: Stage) -> None:
        """Append the op, which reads outputs and inputs of the graph, and add its outputs after the graph's own."""
        node, nodes = self._node(stage)
        for output, spec in zip(node.outputs, node_outputs(stage.run), strict=True):
            buffer = self._memory[stage.outputs.get(spec.name, names.buffer_name(stage.model, spec.name))]
            output.name, output.shape = spec.name, ir.Shape(buffer.shape)
            self._graph.outputs.append(output)
        for new in nodes:
            self._graph.append(new)

    def _node(self, stage: Stage) -> tuple[ir.Node, list[ir.Node]]:
        """Return the op's node, and the list of nodes to insert: the nodes that it needs, then itself."""
        schema, nodes = OPS[stage.run].schema, list[ir.Node]()
        inputs = [self._input(spec.name, stage.inputs[spec.name]) for spec in schema.inputs]
        for spec in node_inputs(stage.run)[len(schema.inputs) :]:
            inputs.append(self._length(str(spec.shape[0]), inputs, nodes))
        outputs = node_outputs(stage.run)
        node = ir.node(stage.run, inputs, dict(stage.attributes), domain=DOMAIN, num_outputs=len(outputs))
        for output, spec in zip(node.outputs, outputs, strict=True):
            output.type = ir.TensorType(IR_TYPES[spec.dtype])
        return node, [*nodes, node]

    def _input(self, name: str, buffer: str) -> ir.Value:
        """Return the graph's output or input `name`; where there is neither, make an input."""
        for value in (*self._graph.outputs, *self._graph.inputs):
            if value.name == name:
                return value
        tensor = self._memory[buffer]
        value = ir.Value(name=name, shape=ir.Shape(tensor.shape), type=ir.TensorType(_TYPES[tensor.dtype]))
        self._graph.inputs.append(value)
        return value

    def _length(self, size: str, inputs: Sequence[ir.Value], nodes: list[ir.Node]) -> ir.Value:
        """Return a tensor of length `size`: one of `inputs`, or zeros that are never read."""
        symbol = _SAME_LENGTH.get(size, size)
        for value in inputs:
            if value.shape is not None and [str(dim) for dim in value.shape] == [symbol]:
                return value
        holder = next(v for v in self._graph.inputs if v.shape is not None and symbol in map(str, v.shape))
        assert holder.shape is not None
        axis = [str(dim) for dim in holder.shape].index(symbol)
        length = ir.node("Shape", [holder], {"start": axis, "end": axis + 1})
        zero = ir.node("Constant", [], {"value": ir.tensor(np.zeros(1, np.int64))})
        zeros = ir.node("Expand", [zero.outputs[0], length.outputs[0]])
        nodes += [length, zero, zeros]
        return zeros.outputs[0]
