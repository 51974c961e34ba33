"""The draft graph of DESIGN sections 4 and 7: one pass over what is new, then the levels of a tree, in ONE graph.

The tree's shape is static. Each level runs the frontier's nodes behind the rows that are there: a node sees what the
tip sees, its ancestors in the tree, and itself. What a level appends is dropped afterwards by length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import onnx_ir as ir
import torch
from torch import Tensor, nn

from compiler.export.execution import Arena, GraphExecution, Heads, RopeTables, cache_outputs
from compiler.export.ops import tree_expand, tree_rerank
from compiler.export.tracing import Shape, name_inputs, trace
from compiler.models.decoder import Execution
from plans import names
from plans.manifest import Tree


# How often a drafter's choice at the target's draw is the target's: what scores that child of a sampling branch.
COUPLING = 0.75


class DraftModel(Protocol):
    """A model that drafts: an EAGLE3 head, or a small decoder. Tensors have a leading dimension of 1."""

    @property
    def heads(self) -> Heads: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def feature_size(self) -> int:
        """Width of the target's features that it reads; 0 for none."""
        ...

    @property
    def lead(self) -> int:
        """How far a token's position in the target lies before its position here: 1 for a head, which pairs a
        feature with the token after it."""
        ...

    @property
    def vocabulary(self) -> Tensor | None:
        """Target token of each draft token, int64 `[Vd]`, ascending; None where they are the same."""
        ...

    def fuse(self, features: Tensor) -> Tensor: ...

    def run(self, token_ids: Tensor, hidden: Tensor | None, execution: Execution) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class DraftGraph(nn.Module):
    """Committed tokens that the drafter lacks, to the tree behind the last of them, the tip."""

    diagonal: Tensor
    visible: Tensor
    parent_of: Tensor
    splits: Tensor
    depths: Tensor

    def __init__(self, model: nn.Module, tree: Tree, positions: int) -> None:
        super().__init__()
        self.model, self.tree = model, tree
        drafting: DraftModel = model  # type: ignore[assignment]
        self.tables = RopeTables(drafting.heads, positions, drafting.dtype)
        k = tree.top_k
        for name, table in {
            "diagonal": torch.arange(k).unsqueeze(1),  # the own slot of each frontier node, as an offset
            "visible": torch.zeros(k, 1),
            "parent_of": torch.arange(k * k) // k,  # frontier node of each of its level's candidates
            "splits": torch.tensor([0, k]),
            "depths": torch.cat([torch.ones(k), *(torch.full((k * k,), 2 + i) for i in range(tree.depth))]).long(),
        }.items():
            self.register_buffer(name, table)

    def forward(
        self,
        features: Tensor | None,
        feature_rows: Tensor | None,
        token_ids: Tensor,
        positions: Tensor,
        attn_bias: Tensor,
        past_length: Tensor,
        draws: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        k_caches: Sequence[Tensor],
        v_caches: Sequence[Tensor],
    ) -> tuple[Tensor, ...]:
        tree, k = self.tree, self.tree.top_k
        model: DraftModel = self.model  # type: ignore[assignment]
        arena = Arena(k_caches, v_caches)
        new = token_ids.shape[0]
        fused = None
        if features is not None and feature_rows is not None:
            fused = model.fuse(torch.index_select(features, 0, feature_rows).unsqueeze(0))
        execution = self._pass(arena, positions.unsqueeze(0), attn_bias, past_length, self.splits)
        hidden = model.run(token_ids.unsqueeze(0), fused, execution)[:, -1:]
        tip_position = positions[-1:]
        bias = attn_bias[0, 0, -1:].expand(k, -1)  # what the tip sees: all levels start from it
        start = past_length + new

        def expand(hidden: Tensor, score: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor]:
            draw = draws[:, depth]
            grown: tuple[Tensor, Tensor, Tensor] = tree_expand(
                model.logits(hidden).float(), score, draw, temperature, top_k, top_p, k, COUPLING
            )
            return grown

        token, score, _ = expand(hidden, torch.zeros(1, 1), 0)
        tokens, scores = [token], [score]
        parents = [torch.full((1, k), -1)]
        node_token, node_score, node = token, score, torch.arange(k)  # the frontier: its nodes as candidates
        hidden = hidden.expand(-1, k, -1)
        for level in range(tree.depth):
            slots = start + (level * k)
            bias = bias.scatter(1, slots + self.diagonal, self.visible)
            execution = self._pass(
                arena, (tip_position + (level + 1)).expand(k).unsqueeze(0), bias.unsqueeze(0).unsqueeze(0), slots,
                self.splits,
            )  # fmt: skip
            hidden = model.run(self._target_ids(node_token), hidden, execution)
            token, score, frontier = expand(hidden, node_score, level + 1)
            tokens.append(token)
            scores.append(score)
            parents.append(torch.index_select(node, 0, self.parent_of).unsqueeze(0))
            if level + 1 < tree.depth:
                picked = frontier.squeeze(0)
                node_token = torch.index_select(token, 1, picked)
                node_score = torch.index_select(score, 1, picked)
                parent = torch.index_select(self.parent_of, 0, picked)
                hidden = torch.index_select(hidden, 1, parent)
                bias = torch.index_select(bias, 0, parent)
                node = picked + (k + level * k * k)

        token, parent, depth, score = tree_rerank(
            torch.cat(tokens, 1), torch.cat(scores, 1), torch.cat(parents, 1), self.depths, tree.nodes
        )
        root = token_ids[-1:]
        root_position = tip_position + model.lead
        return (
            torch.cat([root, self._target_ids(token).squeeze(0)]),
            torch.cat([root_position, depth.squeeze(0) + root_position]),
            torch.cat([torch.full((1,), -1), parent.squeeze(0)]),
            torch.cat([torch.zeros(1), score.squeeze(0)]),
            *arena.presents,
        )

    def _pass(self, arena: Arena, positions: Tensor, bias: Tensor, past: Tensor, splits: Tensor) -> GraphExecution:
        model: DraftModel = self.model  # type: ignore[assignment]
        return GraphExecution(model.heads, self.tables, arena, positions, bias, past, splits)

    def _target_ids(self, token: Tensor) -> Tensor:
        """Draft tokens `[1, n]` as target tokens."""
        vocabulary: Tensor | None = self.model.vocabulary  # type: ignore[assignment]
        return token if vocabulary is None else torch.index_select(vocabulary, 0, token.reshape(-1)).unsqueeze(0)


