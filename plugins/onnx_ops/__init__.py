"""Our graph ops for ONNX: a schema, and a function body in standard ops that any ONNX tool can run.

Only the compiler imports this package, which needs `onnx`. The import registers the schemas with `onnx.defs`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import onnx
from onnx import defs

from outrider.plans import names
from outrider.plugins.onnx_ops.branch_attention import branch_attention_function
from outrider.plugins.onnx_ops.domain import DOMAIN, OPSET, VERSION, onnx_schema
from outrider.plugins.onnx_ops.draft_sample import draft_sample_function
from outrider.plugins.onnx_ops.mixture_of_experts import experts_function, experts_op
from outrider.plugins.onnx_ops.quant_matmul import quant_function, quant_op
from outrider.plugins.onnx_ops.route import route_function
from outrider.plugins.onnx_ops.tree_expand import tree_expand_function
from outrider.plugins.onnx_ops.tree_rerank import tree_rerank_function
from outrider.plugins.onnx_ops.window_bias import window_bias_function
from outrider.plugins.schema import ANY_FLOAT, EXPERT_OPS, QUANT_OPS, TensorSpec
from outrider.plugins.schemas import SCHEMAS

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

_ATTENTION = replace(  # whose bias may be of any precision
    SCHEMAS["BranchAttention"],
    inputs=tuple(
        replace(spec, dtype="bfloat16 | float16 | float32") if spec.name == names.ATTN_BIAS else spec
        for spec in SCHEMAS["BranchAttention"].inputs
    ),
)
_BIASED_ROUTE = replace(
    SCHEMAS["Route"],
    name="BiasedRoute",
    inputs=(*SCHEMAS["Route"].inputs, TensorSpec("bias", ANY_FLOAT, ("experts",))),
)

for _schema in (
    _ATTENTION,
    _BIASED_ROUTE,
    *(SCHEMAS[name] for name in ("DraftSample", "TreeExpand", "TreeRerank", "Route", "WindowBias")),
    *map(quant_op, QUANT_OPS),
    *map(experts_op, EXPERT_OPS),
):
    if not defs.has(_schema.name, DOMAIN):
        defs.register_schema(onnx_schema(_schema, optional="sinks"))
