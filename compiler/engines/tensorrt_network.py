"""Checks and changes of a graph, or of a TensorRT network, before an engine is built."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from outrider.plans.errors import PlanError
from outrider.plans.manifest import Engine
from outrider.plugins.onnx_ops import DOMAIN

_CARRIED = (ir.DataType.DOUBLE, ir.DataType.UINT64)
_MOVES = frozenset({"Concat", "Expand", "Gather", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"})


def carry_bits(name: str, model: ir.Model) -> None:
    """Declare float64 and uint64, which TensorRT lacks, as int64: the same bits in the same memory.

    Raises `PlanError` where an op that is not ours calculates with them.
    """
    values = list(model.graph.inputs)
    for node in model.graph:
        for value in node.inputs:
            if value is not None and value.dtype in _CARRIED and node.domain != DOMAIN and node.op_type not in _MOVES:
                raise PlanError(f"engine {name}: {node.op_type} calculates in {value.dtype}, which TensorRT lacks")
        values += node.outputs
    for value in values:
        if value.dtype in _CARRIED:
            value.type = ir.TensorType(ir.DataType.INT64)


def check_bindings(name: str, network: Any, engine: Engine) -> None:
    """Raise `PlanError` unless the network's inputs and outputs are the engine's, in name, type and shape."""
    for kind, count, get, tensors in (
        ("input", network.num_inputs, network.get_input, engine.inputs),
        ("output", network.num_outputs, network.get_output, engine.outputs),
    ):
        found = {tensor.name: tensor for tensor in (get(i) for i in range(count))}
        expected = {tensor.name: tensor for tensor in tensors}
        if set(found) != set(expected):
            raise PlanError(f"engine {name}: TensorRT has the {kind}s {sorted(found)}, the graph {sorted(expected)}")
        for key, tensor in expected.items():
            shape = tuple(d if isinstance(d, int) else -1 for d in tensor.shape)
            type_, got = tensor.dtype.value, found[key]
            if got.dtype.name != TYPES[type_] or not _agree(tuple(got.shape), shape):
                raise PlanError(
                    f"engine {name}: {kind} {key!r} is {type_} {shape} in the graph, {got.dtype.name} "
                    f"{tuple(got.shape)} in TensorRT"
                )


def check_cache_updates(trt: Any, name: str, network: Any, engine: Engine) -> None:
    """Raise `PlanError` unless every cache has one update in place, from its input to the output that aliases it."""
    updates = {}
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type == trt.LayerType.KV_CACHE_UPDATE:
            updates[layer.get_output(0).name] = layer.get_input(0).name
    if updates != engine.aliases:
        raise PlanError(f"engine {name}: TensorRT updates the caches {updates}, the graph {engine.aliases}")


TYPES = {
    "float32": "FLOAT", "float16": "HALF", "bfloat16": "BF16", "int32": "INT32", "int64": "INT64",
    "float64": "INT64", "uint64": "INT64",  # `carry_bits`
}  # fmt: skip


def _agree(found: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Return whether two shapes agree; -1 agrees with any size."""
    return len(found) == len(expected) and all(f == e or -1 in (f, e) for f, e in zip(found, expected, strict=True))


def allow_unfused_attention(trt: Any, network: Any) -> None:
    """Allow TensorRT to decompose attention for which no fused kernel exists (float32, scattered views)."""
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionInputLayer
            layer.attention.decomposable = True
