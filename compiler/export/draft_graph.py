"""The draft graph of DESIGN sections 4 and 7: one pass over the new tokens, then the levels of a tree, in ONE graph.

The tree's shape is static. Each level runs the frontier's nodes in the slots behind the earlier ones: a node sees the
keys that the tip sees, its ancestors in the tree, and itself. The runtime drops the KV of levels by length, except that
of a draft model's accepted nodes, which equals the KV that feeding their tokens would give.

Trees may grow from several tips at once, equally many in each row: one pass runs a level's nodes of all trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log
from typing import Protocol

import torch
from torch import Tensor, nn

from compiler.export.execution import GraphExecution, Heads, KvCaches, RopeTables
from compiler.export.ops import draft_sample, tree_expand, tree_rerank
from compiler.models.decoder import Execution
from plans.manifest import Tree

# How often the drafter's race tells nothing of the target's. Near the best of a grid on the reference drafters
# (`python -m tools.proposals`).
DOUBT = 0.5


class DraftModel(Protocol):
    """A model that drafts: an EAGLE3 head, or a small decoder. Tensors have a leading dimension of 1."""

    @property
    def heads(self) -> Heads: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def feature_size(self) -> int:
        """Width of the target's features that the model reads; 0 for none."""
        ...

    @property
    def lead(self) -> int:
        """A token's position in the target minus its position here: 1 for a head, which pairs a feature with the
        token after it."""
        ...

    @property
    def vocabulary(self) -> Tensor | None:
        """Target token of each draft token, int64 `[Vd]`, ascending; None where the vocabularies are the same."""
        ...

    def fuse(self, features: Tensor) -> Tensor: ...

    def run(self, token_ids: Tensor, hidden: Tensor | None, execution: Execution) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class _Tips:
    """The n tips that trees grow from, and the layout of a level's n * k nodes behind them.

    A level holds the nodes of the first tree, then of the second ...; every row has equally many trees.
    """

    caches: KvCaches
    hidden: Tensor  # [1, n, H]
    token: Tensor  # [n]
    position: Tensor  # [n]
    bias: Tensor  # [n, T]
    noise: Tensor  # [branches, depth + 1, V], of the target's tokens
    branch: Tensor | None  # [n], of each tip; None where there is one branch
    filters: tuple[Tensor, Tensor, Tensor, Tensor]  # [n] each: temperature, top_k, top_p, min_p
    start: Tensor  # [R], first slot of the first level
    slots: Tensor  # [n * k, 1], slots of the first level's nodes
    splits: Tensor  # [R + 1], row splits of a level's nodes
    width: int  # nodes of a level in one row
    several: _Several | None


@dataclass(frozen=True)
class _Several:
    """Sizes and indices that only graphs with several tips need, where they are not constants."""

    rows: int
    of_tip: Tensor  # [n * k], the tree of each node of a level
    first: Tensor  # [n, 1], the first node of each tree in a level
    within: Tensor  # [n, 1], the same, counted within its row


