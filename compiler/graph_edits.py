"""Edits of a graph that keep it whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import onnx_ir as ir


def attributes_of(node: ir.Node) -> dict[str, Any]:
    return {name: attribute.value for name, attribute in node.attributes.items()}


def given(values: Iterable[ir.Value | None]) -> list[ir.Value]:
    """Return values that are all there."""
    found = list(values)
    assert None not in found
    return found  # type: ignore[return-value]


def replace(graph: ir.Graph, node: ir.Node, new: Sequence[ir.Value | None]) -> None:
    """Replace the outputs of `node`, graph outputs included, by `new`, and remove the node.

    A value of None drops an output that only the graph's outputs hold.
    """
    for old, value in zip(node.outputs, new, strict=True):
        if value is None:
            graph.outputs.remove(old)
            continue
        value.type = value.type or old.type
        for index, output in enumerate(graph.outputs):
            if output is old:
                value.name, value.shape = old.name, old.shape
                old.name = None
                graph.outputs[index] = value
        ir.convenience.replace_all_uses_with(old, value)
    graph.remove(node, safe=True)


def drop_unread(graph: ir.Graph, values: Sequence[ir.Value | None]) -> None:
    """Drop the initializers among `values` that no node reads any more."""
    for value in values:
        if value is not None and value.const_value is not None and not value.uses():
            graph.initializers.pop(value.name or "", None)
