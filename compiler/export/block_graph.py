"""Draft graphs of block heads: one pass over a block of the tip and masks gives the logits of every level.

The new tokens bring features alone: each layer appends keys and values made of them, and no query asks. Then the block
of each tip runs in the slots after them: it sees the keys that the last token before the tip sees, and itself, all of
it or, where the head is causal, the slots up to the query's. The runtime drops the block's KV by length.

A level's logits are those of its slot, the same for all nodes of the level but for the head's bias by the token before.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.compiler.export.draft_graph import DraftGraph, DraftOptions, Growth, Tips
from outrider.compiler.export.execution import GraphExecution, PassTokens
from outrider.compiler.models.block_config import BlockConfig
from outrider.compiler.models.drafting import BlockDraft
from outrider.compiler.models.ops import run_after
from outrider.plans.manifest import Tree


def block_slots(config: BlockConfig, tree: Tree) -> int:
    """Return how many slots of a block are run: all, or of a causal head those that `tree` reads."""
    return config.first_slot + tree.depth + 1 if config.causal else config.block_size


class BlockGraph(DraftGraph):
    """Appends the context's keys and values, and runs one block after each tip."""

    masks: Tensor
    hidden_slots: Tensor

    def __init__(self, model: BlockDraft, tree: Tree, positions: int, options: DraftOptions) -> None:
        config = model.heads
        each = block_slots(config, tree)
        super().__init__(model, tree, each, positions, options)
        self.block = model
        seen = torch.ones(each, each).tril() if config.causal else torch.ones(each, each)
        shown = torch.zeros(each, each).masked_fill(seen == 0, torch.finfo(torch.float32).min)
        self.register_buffer("masks", torch.full((1, each - 1), config.mask_token_id))
        self.register_buffer("hidden_slots", shown.unsqueeze(0))

    def _take_in(self, token_ids: Tensor, fused: Tensor | None, execution: GraphExecution) -> tuple[Tensor, ...]:
        """Append keys and values; return a number of every layer, `[1, N, layers]`."""
        assert fused is not None, "block heads read features"
        head = self.block.head
        appended = [
            execution.append(index, *head.context_kv(fused, index), layer.k_norm)  # type: ignore[arg-type]
            for index, layer in enumerate(head.layers)
        ]
        return (torch.cat(appended, -1),)

    def _growth(self, tips: Tips) -> Growth:
        return _Block(self, tips, self._run_block(tips))

    def _run_block(self, tips: Tips) -> Tensor:
        """Return the hidden states `[n, each, H]` of the blocks."""
        config, each, several = self.block.heads, self.each, tips.several
        count = tips.token.shape[0]
        tokens = torch.cat([tips.token.unsqueeze(1), self.masks.expand(count, each - 1)], 1)
        places = (tips.position + self.block.lead).unsqueeze(1) + self.offsets.reshape(1, -1)
        slots = tips.slots.reshape(-1, 1, each).expand(-1, each, each)
        bias = (
            tips.bias.unsqueeze(1).expand(-1, each, -1).scatter(2, slots, self.hidden_slots.expand(count, each, each))
        )
        rows = 1 if several is None else several.rows
        seen = bias.reshape(rows, 1, tips.width, tips.bias.shape[1])
        block = PassTokens(places.reshape(1, -1), seen, tips.start, tips.splits, later=not config.causal)
        execution = self._pass(tips.caches, block)
        embedded = run_after(self.block.embed(tokens.reshape(1, -1)), tips.states[0])  # the context is appended
        return self.block.head.run(embedded, execution).reshape(-1, each, config.hidden_size)


class _Block:
    """The `Growth` of a `BlockGraph`. `hidden` `[n, each, H]` are the states of the blocks' slots."""

    def __init__(self, graph: BlockGraph, tips: Tips, hidden: Tensor) -> None:
        head, levels = graph.block.head, graph.tree.depth + 1
        first = head.config.first_slot
        self._graph, self._tips = graph, tips
        self._hidden = hidden[:, first : first + levels]
        scores = graph.block.logits(self._hidden.reshape(-1, hidden.shape[2])).float()  # 2-D, so that it is one product
        self._scores = scores.reshape(-1, levels, scores.shape[1])
        self._state: Tensor | None = None  # [n, nodes, rank], of the frontiers' nodes, for a bias that has one
        self._previous: list[Tensor] = []  # [n, nodes], the target tokens before those of each level

    def first(self) -> Tensor:
        return self._biased(self._tips.token.unsqueeze(1), 0)

    def logits_after(self, token: Tensor, level: int) -> Tensor:
        if self._state is not None and level == 0:
            self._state = self._state.expand(-1, self._graph.tree.top_k, -1)
        return self._biased(self._graph.target_ids(token), level + 1)

    def follow(self, parent: Tensor) -> None:
        if self._state is not None:
            self._state = self._state.gather(1, parent.unsqueeze(2).expand(-1, -1, self._state.shape[2]))

    def chances(self) -> Tensor | None:
        head = self._graph.block.head
        if head.confidence_head is None:
            return None
        return F.logsigmoid(head.confidence(self._hidden, torch.cat(self._previous, 1)).float())

    def _biased(self, previous: Tensor, level: int) -> Tensor:
        """Return the logits `[1, n * nodes, Vd]` of a level after the target tokens `previous` `[n, nodes]`."""
        head, nodes = self._graph.block.head, previous.shape[1]
        self._previous.append(previous)
        here = torch.tensor([level])  # selects [n, 1, ...] in one node of the graph
        logits = torch.index_select(self._scores, 1, here)
        if head.markov is not None:
            hidden = torch.index_select(self._hidden, 1, here)
            hidden = hidden if nodes == 1 else hidden.expand(-1, nodes, -1)
            self._state, bias = head.markov_bias(self._state, previous, hidden)
            logits = logits + bias.float()
        elif nodes > 1:
            logits = logits.expand(-1, nodes, -1)
        return logits if self._tips.several is None else logits.reshape(1, -1, logits.shape[2])
