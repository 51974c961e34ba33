"""Our ops as nodes of a graph: domain `outrider`, the op's own name.

A node takes the op's inputs and, after them, one int64 tensor for each size of the op that no input has; only the
length of such a tensor counts. The node gives the op's outputs and, after them, `status` where the op can find a fault
(`plugins.cuda.launches.FAULTS`). Tensors at the end that a graph lacks may be left out.
"""

from __future__ import annotations

import onnx_ir as ir

from outrider.plans import names
from outrider.plugins.schema import TensorSpec
from outrider.plugins.schemas import SCHEMAS
from outrider.plugins.tensorrt import PLUGINS, Declined

IR_TYPES = {
    "float32": ir.DataType.FLOAT,
    "float64": ir.DataType.DOUBLE,
    "int64": ir.DataType.INT64,
    "uint64": ir.DataType.UINT64,
}
"""ONNX types by the schemas' dtype names; a dtype that stands for several types has no entry."""


def node_inputs(op: str) -> tuple[TensorSpec, ...]:
    schema = SCHEMAS[op]
    known = {dim for spec in schema.inputs for dim in spec.shape}
    missing = [size for size in schema.extents if size not in known]
    return (*schema.inputs, *(TensorSpec(f"length.{size}", "int64", (size,)) for size in missing))


def node_outputs(op: str) -> tuple[TensorSpec, ...]:
    entry = PLUGINS[op]
    given = [] if isinstance(entry, Declined) else [spec for plugin in entry for spec in plugin.outputs]
    return (*SCHEMAS[op].outputs, *(spec for spec in given if spec.name == names.STATUS))
