"""The draft graph of DESIGN sections 4 and 7: one pass over what is new, then the levels of a tree, in ONE graph.

The tree's shape is static. Each level runs the frontier's nodes behind the rows that are there: a node sees what the
tip sees, its ancestors in the tree, and itself. What a level appends is dropped afterwards by length, but for the
accepted nodes of a draft model, whose rows are those that feeding their tokens would give.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import Protocol

import onnx_ir as ir
import torch
from torch import Tensor, nn

from compiler.export.execution import Arena, GraphExecution, Heads, RopeTables, cache_outputs
from compiler.export.ops import draft_sample, tree_expand, tree_rerank
from compiler.export.tracing import Shape, name_inputs, trace
from compiler.models.decoder import Execution
from plans import names
from plans.manifest import Tree

# How far a drafter's CDF may be from the target's where that draws, and how often the draw tells nothing. Measured on
# the reference drafters (`python -m tools.proposals`), and on mixtures with the target's distribution that overlap by
# up to 0.98, where the likeliest tokens are a good deal worse: never far from the best of a grid.
SPREAD, DOUBT = 0.15, 0.3


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


@dataclass(frozen=True)
class _Behind:
    """What the levels share: where they append, the tip's position and bias `[1, T]`, and what they draw by."""

    arena: Arena
    start: Tensor
    position: Tensor
    bias: Tensor
    draws: Tensor
    filters: tuple[Tensor, Tensor, Tensor]


class DraftGraph(nn.Module):
    """Committed tokens that the drafter lacks, to the tree behind the last of them, the tip."""

    diagonal: Tensor
    visible: Tensor
    parent_of: Tensor
    splits: Tensor
    depths: Tensor

    def __init__(self, model: nn.Module, tree: Tree, positions: int, rejected: int, entropy: bool, rows: bool) -> None:
        super().__init__()
        self.model, self.tree, self.rejected, self.entropy, self.rows = model, tree, rejected, entropy, rows
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
        model: DraftModel = self.model  # type: ignore[assignment]
        arena = Arena(k_caches, v_caches)
        fused = None
        if features is not None and feature_rows is not None:
            fused = model.fuse(torch.index_select(features, 0, feature_rows).unsqueeze(0))
        execution = self._pass(arena, positions.unsqueeze(0), attn_bias, past_length)
        hidden = model.run(token_ids.unsqueeze(0), fused, execution)[:, -1].unsqueeze(1)
        tip, tip_position = token_ids[-1].unsqueeze(0), positions[-1].unsqueeze(0)  # not [-1:], whose size is no number
        behind = _Behind(
            arena,
            start=past_length + token_ids.shape[0],
            position=tip_position,
            bias=attn_bias[0, 0, -1].unsqueeze(0),
            draws=draws,
            filters=(temperature, top_k, top_p),
        )
        logits = model.logits(hidden).float()
        drafted = self._chain(hidden, logits, behind) if self.rejected else self._tree(hidden, logits, behind)
        token, parent, depth, score, *others = drafted
        if self.entropy:
            others.append(_normalised_entropy(logits))
        root_position = tip_position + model.lead
        return (
            torch.cat([tip, token]),
            torch.cat([root_position, depth + root_position]),
            torch.cat([torch.full((1,), -1), parent]),
            torch.cat([torch.zeros(1), score]),
            *others,
            *arena.presents,
        )

    def _tree(self, hidden: Tensor, logits: Tensor, behind: _Behind) -> list[Tensor]:
        """Tokens, parents, depths and scores `[nodes - 1]` behind the tip, whose hidden state is `[1, 1, H]`.

        `logits` `[1, 1, V]` are the tip's. Where `rows` asks for it: the arena's row of each node, `[nodes]`.
        """
        tree, k = self.tree, self.tree.top_k
        model: DraftModel = self.model  # type: ignore[assignment]

        def expand(logits: Tensor, score: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor]:
            grown: tuple[Tensor, Tensor, Tensor] = tree_expand(
                logits, score, behind.draws[:, depth], *behind.filters, k, SPREAD, DOUBT
            )
            return grown

        token, score, _ = expand(logits, torch.zeros(1, 1), 0)
        tokens, scores = [token], [score]
        parents = [torch.full((1, k), -1)]
        node_token, node_score, node = token, score, torch.arange(k)  # the frontier: its nodes as candidates
        hidden = hidden.expand(-1, k, -1)
        bias = behind.bias.expand(k, -1)
        expanded: list[Tensor] = []  # every frontier: candidates in the order of the rows that they are given
        for level in range(tree.depth):
            expanded.append(node)
            hidden, bias = self._level(node_token, hidden, bias, level, behind)
            token, score, frontier = expand(model.logits(hidden).float(), node_score, level + 1)
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
        candidate, token, parent, depth, score = tree_rerank(
            torch.cat(tokens, 1), torch.cat(scores, 1), torch.cat(parents, 1), self.depths, tree.nodes
        )
        drafted = [self._target_ids(token).squeeze(0), parent.squeeze(0), depth.squeeze(0), score.squeeze(0)]
        if self.rows:
            row_of = torch.full((tree.candidates,), -1).scatter(0, torch.cat(expanded), torch.arange(tree.depth * k))
            drafted.append(torch.cat([torch.full((1,), -1), torch.index_select(row_of, 0, candidate.squeeze(0))]))
        return drafted

    def _chain(self, hidden: Tensor, logits: Tensor, behind: _Behind) -> list[Tensor]:
        """The same of a chain that is drawn, and what each node was drawn from, f32 `[nodes, vocab]`, the root's 0."""
        tree, size = self.tree, self.rejected
        model: DraftModel = self.model  # type: ignore[assignment]
        bias = behind.bias
        tokens: list[Tensor] = []
        probabilities = [torch.zeros(1, 1, size)]
        for depth in range(tree.nodes - 1):
            if depth:
                hidden, bias = self._level(tokens[-1], hidden, bias, depth - 1, behind)
                logits = model.logits(hidden).float()
            token, probability = draft_sample(logits, behind.draws[:, depth], *behind.filters)
            tokens.append(token)
            if model.vocabulary is not None:
                columns = model.vocabulary.reshape(1, 1, -1)
                probability = torch.zeros(1, 1, size).scatter(2, columns, probability)
            probabilities.append(probability)
        drawn = torch.cat(tokens, 1)
        steps = torch.arange(tree.nodes - 1)
        distributions = torch.cat(probabilities, 1).squeeze(0)
        target_ids = self._target_ids(drawn)
        own = torch.gather(distributions[1:], 1, target_ids.reshape(-1, 1)).reshape(-1)
        return [target_ids.squeeze(0), steps, steps + 1, torch.cumsum(torch.log(own), 0), distributions]

    def _level(self, token: Tensor, hidden: Tensor, bias: Tensor, level: int, behind: _Behind) -> tuple[Tensor, Tensor]:
        """Run the frontier's nodes `[1, k]`; their hidden states, and what they see, `[k, T]`, themselves included."""
        model: DraftModel = self.model  # type: ignore[assignment]
        k = self.tree.top_k
        slots = behind.start + (level * k)
        bias = bias.scatter(1, slots + self.diagonal, self.visible)
        positions = (behind.position + (level + 1)).expand(k).unsqueeze(0)
        execution = self._pass(behind.arena, positions, bias.unsqueeze(0).unsqueeze(0), slots)
        return model.run(self._target_ids(token), hidden, execution), bias

    def _pass(self, arena: Arena, positions: Tensor, bias: Tensor, past: Tensor) -> GraphExecution:
        model: DraftModel = self.model  # type: ignore[assignment]
        return GraphExecution(model.heads, self.tables, arena, positions, bias, past, self.splits)

    def _target_ids(self, token: Tensor) -> Tensor:
        """Draft tokens `[1, n]` as target tokens."""
        vocabulary: Tensor | None = self.model.vocabulary  # type: ignore[assignment]
        return token if vocabulary is None else torch.index_select(vocabulary, 0, token.reshape(-1)).unsqueeze(0)


