"""Our graph ops for ONNX: a schema, and a function body in standard ops that any ONNX tool can run.

Only the compiler imports this package, which needs `onnx`. The import registers the schemas with `onnx.defs`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import onnx
from onnx import defs

from outrider.plugins.onnx_ops.branch_attention import branch_attention_function, branch_attention_schema
from outrider.plugins.onnx_ops.domain import DOMAIN, OPSET, VERSION
from outrider.plugins.onnx_ops.draft_sample import draft_sample_function, draft_sample_schema
from outrider.plugins.onnx_ops.mixture_of_experts import experts_function, experts_schema
from outrider.plugins.onnx_ops.quant_matmul import quant_function, quant_schema
from outrider.plugins.onnx_ops.route import route_function, route_schema
from outrider.plugins.onnx_ops.tree_expand import tree_expand_function, tree_expand_schema
from outrider.plugins.onnx_ops.tree_rerank import tree_rerank_function, tree_rerank_schema
from outrider.plugins.onnx_ops.window_bias import window_bias_function, window_bias_schema
from outrider.plugins.schema import EXPERT_OPS, QUANT_OPS

__all__ = ["DOMAIN", "FUNCTIONS", "OPSET", "VERSION"]

FUNCTIONS: dict[str, Callable[[], onnx.FunctionProto]] = {
    "BranchAttention": branch_attention_function,
    "Route": partial(route_function, biased=False),
    "BiasedRoute": partial(route_function, biased=True),
    "DraftSample": draft_sample_function,
    "TreeExpand": tree_expand_function,
    "TreeRerank": tree_rerank_function,
    "WindowBias": window_bias_function,
    **{name: partial(quant_function, name) for name in QUANT_OPS},
    **{name: partial(experts_function, name) for name in EXPERT_OPS},
}
"""The body of each op, by the op's name."""

for _schema in (
    branch_attention_schema(),
    draft_sample_schema(),
    tree_expand_schema(),
    tree_rerank_schema(),
    route_schema(biased=False),
    route_schema(biased=True),
    window_bias_schema(),
    *map(quant_schema, QUANT_OPS),
    *map(experts_schema, EXPERT_OPS),
):
    if not defs.has(_schema.name, DOMAIN):
        defs.register_schema(_schema)
