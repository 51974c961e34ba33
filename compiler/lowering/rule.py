"""Rewrite rules: one class per rule, with a pattern, a check that declines with a reason, and a rewrite."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from outrider.compiler.graph_edits import drop_unread, replace
from outrider.plans.manifest import RuleReport

CONTRIBUTED = "com.microsoft"
"""The domain of ONNX Runtime's own operators."""


@dataclass
class Lowering:
    """One engine's graph while it is lowered to one backend. Rules share values through `shared`."""

    engine: str
    model: ir.Model
    rows: int
    shared: dict[str, ir.Value] = field(default_factory=dict)

    @property
    def graph(self) -> ir.Graph:
        return self.model.graph

    def constant(self, name: str, tensor: ir.TensorProtocol) -> ir.Value:
        """Return an initializer, made once per name. Raises `ValueError` for another tensor of the same name."""
        if name not in self.shared:
            return self._share(name, tensor)
        made = self.shared[name].const_value
        if made is None or not np.array_equal(made.numpy(), tensor.numpy()):
            raise ValueError(f"the lowered graph has two constants named {name!r}")
        return self.shared[name]

    def deferred(self, name: str, tensor: ir.LazyTensor) -> ir.Value:
        """Return an initializer that is read when the graph is written, made once per name, which must say of what.

        Raises `ValueError` for one of the same name that has another type or shape.
        """
        if name not in self.shared:
            return self._share(name, tensor)
        made = self.shared[name]
        if (made.dtype, made.shape) != (tensor.dtype, tensor.shape):
            raise ValueError(f"the lowered graph has two constants named {name!r}")
        return made

    def put(self, node: ir.Node, new: ir.Node) -> None:
        """Put `new` in the place of `node`, and drop constants that no node reads any more."""
        old = list(node.inputs)
        self.graph.insert_before(node, [new])
        replace(self.graph, node, list(new.outputs[: len(node.outputs)]))
        drop_unread(self.graph, old)
        self.model.opset_imports.setdefault(new.domain, 1)

    def _share(self, name: str, tensor: ir.TensorProtocol) -> ir.Value:
        value = ir.Value(
            name=name, shape=ir.Shape(tensor.shape.numpy()), type=ir.TensorType(tensor.dtype), const_value=tensor
        )
        self.graph.register_initializer(value)
        self.shared[name] = value
        return value


class Rule(ABC):
    """A rewrite rule. Its class name appears in `compiler inspect`; its docstring says why the rule exists."""

    @abstractmethod
    def pattern(self, node: ir.Node) -> bool:
        """Return whether this rule concerns `node` at all."""

    def check(self, node: ir.Node, lowering: Lowering) -> str | None:
        """Return None to rewrite `node`, or the reason to decline."""
        return None

    @abstractmethod
    def rewrite(self, node: ir.Node, lowering: Lowering) -> None:
        """Replace `node` in the graph."""


def apply_rules(lowering: Lowering, rules: Sequence[Rule]) -> list[RuleReport]:
    """Offer every node to every rule in turn, and report each rule's rewrites and reasons to decline."""
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
