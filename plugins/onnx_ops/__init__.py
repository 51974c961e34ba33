"""Our graph ops for ONNX: a schema, and a function body in standard ops that any ONNX tool can run.

Only the compiler imports this package, which needs `onnx`. The import registers the schemas with `onnx.defs`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import onnx
from onnx import defs, parser

from outrider.plans import names
from outrider.plugins.onnx_ops.branch_attention import branch_attention_function
from outrider.plugins.onnx_ops.domain import DOMAIN, OPSET, VERSION, onnx_schema
from outrider.plugins.onnx_ops.draft_sample import DRAFT_SAMPLE
from outrider.plugins.onnx_ops.layers import LAYER_BODIES, LAYER_OPS
from outrider.plugins.onnx_ops.mixture_of_experts import experts_function, experts_op
from outrider.plugins.onnx_ops.quant_matmul import quant_function, quant_op
from outrider.plugins.onnx_ops.route import route_function
from outrider.plugins.onnx_ops.tree_expand import TREE_EXPAND
from outrider.plugins.onnx_ops.tree_rerank import TREE_RERANK
from outrider.plugins.onnx_ops.window_bias import WINDOW_BIAS
from outrider.plugins.ops import OPS
from outrider.plugins.schema import ANY_FLOAT, EXPERT_OPS, QUANT_OPS, TensorSpec

__all__ = ["DOMAIN", "FUNCTIONS", "OPSET", "VERSION"]

FUNCTIONS: dict[str, Callable[[], onnx.FunctionProto]] = {
    "BranchAttention": branch_attention_function,
    "Route": partial(route_function, biased=False),
    "BiasedRoute": partial(route_function, biased=True),
    **{
        name: cache(partial(parser.parse_function, text))
        for name, text in (
            ("DraftSample", DRAFT_SAMPLE),
            ("TreeExpand", TREE_EXPAND),
            ("TreeRerank", TREE_RERANK),
            ("WindowBias", WINDOW_BIAS),
            *LAYER_BODIES.items(),
        )
    },
    **{name: partial(quant_function, name) for name in QUANT_OPS},
    **{name: partial(experts_function, name) for name in EXPERT_OPS},
}
"""The body of each op, by the op's name."""

_ATTENTION = replace(  # whose bias may be of any precision
    OPS["BranchAttention"].schema,
    inputs=tuple(
        replace(spec, dtype="bfloat16 | float16 | float32") if spec.name == names.ATTN_BIAS else spec
        for spec in OPS["BranchAttention"].schema.inputs
    ),
)
_OPTIONAL = ("sinks", "bias", names.POSITIONS, "cos", "sin", "q_norm", "k_norm", "queries")
_BIASED_ROUTE = replace(
    OPS["Route"].schema,
    name="BiasedRoute",
    inputs=(*OPS["Route"].schema.inputs, TensorSpec("bias", ANY_FLOAT, ("experts",))),
)

for _schema in (
    _ATTENTION,
    _BIASED_ROUTE,
    *(OPS[name].schema for name in ("DraftSample", "TreeExpand", "TreeRerank", "Route", "WindowBias", "PathConv")),
    *map(quant_op, QUANT_OPS),
    *map(experts_op, EXPERT_OPS),
    *LAYER_OPS,
):
    if not defs.has(_schema.name, DOMAIN):
        defs.register_schema(onnx_schema(_schema, optional=_OPTIONAL))