class DraftGraph(nn.Module):
    """Maps committed tokens that the drafter lacks to a tree behind the last one, or to trees behind `tip_indices`."""

    diagonal: Tensor
    parent_of: Tensor
    splits: Tensor
    depths: Tensor

    def __init__(self, model: nn.Module, tree: Tree, positions: int, rejected: int, entropy: bool, slots: bool) -> None:
        super().__init__()
        self.model, self.tree, self.rejected, self.entropy, self.slots = model, tree, rejected, entropy, slots
        drafting: DraftModel = model  # type: ignore[assignment]
        self.tables = RopeTables(drafting.heads, positions, drafting.dtype)
        k = tree.top_k
        for name, table in {
            "diagonal": torch.arange(k).unsqueeze(1),  # each frontier node's own slot, as an offset
            "parent_of": torch.arange(k * k) // k,  # frontier node of each candidate of a level
            "splits": torch.tensor([0, k]),
            "depths": torch.cat([torch.ones(k), *(torch.full((k * k,), 2 + i) for i in range(tree.depth))]).long(),
        }.items():
            self.register_buffer(name, table)

    def forward(
        self,
        features: Tensor | None,
        feature_indices: Tensor | None,
        token_ids: Tensor,
        positions: Tensor,
        row_splits: Tensor,
        attn_bias: Tensor,
        past_length: Tensor,
        tip_indices: Tensor | None,
        tip_branch: Tensor | None,
        noise: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        k_caches: Sequence[Tensor],
        v_caches: Sequence[Tensor],
    ) -> tuple[Tensor, ...]:
        model: DraftModel = self.model  # type: ignore[assignment]
        caches = KvCaches(k_caches, v_caches)
        fused = None
        if features is not None and feature_indices is not None:
            fused = model.fuse(torch.index_select(features, 0, feature_indices).unsqueeze(0))
        execution = self._pass(caches, positions.unsqueeze(0), attn_bias, past_length, row_splits)
        hidden = model.run(token_ids.unsqueeze(0), fused, execution)
        filters = (temperature, top_k, top_p, min_p)
        if tip_indices is None or tip_branch is None:
            # Not token_ids.shape[0]: ONNX Runtime adds on the CPU to what is a shape, and reads past_length there.
            start = past_length + row_splits[1:]
            tips = _Tips(
                caches,
                hidden[:, -1].unsqueeze(1),
                token_ids[-1].unsqueeze(0),  # not [-1:], whose size would be symbolic
                positions[-1].unsqueeze(0),
                attn_bias[0, 0, -1].unsqueeze(0),
                noise,
                None,
                filters,
                start,
                start + self.diagonal,
                self.splits,
                self.tree.top_k,
                None,
            )
        else:
            tips = self._tips(caches, hidden, token_ids, positions, row_splits, attn_bias, past_length, tip_indices)
            of = tip_branch.reshape(-1)
            heat, most, share, least = (torch.index_select(each, 0, of) for each in filters)
            tips = replace(tips, noise=noise, branch=of, filters=(heat, most, share, least))
        logits = model.logits(tips.hidden).float()
        token, parent, depth, score, *others = self._chain(tips, logits) if self.rejected else self._tree(tips, logits)
        if self.entropy:
            entropy = _normalised_entropy(logits)
            others.append(entropy.reshape(1) if tip_indices is None else entropy.reshape(tip_indices.shape))
        root = (tips.position + model.lead).unsqueeze(1)
        return (
            _behind_roots(tips.token.unsqueeze(1), token),
            _behind_roots(root, depth + root),
            _behind_roots(torch.full_like(root, -1), parent),
            _behind_roots(torch.zeros_like(score[:, :1]), score),
            *others,
            *caches.presents,
        )

    def _tips(
        self,
        caches: KvCaches,
        hidden: Tensor,
        token_ids: Tensor,
        positions: Tensor,
        row_splits: Tensor,
        attn_bias: Tensor,
        past_length: Tensor,
        tip_indices: Tensor,
    ) -> _Tips:
        """Gather the tips at `tip_indices` `[R, tips]`; the caller replaces the placeholders `noise`,
        `branch` and `filters`.
        """
        k, (rows, each) = self.tree.top_k, tip_indices.shape
        tip = tip_indices.reshape(-1)
        row, width = torch.arange(rows).unsqueeze(1), each * k
        within = (torch.arange(each) * k).expand(rows, each)
        start = past_length + (row_splits[1:] - row_splits[:-1])
        place = tip_indices - row_splits[:-1].unsqueeze(1) + row * attn_bias.shape[2]
        of_tip = torch.arange(rows * width) // k
        return _Tips(
            caches,
            torch.index_select(hidden, 1, tip),
            torch.index_select(token_ids, 0, tip),
            torch.index_select(positions, 0, tip),
            torch.index_select(attn_bias.reshape(-1, attn_bias.shape[3]), 0, place.reshape(-1)),
            noise=tip,
            branch=tip,
            filters=(tip, tip, tip, tip),
            start=start,
            slots=(start.unsqueeze(1) + torch.arange(width)).reshape(-1, 1),
            splits=torch.arange(rows + 1) * width,
            width=width,
            several=_Several(rows, of_tip, (within + row * width).reshape(-1, 1), within.reshape(-1, 1)),
        )

    def _tree(self, tips: _Tips, logits: Tensor) -> list[Tensor]:
        """Grow the trees behind the tips, whose logits are `[1, n, V]`.

        Returns tokens, parents, depths and scores `[n, nodes - 1]`; with `self.slots` also the nodes' slots, flat
        `[n * nodes]`.
        """
        tree, k, several = self.tree, self.tree.top_k, tips.several
        model: DraftModel = self.model  # type: ignore[assignment]

        def expand(logits: Tensor, nodes: int, score: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor]:
            if several is not None:
                logits = logits.reshape(-1, nodes, logits.shape[2])
            grown: tuple[Tensor, Tensor, Tensor] = tree_expand(
                logits, score, self._noise(tips, depth), *tips.filters, k, DOUBT
            )
            return grown

        def pick(values: Tensor, chosen: Tensor) -> Tensor:
            """Pick from `values` `[n, c]` at `chosen` `[n, k]`."""
            return values.gather(1, chosen) if several is not None else values.index_select(1, chosen.squeeze(0))

        def of_level(values: Tensor, axis: int, node: Tensor) -> Tensor:
            """Pick, of a level's n * k nodes along `axis`, the nodes at `node` `[n, k]` in their trees."""
            flat = node.squeeze(0) if several is None else (node + several.first).reshape(-1)
            return torch.index_select(values, axis, flat)

        token, score, _ = expand(logits, 1, torch.zeros_like(logits[..., 0]).reshape(-1, 1), 0)
        node = torch.arange(k).expand(token.shape[0], k)  # the frontier's nodes, as candidate indices
        tokens, scores, parents = [token], [score], [torch.full_like(node, -1)]
        node_token, node_score = token, score
        if several is None:
            hidden, bias = tips.hidden.expand(-1, k, -1), tips.bias.expand(k, -1)
        else:
            hidden = torch.index_select(tips.hidden, 1, several.of_tip)
            bias = torch.index_select(tips.bias, 0, several.of_tip)
        expanded: list[Tensor] = []  # the frontiers of all levels, as candidate indices, in the order of their slots
        for level in range(tree.depth):
            expanded.append(node)
            hidden, bias = self._level(node_token, hidden, bias, level, tips)
            token, score, frontier = expand(model.logits(hidden).float(), k, node_score, level + 1)
            tokens.append(token)
            scores.append(score)
            parents.append(torch.index_select(node, 1, self.parent_of))
            if level + 1 < tree.depth:
                node_token, node_score = pick(token, frontier), pick(score, frontier)
                parent = frontier // k
                hidden, bias = of_level(hidden, 1, parent), of_level(bias, 0, parent)
                node = frontier + (k + level * k * k)
        candidate, token, parent, depth, score = tree_rerank(
            torch.cat(tokens, 1), torch.cat(scores, 1), torch.cat(parents, 1), self.depths, tree.nodes
        )
        drafted = [self._target_ids(token), parent, depth, score]
        if self.slots:
            drafted.append(self._slots_of(candidate, torch.cat(expanded, 1), tips))
        return drafted

    def _slots_of(self, candidate: Tensor, expanded: Tensor, tips: _Tips) -> Tensor:
        """Return each node's slot, counted from the first level's first slot, or -1: flat `[n * nodes]`.

        `candidate` `[n, nodes - 1]` are the nodes' candidate indices, `expanded` `[n, depth * k]` those the levels ran.
        """
        tree, k = self.tree, self.tree.top_k
        level = torch.arange(tree.depth).reshape(1, -1, 1) * tips.width
        within = level + torch.arange(k)
        if tips.several is not None:  # trees of one row lie side by side
            within = within + tips.several.within.unsqueeze(2)
        row_of = torch.full_like(expanded[:, :1], -1).expand(-1, tree.candidates)
        row_of = row_of.scatter(1, expanded, within.reshape(-1, tree.depth * k))
        return _behind_roots(torch.full_like(candidate[:, :1], -1), row_of.gather(1, candidate))

    def _chain(self, tips: _Tips, logits: Tensor) -> list[Tensor]:
        """Draw chains; return tokens, parents, depths and scores as `_tree` does, and each node's distribution.

        The distributions are f32 `[n * nodes, vocab]`: what each node was drawn from, 0 for a root.
        """
        tree, size = self.tree, self.rejected
        model: DraftModel = self.model  # type: ignore[assignment]
        hidden, bias = tips.hidden, tips.bias

        def of_chains(logits: Tensor) -> Tensor:
            """Reshape `[1, n, V]` to `[n, 1, V]`."""
            return logits if tips.several is None else logits.reshape(-1, 1, logits.shape[2])

        tokens: list[Tensor] = []
        none = torch.zeros(1, 1, size)
        if tips.several is not None:
            none = torch.zeros_like(of_chains(logits)[:, :, :1]).expand(-1, -1, size)
        probabilities = [none]
        for depth in range(tree.nodes - 1):
            if depth:
                hidden, bias = self._level(tokens[-1], hidden, bias, depth - 1, tips)
                logits = model.logits(hidden).float()
            token, probability = draft_sample(of_chains(logits), self._noise(tips, depth), *tips.filters)
            tokens.append(token)
            if model.vocabulary is not None:
                columns = model.vocabulary.reshape(1, 1, -1)
                if tips.several is not None:
                    columns = columns.expand(token.shape[0], -1, -1)
                probability = none.scatter(2, columns, probability)
            probabilities.append(probability)
        drawn = torch.cat(tokens, 1)
        steps = torch.arange(tree.nodes - 1).expand(drawn.shape[0], tree.nodes - 1)
        distributions = torch.cat(probabilities, 1)
        target_ids = self._target_ids(drawn)
        drafted = distributions[:, 1:].reshape(-1, size)
        own = torch.gather(drafted, 1, target_ids.reshape(-1, 1)).reshape(target_ids.shape)
        scores = torch.cumsum(torch.log(own), 1)
        return [target_ids, steps, steps + 1, scores, distributions.reshape(-1, size)]

    def _level(self, token: Tensor, hidden: Tensor, bias: Tensor, level: int, tips: _Tips) -> tuple[Tensor, Tensor]:
        """Run the frontiers' nodes `[n, k]`; return their hidden states and biases `[n * k, T]`.

        Each node's bias shows the keys that it sees, itself included.
        """
        model: DraftModel = self.model  # type: ignore[assignment]
        several, behind = tips.several, level * tips.width
        bias = bias.scatter(1, tips.slots + behind, torch.zeros_like(tips.slots, dtype=torch.float32))
        position = tips.position + (level + 1)
        if several is None:
            positions, seen = position.expand(self.tree.top_k).unsqueeze(0), bias.unsqueeze(0).unsqueeze(0)
        else:
            positions = torch.index_select(position, 0, several.of_tip).unsqueeze(0)
            seen = bias.reshape(several.rows, 1, tips.width, bias.shape[1])
        execution = self._pass(tips.caches, positions, seen, tips.start + behind, tips.splits)
        return model.run(self._target_ids(token).reshape(1, -1), hidden, execution), bias

    def _pass(self, caches: KvCaches, positions: Tensor, bias: Tensor, past: Tensor, splits: Tensor) -> GraphExecution:
        model: DraftModel = self.model  # type: ignore[assignment]
        return GraphExecution(model.heads, self.tables, caches, positions, bias, past, splits)

    def _noise(self, tips: _Tips, depth: int) -> Tensor:
        """Return the noise `[n, Vd]` of the drafter's tokens behind the tips' nodes at `depth`."""
        vocabulary: Tensor | None = self.model.vocabulary  # type: ignore[assignment]
        noise = tips.noise[:, depth]
        if tips.branch is not None:
            noise = torch.index_select(noise, 0, tips.branch)
        return noise if vocabulary is None else torch.index_select(noise, 1, vocabulary)

    def _target_ids(self, token: Tensor) -> Tensor:
        """Map draft tokens `[n, m]` to target tokens."""
        vocabulary: Tensor | None = self.model.vocabulary  # type: ignore[assignment]
        return (
            token if vocabulary is None else torch.index_select(vocabulary, 0, token.reshape(-1)).reshape(token.shape)
        )


def _behind_roots(root: Tensor, nodes: Tensor) -> Tensor:
    """Concatenate `[n, 1]` and `[n, nodes - 1]` to flat `[n * nodes]`."""
    return torch.cat([root, nodes], 1).reshape(-1)


def _normalised_entropy(logits: Tensor) -> Tensor:
    """Return the entropies `[1, n]` of distributions with logits `[1, n, V]`, over the uniform one's, ln V."""
    log_p = logits.log_softmax(dim=-1)
    return -(log_p.exp() * log_p).sum(dim=-1) / log(logits.shape[-1])
