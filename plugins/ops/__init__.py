"""The ops: a module for each, with its schema, its rule in NumPy, and how backends run it."""

from __future__ import annotations

from outrider.plugins.ops import (
    bim_mask,
    block_select,
    block_summary,
    branch_attention,
    chain_accept,
    draft_sample,
    kv_gather,
    mixture_of_experts,
    partial_kv_gather,
    path_conv,
    race_noise,
    route,
    sample,
    tree_accept,
    tree_expand,
    tree_rerank,
    window_bias,
)
from outrider.plugins.ops.op import Op

OPS: dict[str, Op] = {
    op.schema.name: op
    for op in (
        bim_mask.OP,
        sample.OP,
        tree_accept.OP,
        chain_accept.OP,
        race_noise.OP,
        kv_gather.OP,
        block_summary.OP,
        block_select.OP,
        partial_kv_gather.OP,
        branch_attention.OP,
        path_conv.OP,
        route.OP,
        mixture_of_experts.OP,
        window_bias.OP,
        draft_sample.OP,
        tree_expand.OP,
        tree_rerank.OP,
    )
}
"""Every op by name."""
