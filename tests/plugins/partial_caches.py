"""A full KV cache with random rows, a partial one, and what the ops between them take."""

from __future__ import annotations

from typing import Any

import numpy as np

from outrider.plugins import native
from outrider.plugins.ops import OPS
from outrider.plugins.ops.kv_blocks import candidate_blocks
from outrider.plugins.reference import to_slots


class PartialCaches:
    """All tensors of BlockSummary, BlockSelect and PartialKvGather; `ties`: of small whole numbers."""

    def __init__(
        self, *, seed=0, layers=2, heads=2, group=2, head_dim=4, block_size=2, sink_blocks=1, window_blocks=1,
        retrieval=3, capacity=24, room=None, new=4, rows=2, row=1, dtype="float32", ties=False,
        windows=(),
    ):  # fmt: skip
        self.rng = rng = np.random.default_rng(seed)
        self.layout = {"block_size": block_size, "sink_blocks": sink_blocks, "window_blocks": window_blocks}
        self.retrieval, self.capacity, self.new = retrieval, capacity, new
        blocks = max(1, candidate_blocks(capacity, **self.layout) if window_blocks else 1)

        def numbers(*shape: int) -> np.ndarray:
            return rng.integers(-2, 3, shape) if ties else rng.normal(size=shape)

        self.row = np.array([row])
        self.layer_windows = np.array(windows or [0] * layers)
        self.kv = to_slots(numbers(2 * layers, rows, heads, capacity, head_dim).astype(np.float32), dtype)
        room = (sink_blocks + retrieval + window_blocks + 1) * block_size if room is None else room
        self.partial_kv = np.zeros((2 * layers, rows, heads, room, self.kv.shape[-1]), dtype)
        self.key_max, self.key_min = np.zeros((2, rows, layers, heads, head_dim, blocks), np.float32)
        self.queries = numbers(layers, new, heads * group * head_dim).astype(np.float32)
        self.selected = np.full((layers, heads, retrieval), -1)
        self.resident = np.full((rows, layers, heads, retrieval), -1)
        self.kept_indices = np.full(new, -1)
        self.covered, self.summarised, self.budget, self.kept_count = np.zeros((4, 1), np.int64)

    def candidates(self, covered: int) -> int:
        return candidate_blocks(covered, **self.layout)

    def keep(self, count: int) -> np.ndarray:
        """The step kept `count` of its tokens."""
        self.kept_indices[:count] = np.sort(self.rng.choice(self.new, count, replace=False))
        self.kept_count[0] = count
        return self.kept_indices[:count].copy()

    def keep_windows_in_reach(self) -> None:
        """Make windows short enough for the budget, where there are more candidates."""
        count, candidates = int(self.budget[0]), self.candidates(int(self.covered[0]))
        if count < candidates:
            reached = (count + self.layout["window_blocks"]) * self.layout["block_size"] + 1
            self.layer_windows[:] = np.minimum(self.layer_windows, reached)

    def choose(self, count: int) -> None:
        """Select `count` random blocks for each layer and head."""
        self.selected[:] = -1
        for chosen in self.selected.reshape(-1, self.retrieval):
            candidates = self.candidates(int(self.covered[0]))
            chosen[:count] = np.sort(self.rng.choice(candidates, count, replace=False))

    def tensors(self, op: str) -> dict[str, Any]:
        """The op's tensors by name."""
        return {spec.name: getattr(self, spec.name) for spec in OPS[op].schema.tensors}

    def summary(self) -> native.BoundOp:
        return native.create("BlockSummary", self.tensors("BlockSummary"), self.layout)

    def select(self, reduction: int, most_queries: int) -> native.BoundOp:
        attributes = {**self.layout, "reduction": reduction, "most_queries": most_queries}
        return native.create("BlockSelect", self.tensors("BlockSelect"), attributes)

    def gather(self) -> native.BoundOp:
        return native.create("PartialKvGather", self.tensors("PartialKvGather"), self.layout)
