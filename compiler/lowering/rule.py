"""Rewrite rules: one class each, with a pattern, a check that declines with a reason, and a rewrite."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from plans.manifest import RuleReport


@dataclass
class Lowering:
    """One engine's graph on its way to one backend. Rules share values through `shared`."""

    engine: str
    model: ir.Model
    rows: int
    shared: dict[str, ir.Value] = field(default_factory=dict)

    @property
    def graph(self) -> ir.Graph:
        return self.model.graph

    def constant(self, name: str, tensor: ir.TensorProtocol) -> ir.Value:
        """An initializer of the graph, made once per name. Raises `ValueError` for another tensor of that name."""
        if name not in self.shared:
            value = ir.Value(
                name=name, shape=ir.Shape(tensor.numpy().shape), type=ir.TensorType(tensor.dtype), const_value=tensor
            )
            self.graph.register_initializer(value)
            self.shared[name] = value
        made = self.shared[name].const_value
        if made is None or not np.array_equal(made.numpy(), tensor.numpy()):
            raise ValueError(f"the lowered graph has two constants named {name!r}")
        return self.shared[name]


class Rule(ABC):
    """Names of subclasses appear in `compiler inspect`; their docstring says why the rule exists."""

    @abstractmethod
    def pattern(self, node: ir.Node) -> bool:
        """Whether this rule is about `node` at all."""

    def check(self, node: ir.Node, lowering: Lowering) -> str | None:
        """None to rewrite, or the reason why not."""
        return None

    @abstractmethod
    def rewrite(self, node: ir.Node, lowering: Lowering) -> None:
        """Replace `node` in the graph."""


def apply_rules(lowering: Lowering, rules: Sequence[Rule]) -> list[RuleReport]:
    """Offer every node to every rule in turn, and report what each one did."""
    reports = []
    for rule in rules:
        applied, declined = 0, Counter[str]()
        for node in [n for n in lowering.graph if rule.pattern(n)]:
            reason = rule.check(node, lowering)
            if reason is None:
                rule.rewrite(node, lowering)
                applied += 1
            else:
                declined[reason] += 1
        reports.append(
            RuleReport(engine=lowering.engine, rule=type(rule).__name__, applied=applied, declined=dict(declined))
        )
    return reports


def replace(graph: ir.Graph, node: ir.Node, new: Sequence[ir.Value | None]) -> None:
    """Let `new` stand for the outputs of `node`, graph outputs included, and remove the node.

    None drops an output that nothing but the graph's own outputs reads.
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
