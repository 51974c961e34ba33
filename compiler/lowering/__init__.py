"""Making the exported graph an execution target's own."""

from __future__ import annotations

import onnx_ir as ir

from compiler.lowering.attention import CpuAttention, NormInside, PackedInside, RotateInside
from compiler.lowering.draft_ops import CpuDraftOps
from compiler.lowering.functions import FunctionBody
from compiler.lowering.gated_unit import FuseGatedUnit
from compiler.lowering.norms import FuseSkipNorms
from compiler.lowering.plugin_nodes import BodyOfDeclined, PluginNodes
from compiler.lowering.projections import FuseProjections
from compiler.lowering.rule import Lowering, Rule, apply_rules
from compiler.lowering.scatter_attention import ScatterAttention, UpdateOnceAttention
from plans import names
from plans.manifest import RuleReport

RULES: dict[str, tuple[Rule, ...]] = {
    "onnxruntime-cpu": (
        FuseProjections(),
        FuseGatedUnit(),
        FuseSkipNorms(),
        CpuAttention(),
        RotateInside(),
        NormInside(),
        PackedInside(),
        CpuDraftOps(),
        FunctionBody(),
    ),
    "onnxruntime-cuda": (ScatterAttention(), FunctionBody()),
    "tensorrt": (UpdateOnceAttention(), PluginNodes(), BodyOfDeclined()),
    "tensorrt-rtx": (UpdateOnceAttention(), FunctionBody()),
}


def lower(engine: str, model: ir.Model, target: str, rows: int) -> list[RuleReport]:
    """Lower `model` in place for `target` with `rows` rows in its arena."""
    lowering = Lowering(engine, model, rows)
    reports = apply_rules(lowering, RULES[target])
    _drop_unread(model.graph)
    if rows == 1:
        _fix_single_row(model)
    if target == "onnxruntime-cpu":
        model.opset_imports.setdefault("com.microsoft", 1)
    return reports


def _drop_unread(graph: ir.Graph) -> None:
    """Constants of what rules have replaced."""
    for name, value in list(graph.initializers.items()):
        if not value.uses() and value not in graph.outputs:
            del graph.initializers[name]


def _fix_single_row(model: ir.Model) -> None:
    """With one row, row dimensions are 1, its tokens are the step's, and unread inputs go."""
    known: dict[str, int | str] = {names.ROWS: 1, names.ROW_EDGES: 2, names.PLACES: names.NEW}
    for value in (*model.graph.inputs, *model.graph.outputs):
        assert value.shape is not None
        value.shape = ir.Shape([d if isinstance(d, int) else known.get(str(d), str(d)) for d in value.shape])
    for value in [v for v in model.graph.inputs if not v.uses() and v not in model.graph.outputs]:
        model.graph.inputs.remove(value)
