"""The EAGLE3 head against a NumPy forward pass written from the formulas, on random heads of every layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.compiler.deferred import deferred
from outrider.compiler.models.eagle3 import Eagle3Head

from .block_heads import Array, KeptRow, NumpyLayers, agree
from .eagle3_heads import LAYOUTS, K, Layout, O, Q, V, defer_eagle3, load_eagle3, target_config, write_eagle3
from .packed_heads import pack_head

PAIRS, LEVELS, START = 6, 2, 3
WIDTHS = {"target_hidden": 16, "vocab": 60, "draft_vocab": 25}
PROJECTIONS = {
    "fc.weight", Q, K, V, O, "midlayer.mlp.gate_proj.weight", "midlayer.mlp.up_proj.weight",
    "midlayer.mlp.down_proj.weight", "lm_head.weight",
}  # fmt: skip
CASES: dict[str, dict[str, object]] = {
    "plain": {},
    "whole-vocabulary": {"draft_vocab": None},
    "one-kv-head": {"kv_heads": 1},
    "wide-heads": {"head_dim": 12},
    "other-width": {"hidden": 24, "own_embedding": True},
    "fc-norm": {"fc_norm": True},
    "fc-norm-and-norm-output": {"fc_norm": True, "norm_output": True, "hidden": 24, "own_embedding": True},
    "rope-theta": {"rope_theta": 500.0},
    "rope-linear": {"rope_scaling": {"type": "linear", "factor": 2.5}},
}


class NumpyHead(NumpyLayers):
    """An EAGLE3 head over one row, whose keys and values grow with every call of `level`."""

    def __init__(self, tensors: dict[str, Tensor], case: dict[str, object]) -> None:
        super().__init__(tensors, 4, int(str(case.get("kv_heads", 2))), len(tensors[Q]) // 4)
        self.theta = float(str(case.get("rope_theta", 10000.0)))
        self.stretch = 2.5 if "rope_scaling" in case else 1.0
        self.feeds_normed = bool(case.get("norm_output"))
        self.keys: list[Array] = []
        self.values: list[Array] = []

    def fuse(self, features: Array) -> Array:
        if "fc_norm.0.weight" in self.w:
            streams = np.split(features, 3, axis=-1)
            features = np.concatenate([self.norm(x, f"fc_norm.{i}") for i, x in enumerate(streams)], axis=-1)
        return self.linear(features, "fc")

    def level(self, h: Array, embedded: Array, positions: list[int]) -> Array:
        """Rows one after another, each seeing all keys before it and its own."""
        return np.stack([self._row(h[i], embedded[i], position) for i, position in enumerate(positions)])

    def _row(self, h: Array, embedded: Array, position: int) -> Array:
        x = np.concatenate([self.norm(embedded, "midlayer.input_layernorm"), self.norm(h, "midlayer.hidden_norm")])
        q, k, v = (self.linear(x, name.removesuffix(".weight")).reshape(-1, self.head_dim) for name in (Q, K, V))
        self.keys.append(self.rotated(k, position))
        self.values.append(v)
        attended = self.attended(self.rotated(q, position), np.stack(self.keys), np.stack(self.values))
        h = h + self.linear(attended, O.removesuffix(".weight"))
        return h + self.unit(self.norm(h, "midlayer.post_attention_layernorm"), "midlayer.mlp")

    def logits(self, h: Array) -> Array:
        return self.linear(self.norm(h, "norm"), "lm_head")

    def fed_back(self, h: Array) -> Array:
        return self.norm(h, "norm") if self.feeds_normed else h


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_features_levels_and_logits_equal_numpy(case: str, layout: Layout, tmp_path: Path) -> None:
    changes = CASES[case]
    tensors = write_eagle3(tmp_path, layout=layout, **(WIDTHS | changes))  # type: ignore[arg-type]
    expect_numpy(load_eagle3(tmp_path, target_config()), tensors, changes)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("bits", "size", "symmetric"), [(4, 32, True), (8, 64, False), (4, 16, False), (8, None, True)]
)
def test_a_packed_head_is_that_of_the_numbers_that_its_integers_stand_for(
    bits: int, size: int | None, symmetric: bool, layout: Layout, tmp_path: Path
) -> None:
    wide = {"target_hidden": 64, "intermediate": 128, "heads": 4, "head_dim": 16, "draft_vocab": 25, "fc_norm": True}
    before = write_eagle3(tmp_path, layout=layout, **wide)  # type: ignore[arg-type]
    numbers = pack_head(tmp_path, bits, size, symmetric)
    assert {name for name in before if not torch.equal(before[name], numbers[name])} == PROJECTIONS
    target = target_config(hidden=64)
    head = load_eagle3(tmp_path, target)
    expect_numpy(head, numbers, wide)
    stored = deferred(defer_eagle3(tmp_path, target))
    loaded = dict(head.named_parameters())
    assert all(torch.equal(each.read(), loaded[name]) for name, each in stored.items())
    sources = {each.stored_name: each.tensors.quantized(each.stored_name) for each in stored.values()}
    kept = {name: source for name, source in sources.items() if source is not None}
    assert kept.keys() == (PROJECTIONS if size != 16 else set())  # a block of 32 inputs has one scale
    assert all((source.bits, source.minimums) == (bits, not symmetric) for source in kept.values())


def expect_numpy(head: Eagle3Head, tensors: dict[str, Tensor], changes: dict[str, object]) -> None:
    """The head computes on random features what NumPy does with its tensors."""
    oracle = NumpyHead(tensors, changes)
    rng = np.random.default_rng(1)
    shape = head.config.vocab_size, head.config.hidden_size
    table = tensors.get("embed_tokens.weight", torch.from_numpy(rng.standard_normal(shape).astype(np.float32)))
    assert (head.embedding is None) == ("embed_tokens.weight" not in tensors)
    if head.embedding is not None:
        assert torch.equal(head.embedding, table)
    features = rng.standard_normal((PAIRS, head.config.feature_size))
    tokens = rng.integers(60, size=PAIRS + LEVELS)

    h = head.fuse(torch.from_numpy(features).float())
    expected = oracle.fuse(features)
    agree(h, expected)
    execution = KeptRow(head.config)
    steps = [(0, PAIRS), *((PAIRS + level, PAIRS + level + 1) for level in range(LEVELS))]
    for first, last in steps:
        positions = list(range(START + first, START + last))
        embedded = table[tokens[first:last]]
        execution.positions = positions
        normed, h = head.layer(head.fuse(h), embedded, execution)
        residual = oracle.level(expected, embedded.double().numpy(), positions)
        expected = oracle.fed_back(residual)
        agree(h, expected)
        agree(head.logits(normed), oracle.logits(residual))
        h, expected = h[-1:], expected[-1:]
