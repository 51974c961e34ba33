"""Nodes that stand for one attention node in standard ops, and values that all layers of a pass share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from outrider.compiler.lowering.rule import Lowering

SWAP = {"perm": [0, 2, 1, 3]}  # tokens and heads change places
LOWEST = {ir.DataType.FLOAT16: -65504.0, ir.DataType.BFLOAT16: -3.38e38}
"""Lowest bias of types with less range than float32 (float16), or coarser steps (bfloat16)."""


class Builder:
    """The nodes that replace one node, in order; constants and values that all layers of a pass share are made once."""

    def __init__(self, lowering: Lowering) -> None:
        self.lowering, self.nodes = lowering, list[ir.Node]()

    def emit(self, op: str, inputs: Sequence[ir.Value], attributes: Mapping[str, Any] | None = None) -> ir.Value:
        node = ir.node(op, inputs, attributes)
        self.nodes.append(node)
        return node.outputs[0]

    def numbers(self, name: str, *values: int) -> ir.Value:
        return self.lowering.constant(f"attention.{name}", ir.tensor(np.array(values, np.int64)))

    def number(self, name: str, value: int) -> ir.Value:
        return self.lowering.constant(f"attention.{name}", ir.tensor(np.array(value, np.int64)))

    def real(self, name: str, value: float) -> ir.Value:
        return self.lowering.constant(f"attention.{name}.{value!r}", ir.tensor(np.array(value, np.float32)))

    def split_heads(self, x: ir.Value, heads: int) -> ir.Value:
        """Reshape `[1, S, heads * head_dim]` to `[1, heads, S, head_dim]`."""
        split = self.emit("Reshape", [x, self.numbers(f"heads.{heads}", 0, 0, heads, -1)])
        return self.emit("Transpose", [split], SWAP)

    def first_slots(self, cache: ir.Value, view: ir.Value) -> ir.Value:
        return self.emit("Slice", [cache, self.numbers("first", 0), view, self.numbers("slot_axis", 2)])

    def view(self, bias: ir.Value, wanted: ir.DataType | None) -> tuple[ir.Value, ir.Value]:
        """Return a pass's bias in the model's type, and its number of keys `[1]`."""
        shared, key = self.lowering.shared, f"attention.{bias.name}."
        if key + "view" not in shared:
            shared[key + "view"] = self.emit("Shape", [bias], {"start": 3, "end": 4})
        if wanted not in LOWEST:
            return bias, shared[key + "view"]
        typed = f"{key}{wanted.name}"
        if typed not in shared:
            lowest = ir.tensor(np.array(LOWEST[wanted], np.float32))
            bounded = self.emit("Max", [bias, self.lowering.constant("attention.lowest", lowest)])
            shared[typed] = self.emit("Cast", [bounded], {"to": wanted})
        return shared[typed], shared[key + "view"]
