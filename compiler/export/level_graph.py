"""Draft graphs of models that run once for every level: an EAGLE3 head, or a small decoder.

Each level runs the frontier's nodes in the slots after the earlier ones: a node sees the keys that the tip sees, its
ancestors in the tree, and itself. The runtime drops the KV of levels by length, except that of a draft model's accepted
nodes, which equals the KV that feeding their tokens would give.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from outrider.compiler.export.draft_graph import DraftGraph, DraftModel, DraftOptions, Growth, Tips
from outrider.compiler.export.execution import GraphExecution, PassTokens
from outrider.compiler.models.decoder import Execution
from outrider.plans.manifest import Tree


class LevelModel(DraftModel, Protocol):
    """A model that maps tokens `[1, N]`, and the hidden states before them, to hidden states, all `[1, N, H]`.

    `run` returns those that `logits` reads first, and those that the next level feeds back last.
    """

    def run(self, token_ids: Tensor, hidden: Tensor | None, execution: Execution) -> tuple[Tensor, ...]: ...


class LevelGraph(DraftGraph):
    """Runs the model over the new tokens, then over the frontier of every level."""

    def __init__(self, model: nn.Module, tree: Tree, positions: int, options: DraftOptions) -> None:
        super().__init__(model, tree, tree.top_k, positions, options)

    def _take_in(self, token_ids: Tensor, fused: Tensor | None, execution: GraphExecution) -> tuple[Tensor, ...]:
        model: LevelModel = self.model  # type: ignore[assignment]
        return model.run(token_ids, fused, execution)

    def _growth(self, tips: Tips) -> Growth:
        return _Levels(self, tips)

    def run_level(
        self, token: Tensor, hidden: Tensor, bias: Tensor, level: int, tips: Tips
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """Run the frontiers' nodes `[n, k]`; return their hidden states and biases `[n * k, T]`.

        Each node's bias shows the keys that it sees, itself included.
        """
        model: LevelModel = self.model  # type: ignore[assignment]
        several, first = tips.several, level * tips.width
        bias = bias.scatter(1, tips.slots + first, torch.zeros_like(tips.slots, dtype=torch.float32))
        position = tips.position + (level + 1)
        if several is None:
            positions, seen = position.expand(self.each).unsqueeze(0), bias.unsqueeze(0).unsqueeze(0)
        else:
            positions = torch.index_select(position, 0, several.of_tip).unsqueeze(0)
            seen = bias.reshape(several.rows, 1, tips.width, bias.shape[1])
        execution = self._pass(tips.caches, PassTokens(positions, seen, tips.start + first, tips.splits))
        return model.run(self.target_ids(token).reshape(1, -1), hidden, execution), bias


class _Levels:
    """The `Growth` of a `LevelGraph`: hidden states `[1, n * k, H]`, as they are fed back, and biases `[n * k, T]` of
    the frontiers."""

    def __init__(self, graph: LevelGraph, tips: Tips) -> None:
        self._graph, self._tips = graph, tips
        hidden = tips.states[-1]
        if tips.several is None:
            self._hidden, self._bias = hidden.expand(-1, graph.each, -1), tips.bias.expand(graph.each, -1)
        else:
            self._hidden = torch.index_select(hidden, 1, tips.several.of_tip)
            self._bias = torch.index_select(tips.bias, 0, tips.several.of_tip)

    def first(self) -> Tensor:
        return self._logits(self._tips.states[0])

    def logits_after(self, token: Tensor, level: int) -> Tensor:
        states, self._bias = self._graph.run_level(token, self._hidden, self._bias, level, self._tips)
        self._hidden = states[-1]
        return self._logits(states[0])

    def follow(self, parent: Tensor) -> None:
        several = self._tips.several
        flat = parent.squeeze(0) if several is None else (parent + several.first).reshape(-1)
        self._hidden = torch.index_select(self._hidden, 1, flat)
        self._bias = torch.index_select(self._bias, 0, flat)

    def chances(self) -> None:
        return None

    def _logits(self, hidden: Tensor) -> Tensor:
        model: DraftModel = self._graph.model  # type: ignore[assignment]
        return model.logits(hidden).float()
