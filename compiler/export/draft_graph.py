"""The draft graph: one pass over the new tokens, then the levels of a tree, in ONE graph.

The tree's shape is static. A `Growth` gives the logits of each level: `level_graph` runs the model for every level,
`block_graph` has run it once for all of them.

Trees may grow from several tips at once, equally many in each row: one pass runs the nodes of all trees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from outrider.compiler.export.execution import GraphExecution, KvCaches, PassTokens, RopeTables
from outrider.compiler.export.ops import draft_sample, tree_expand, tree_rerank
from outrider.compiler.models.attention import Attention
from outrider.plans import names
from outrider.plans.manifest import Tree

# How often the drafter's race says nothing of the target's. Near the best of a grid on the reference drafters
# (tools/results/races-cpu.txt).
DOUBT = 0.5


class DraftModel(Protocol):
    """Facts of a model that drafts, and the map of the target's features to what the model reads of them."""

    @property
    def heads(self) -> Attention: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def feature_size(self) -> int:
        """Width of the target's features that the model reads; 0 for none."""
        ...

    @property
    def lead(self) -> int:
        """A token's position in the target minus the position of the KV that the last token before its draft has here:
        1 for a head, which has no feature of the tip yet."""
        ...

    @property
    def vocabulary(self) -> Tensor | None:
        """Target token of each draft token, int64 `[Vd]`, ascending; None where the vocabularies are the same."""
        ...

    def fuse(self, features: Tensor) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class Growth(Protocol):
    """Logits `[1, n * nodes, Vd]`, f32, level by level, of n trees."""

    def first(self) -> Tensor:
        """Return the logits after the tips."""
        ...

    def logits_after(self, token: Tensor, level: int) -> Tensor:
        """Return the logits after the frontiers' nodes, whose draft tokens are `[n, k]`."""
        ...

    def follow(self, parent: Tensor) -> None:
        """Take the next frontiers: each of their nodes hangs from node `parent` `[n, k]` of the last level."""
        ...

    def chances(self) -> Tensor | None:
        """Return the logarithms `[n, levels]` of the chances that the model predicts for the tokens of chains, each to
        be accepted where those before it are; None for a model that predicts nothing beside its logits."""
        ...


@dataclass(frozen=True)
class DraftOptions:
    """What a draft graph does beside growing one tree after the last token.

    With `rejected` the tree is a chain (`top_k` 1) whose tokens are drawn, for acceptance by rejection. With `slots`,
    and a tree with levels, the graph says where the levels put each node. With several `branches`, the KV cache may
    have several rows, and trees grow from given tips. A head reads features `featured` numbers wide (default: what it
    reads), of which it reads those in `columns` (default: all). Tokens have up to `positions` positions (default: the
    KV cache's slots).
    """

    rejected: bool = False
    slots: bool = False
    branches: int = 1
    columns: Sequence[int] | None = None
    featured: int | None = None
    positions: int | None = None


@dataclass(frozen=True)
class Tips:
    """The n tips that trees grow from, and the layout of the slots after them, `each` of a tip.

    The slots of the first tree come first, then those of the second ...; every row has equally many trees.
    """

    caches: KvCaches
    states: tuple[Tensor, ...]  # [1, n, width], of the last tokens before trees
    token: Tensor  # [n]
    position: Tensor  # [n]
    bias: Tensor  # [n, T]
    noise: Tensor  # [branches, depth + 1, V], of the target's tokens
    branch: Tensor | None  # [n], of each tip; None where there is one branch
    sampling: Tensor  # [n, SETTINGS], f32
    start: Tensor  # [R], first slot after the row's tokens
    slots: Tensor  # [n * each, 1], slots of the first pass after the tips
    splits: Tensor  # [R + 1], row splits of a pass after the tips
    width: int  # slots of such a pass in one row
    several: SeveralTips | None


