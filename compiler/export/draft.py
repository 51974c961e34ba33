"""Export a drafter's draft graph, with the inputs and outputs that a plan binds."""

from __future__ import annotations

import onnx_ir as ir
from torch import nn

from outrider.compiler.export.block_graph import BlockGraph
from outrider.compiler.export.draft_graph import DraftGraph, DraftModel, DraftOptions
from outrider.compiler.export.execution import cache_outputs
from outrider.compiler.export.level_graph import LevelGraph
from outrider.compiler.export.tracing import Shape, arguments, name_inputs, trace
from outrider.compiler.models.drafting import BlockDraft
from outrider.plans import names
from outrider.plans.manifest import Tree
from outrider.plans.sampling import SETTINGS


def export_draft(
    model: nn.Module, tree: Tree, capacity: int, vocab_size: int, options: DraftOptions | None = None
) -> ir.Model:
    """Export a `DraftModel` over a KV cache of `capacity` slots and one row, or several.

    `vocab_size` is the target's: a branch's noise is by its tokens.

    A head reads `features` of the target's last step; `feature_indices` picks the features of its tokens. Outputs, in
    the layout of the target's next step, the root (the tip) first: `tree_token_ids`, `tree_positions`, `tree_parent`
    `[nodes]`; `tree_score` f32 `[nodes]`, log-probabilities summed from the root, or of a block head's chain those of
    its confidence. Of chains that are drawn, `draft_probs` f32 `[nodes, vocab]` holds the distribution of each draw.

    `tree_slots` int64 `[nodes]` says where the levels put each node: value s is slot past_length + N + s of the KV
    cache. It is -1 for a node that no level ran, and for the root, which is the last of the N tokens fed. Only
    frontiers are run: a node with children has a slot, and slots ascend along a path.

    With several branches, trees grow from the tokens `tip_indices` int64 `[R, B]`, equally many in each row, with the
    noise and settings of `tip_branch` int64 `[R, B]`. Outputs hold one tree after another, `[D]` in all, but parents
    count within a tree, and `tree_slots` counts from the first slot after the row's tokens. A level takes B * k slots
    of each row.
    """
    options = options or DraftOptions()
    drafting: DraftModel = model  # type: ignore[assignment]
    heads = drafting.heads
    features = (options.featured or drafting.feature_size) if drafting.feature_size else 0
    several, branches = options.branches > 1, options.branches
    layers = range(heads.num_layers)
    row: int | str = names.ROWS if several else 1
    cache: Shape = (row, heads.num_kv_heads, capacity, heads.head_dim)
    grown: Shape = (names.GROWN if several else tree.nodes,)
    tips: dict[str, Shape] = dict.fromkeys((names.TIP_INDICES, names.TIP_BRANCH), (names.ROWS, names.TIPS))
    graph_inputs: dict[str, Shape] = {
        **({names.FEATURES: (names.FEATURED, features), names.FEATURE_INDICES: (names.NEW,)} if features else {}),
        names.TOKEN_IDS: (names.NEW,),
        names.POSITIONS: (names.NEW,),
        names.ROW_SPLITS: (names.ROW_EDGES if several else 2,),
        names.ATTN_BIAS: (row, 1, names.PLACES if several else names.NEW, names.VIEW),
        names.PAST_LENGTH: (row,),
        **(tips if several else {}),
        names.NOISE: (branches, tree.depth + 1, vocab_size),
        names.DRAFT_SAMPLING: (branches, SETTINGS),
        **{names.k_cache(i): cache for i in layers},
        **{names.v_cache(i): cache for i in layers},
    }
    positions = options.positions or capacity
    graph: DraftGraph
    if isinstance(model, BlockDraft):
        graph, passes = BlockGraph(model, tree, positions, options), 2
    else:
        graph, passes = LevelGraph(model, tree, positions, options), 1 + tree.depth
    # The settings of several branches become symbols of the trace: as examples they are of another number.
    settings: dict[str, Shape] = {
        names.NOISE: ("all", tree.depth + 1, vocab_size),
        names.DRAFT_SAMPLING: ("all", SETTINGS),
    }
    sizes = {names.FEATURED: 5, names.NEW: 4, names.VIEW: 8 + several, names.PLACES: 2, "all": 11}
    sizes |= {names.ROWS: 2, names.ROW_EDGES: 3, names.TIPS: 3}
    traced = trace(
        graph,
        *arguments(graph_inputs | (settings if several else {}), sizes, drafting.dtype),
        outputs={
            **dict.fromkeys(names.TREE, grown),
            **({names.TREE_SLOTS: grown} if options.slots else {}),
            **({names.DRAFT_PROBS: (*grown, vocab_size)} if options.rejected else {}),
            **dict.fromkeys(cache_outputs(heads.num_layers, passes), cache),
        },
    )
    name_inputs(traced, graph_inputs)
    return traced