def _normalised_entropy(logits: Tensor) -> Tensor:
    """`[1, 1, V]` to `[1]`: the entropy of their distribution over that of the uniform one, ln V."""
    log_p = logits.log_softmax(dim=-1)
    return -(log_p.exp() * log_p).sum(dim=-1).reshape(1) / log(logits.shape[-1])


def export_draft(
    model: nn.Module, tree: Tree, capacity: int, rejected: int = 0, *, entropy: bool = False, rows: bool = False
) -> ir.Model:
    """Export a `DraftModel` over an arena of `capacity` slots, one row.

    A head reads `features` of the target's last step; `feature_rows` picks those of the pairs. Outputs:
    `tree_token_ids`, `tree_positions`, `tree_parent` `[nodes]`, the root, which is the tip, first, as the target's
    next step wants them; `tree_score` f32 `[nodes]`, log-probabilities summed from the root.

    With `rejected`, the target's vocabulary, the tree is a chain (`top_k` 1) whose tokens are drawn, for acceptance by
    rejection, and `draft_probs` f32 `[nodes, vocab]` holds what from. With `entropy`, `draft_entropy` f32 `[1]` is
    that of the distribution at the tip, over ln V.

    With `rows`, of a tree with levels, `tree_row` int64 `[nodes]` says where the levels have put each node: at slot
    past_length + N + row of the arena. It is -1 for a node that none has run, and for the root, which is the last of
    the N tokens fed. Frontiers alone are run: whatever has a child has a row, and rows ascend along a path.
    """
    drafting: DraftModel = model  # type: ignore[assignment]
    heads, features = drafting.heads, drafting.feature_size
    new, view, index = 3, 8, torch.int64
    settings = torch.float64 if rejected else torch.float32
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
        names.TEMPERATURE if rejected else names.DRAFT_TEMPERATURE: (1,),
        names.TOP_K: (1,),
        names.TOP_P if rejected else names.DRAFT_TOP_P: (1,),
        **{names.k_cache(i): cache for i in layers},
        **{names.v_cache(i): cache for i in layers},
    }
    traced = trace(
        DraftGraph(model, tree, capacity, rejected, entropy, rows),
        inputs={
            "features": torch.zeros(5, features) if features else None,
            "feature_rows": torch.zeros(new, dtype=index) if features else None,
            "token_ids": torch.zeros(new, dtype=index),
            "positions": torch.zeros(new, dtype=index),
            "attn_bias": torch.zeros(1, 1, new, view),
            "past_length": torch.zeros(1, dtype=index),
            "draws": torch.zeros(1, tree.depth + 1, dtype=settings),
            "temperature": torch.zeros(1, dtype=settings),
            "top_k": torch.zeros(1, dtype=index),
            "top_p": torch.zeros(1, dtype=settings),
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
            **({names.TREE_ROW: (tree.nodes,)} if rows else {}),
            **({names.DRAFT_PROBS: (tree.nodes, rejected)} if rejected else {}),
            **({names.DRAFT_ENTROPY: (1,)} if entropy else {}),
            **dict.fromkeys(cache_outputs(heads.num_layers, 1 + tree.depth), cache),
        },
    )
    name_inputs(traced, graph_inputs)
    return traced