@dataclass(frozen=True)
class SeveralTips:
    """Sizes and indices that only graphs with several tips need, where they are not constants."""

    rows: int
    of_tip: Tensor  # [n * each], the tree of each slot of a pass
    first: Tensor  # [n, 1], the first slot of each tree in a pass
    within: Tensor  # [n, 1], the same, counted within its row


class DraftGraph(nn.Module):
    """Maps committed tokens that the drafter lacks to a tree after the last one, or to trees after `tip_indices`.

    A subclass says how the model reads the tokens (`_take_in`) and what gives the levels' logits (`_growth`).
    """

    columns: Tensor | None
    offsets: Tensor
    parent_of: Tensor
    splits: Tensor
    depths: Tensor

    def __init__(self, model: nn.Module, tree: Tree, each: int, positions: int, options: DraftOptions) -> None:
        """`each` is the number of slots that a pass after the tips takes of each."""
        super().__init__()
        self.model, self.tree, self.each, self.options = model, tree, each, options
        drafting: DraftModel = model  # type: ignore[assignment]
        self.tables = RopeTables(drafting.heads, positions, drafting.dtype)
        self.register_buffer("columns", None if options.columns is None else torch.tensor(options.columns))
        k = tree.top_k
        for name, table in {
            "offsets": torch.arange(each).unsqueeze(1),  # each slot of a pass after the tip
            "parent_of": torch.arange(k * k) // k,  # frontier node of each candidate of a level
            "splits": torch.tensor([0, each]),
            "depths": torch.cat([torch.ones(k), *(torch.full((k * k,), 2 + i) for i in range(tree.depth))]).long(),
        }.items():
            self.register_buffer(name, table)

    def forward(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Map the graph's inputs, by name, to its outputs, in order."""
        model: DraftModel = self.model  # type: ignore[assignment]
        caches, fused = KvCaches(inputs), None
        if names.FEATURES in inputs:
            chosen = torch.index_select(inputs[names.FEATURES], 0, inputs[names.FEATURE_INDICES])
            if self.columns is not None:
                chosen = torch.index_select(chosen, 1, self.columns)
            fused = model.fuse(chosen.unsqueeze(0))
        tokens = PassTokens(
            inputs[names.POSITIONS].unsqueeze(0),
            inputs[names.ATTN_BIAS],
            inputs[names.PAST_LENGTH],
            inputs[names.ROW_SPLITS],
        )
        states = self._take_in(inputs[names.TOKEN_IDS].unsqueeze(0), fused, self._pass(caches, tokens))
        tips = (self._tips if names.TIP_INDICES in inputs else self._tip)(caches, states, inputs)
        growth = self._growth(tips)
        grow = self._draw if self.options.rejected else self._grow
        token, parent, depth, score, *others = grow(tips, growth, growth.first())
        root = (tips.position + model.lead).unsqueeze(1)
        return (
            _after_roots(tips.token.unsqueeze(1), token),
            _after_roots(root, depth + root),
            _after_roots(torch.full_like(root, -1), parent),
            _after_roots(torch.zeros_like(score[:, :1]), score),
            *others,
            *caches.presents,
        )

    def _take_in(self, token_ids: Tensor, fused: Tensor | None, execution: GraphExecution) -> tuple[Tensor, ...]:
        """Run the model over the new tokens `[1, N]` and what it reads of the target's features `[1, N, H]`.

        Returns the tensors that the growth after the tips needs of each token, `[1, N, width]`.
        """
        raise NotImplementedError

    def _growth(self, tips: Tips) -> Growth:
        raise NotImplementedError

    def _tip(self, caches: KvCaches, states: tuple[Tensor, ...], inputs: Mapping[str, Tensor]) -> Tips:
        """Return the one tip, the last token."""
        # Not token_ids.shape[0]: ONNX Runtime adds on the CPU to what is a shape, and reads past_length there.
        start = inputs[names.PAST_LENGTH] + inputs[names.ROW_SPLITS][1:]
        return Tips(
            caches,
            tuple(each[:, -1].unsqueeze(1) for each in states),
            inputs[names.TOKEN_IDS][-1].unsqueeze(0),  # not [-1:], whose size would be symbolic
            inputs[names.POSITIONS][-1].unsqueeze(0),
            inputs[names.ATTN_BIAS][:, :, -1].squeeze(1),
            inputs[names.NOISE],
            branch=None,
            sampling=inputs[names.DRAFT_SAMPLING],
            start=start,
            slots=start + self.offsets,
            splits=self.splits,
            width=self.each,
            several=None,
        )

    def _tips(self, caches: KvCaches, states: tuple[Tensor, ...], inputs: Mapping[str, Tensor]) -> Tips:
        """Return the tips `[R, tips]` that an input gives."""
        tip_indices, row_splits, attn_bias = (
            inputs[names.TIP_INDICES],
            inputs[names.ROW_SPLITS],
            inputs[names.ATTN_BIAS],
        )
        k, (rows, trees) = self.each, tip_indices.shape
        tip, branch = tip_indices.reshape(-1), inputs[names.TIP_BRANCH].reshape(-1)
        row, width = torch.arange(rows).unsqueeze(1), trees * k
        within = (torch.arange(trees) * k).expand(rows, trees)
        start = inputs[names.PAST_LENGTH] + (row_splits[1:] - row_splits[:-1])
        place = tip_indices - row_splits[:-1].unsqueeze(1) + row * attn_bias.shape[2]
        of_tip = torch.arange(rows * width) // k
        return Tips(
            caches,
            tuple(torch.index_select(each, 1, tip) for each in states),
            torch.index_select(inputs[names.TOKEN_IDS], 0, tip),
            torch.index_select(inputs[names.POSITIONS], 0, tip),
            torch.index_select(attn_bias.reshape(-1, attn_bias.shape[3]), 0, place.reshape(-1)),
            inputs[names.NOISE],
            branch=branch,
            sampling=torch.index_select(inputs[names.DRAFT_SAMPLING], 0, branch),
            start=start,
            slots=(start.unsqueeze(1) + torch.arange(width)).reshape(-1, 1),
            splits=torch.arange(rows + 1) * width,
            width=width,
            several=SeveralTips(rows, of_tip, (within + row * width).reshape(-1, 1), within.reshape(-1, 1)),
        )

    def _grow(self, tips: Tips, growth: Growth, logits: Tensor) -> list[Tensor]:
        """Grow the trees after the tips, whose logits are `[1, n, V]`.

        Returns tokens, parents, depths and scores `[n, nodes - 1]`; with slots also the nodes' slots, flat
        `[n * nodes]`.
        """
        tree, k, several = self.tree, self.tree.top_k, tips.several

        def expand(logits: Tensor, nodes: int, score: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor]:
            return self._expand(tips, logits, nodes, score, depth)

        def pick(values: Tensor, chosen: Tensor) -> Tensor:
            """Pick from `values` `[n, c]` at `chosen` `[n, k]`."""
            return values.gather(1, chosen) if several is not None else values.index_select(1, chosen.squeeze(0))

        chain = k == 1  # every frontier is the one node of the level before
        token, score, _ = expand(logits, 1, torch.zeros_like(logits[..., 0]).reshape(-1, 1), 0)
        node = torch.arange(k).expand(token.shape[0], k)  # the frontier's nodes, as candidate indices
        tokens, scores, parents = [token], [score], [torch.full_like(node, -1)]
        node_token, node_score = token, score
        expanded: list[Tensor] = []  # the frontiers of all levels, as candidate indices, in the order of their slots
        for level in range(tree.depth):
            expanded.append(node)
            token, score, frontier = expand(growth.logits_after(node_token, level), k, node_score, level + 1)
            tokens.append(token)
            scores.append(score)
            parents.append(node if chain else torch.index_select(node, 1, self.parent_of))
            if chain:
                node_token, node_score, node = token, score, torch.full_like(node, 1 + level)
            elif level + 1 < tree.depth:
                node_token, node_score = pick(token, frontier), pick(score, frontier)
                growth.follow(frontier // k)
                node = frontier + (k + level * k * k)
        chances = growth.chances() if chain else None
        ranked = torch.cat(scores, 1) if chances is None else torch.cumsum(chances, 1)
        candidate, token, parent, depth, score = tree_rerank(
            torch.cat(tokens, 1), ranked, torch.cat(parents, 1), self.depths, tree.nodes
        )
        drafted = [self.target_ids(token), parent, depth, score]
        if self.options.slots:
            drafted.append(self._slots_of(candidate, torch.cat(expanded, 1), tips))
        return drafted

    def _expand(
        self, tips: Tips, logits: Tensor, nodes: int, score: Tensor, depth: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the children's tokens and scores `[n, nodes * k]`, and the best k of them; `nodes` of each tree have
        logits."""
        if tips.several is not None:
            logits = logits.reshape(-1, nodes, logits.shape[2])
        grown: tuple[Tensor, Tensor, Tensor] = tree_expand(
            logits, score, self._noise(tips, depth), tips.sampling, self.tree.top_k, DOUBT
        )
        return grown

    def _slots_of(self, candidate: Tensor, expanded: Tensor, tips: Tips) -> Tensor:
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
        return _after_roots(torch.full_like(candidate[:, :1], -1), row_of.gather(1, candidate))

    def _draw(self, tips: Tips, growth: Growth, logits: Tensor) -> list[Tensor]:
        """Draw chains; return tokens, parents, depths and scores as `_grow` does, and each node's distribution.

        The distributions are f32 `[n * nodes, vocab]`: what each node was drawn from, 0 for a root.
        """
        tree, size = self.tree, tips.noise.shape[2]
        model: DraftModel = self.model  # type: ignore[assignment]

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
                logits = growth.logits_after(tokens[-1], depth - 1)
            token, probability = draft_sample(of_chains(logits), self._noise(tips, depth), tips.sampling)
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
        target_ids = self.target_ids(drawn)
        drafted = distributions[:, 1:].reshape(-1, size)
        own = torch.gather(drafted, 1, target_ids.reshape(-1, 1)).reshape(target_ids.shape)
        scores = torch.cumsum(torch.log(own), 1)
        return [target_ids, steps, steps + 1, scores, distributions.reshape(-1, size)]

    def _pass(self, caches: KvCaches, tokens: PassTokens) -> GraphExecution:
        model: DraftModel = self.model  # type: ignore[assignment]
        return GraphExecution(model.heads, self.tables, caches, tokens)

    def _noise(self, tips: Tips, depth: int) -> Tensor:
        """Return the noise `[n, Vd]` of the drafter's tokens after the tips' nodes at `depth`."""
        vocabulary: Tensor | None = self.model.vocabulary  # type: ignore[assignment]
        noise = tips.noise[:, depth]
        if tips.branch is not None:
            noise = torch.index_select(noise, 0, tips.branch)
        return noise if vocabulary is None else torch.index_select(noise, 1, vocabulary)

    def target_ids(self, token: Tensor) -> Tensor:
        """Map draft tokens `[n, m]` to target tokens."""
        vocabulary: Tensor | None = self.model.vocabulary  # type: ignore[assignment]
        return (
            token if vocabulary is None else torch.index_select(vocabulary, 0, token.reshape(-1)).reshape(token.shape)
        )


def _after_roots(root: Tensor, nodes: Tensor) -> Tensor:
    """Concatenate `[n, 1]` and `[n, nodes - 1]` to flat `[n * nodes]`."""
    return torch.cat([root, nodes], 1).reshape(-1)