def export_draft(model: nn.Module, tree: Tree, capacity: int) -> ir.Model:
    """Export a `DraftModel` over an arena of `capacity` slots, one row.

    A head reads `features` of the target's last step; `feature_rows` picks those of the pairs. Outputs:
    `tree_token_ids`, `tree_positions`, `tree_parent` `[nodes]`, the root, which is the tip, first, as the target's
    next step wants them; `tree_score` f32 `[nodes]`, log-probabilities summed from the root.
    """
    drafting: DraftModel = model  # type: ignore[assignment]
    heads, features = drafting.heads, drafting.feature_size
    new, view, index = 3, 8, torch.int64
    cache: Shape = (1, heads.num_kv_heads, capacity, heads.head_dim)
    layers = range(heads.num_layers)

    def caches() -> list[Tensor]:
        return [torch.empty(cache, dtype=drafting.dtype) for _ in layers]  # type: ignore[arg-type]

    free = torch.export.Dim.DYNAMIC
    fixed: list[None] = [None for _ in layers]
    graph_inputs: dict[str, Shape] = {
        **({names.FEATURES: (names.FEATURED, features), names.FEATURE_ROWS: (names.NEW,)} if features else {}),
        names.TOKEN_IDS: (names.NEW,),
        names.POSITIONS: (names.NEW,),
        names.ATTN_BIAS: (1, 1, names.NEW, names.VIEW),
        names.PAST_LENGTH: (1,),
        names.DRAWS: (1, tree.depth + 1),
        names.TEMPERATURE: (1,),
        names.TOP_K: (1,),
        names.TOP_P: (1,),
        **{names.k_cache(i): cache for i in layers},
        **{names.v_cache(i): cache for i in layers},
    }
    traced = trace(
        DraftGraph(model, tree, capacity),
        inputs={
            "features": torch.zeros(5, features) if features else None,
            "feature_rows": torch.zeros(new, dtype=index) if features else None,
            "token_ids": torch.zeros(new, dtype=index),
            "positions": torch.zeros(new, dtype=index),
            "attn_bias": torch.zeros(1, 1, new, view),
            "past_length": torch.zeros(1, dtype=index),
            "draws": torch.zeros(1, tree.depth + 1),
            "temperature": torch.zeros(1, dtype=torch.float64),
            "top_k": torch.zeros(1, dtype=index),
            "top_p": torch.zeros(1, dtype=torch.float64),
            "k_caches": caches(),
            "v_caches": caches(),
        },
        dynamic={
            "features": {0: free} if features else None,
            "feature_rows": {0: free} if features else None,
            "token_ids": {0: free},
            "positions": {0: free},
            "attn_bias": {2: free, 3: free},
            **dict.fromkeys(("past_length", "draws", "temperature", "top_k", "top_p")),
            "k_caches": fixed,
            "v_caches": fixed,
        },
        outputs={
            **dict.fromkeys(names.TREE, (tree.nodes,)),
            **dict.fromkeys(cache_outputs(heads.num_layers, 1 + tree.depth), cache),
        },
    )
    name_inputs(traced, graph_inputs)
    return traced
