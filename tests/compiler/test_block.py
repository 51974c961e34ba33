"""Block heads against a NumPy forward pass written from the papers' formulas, on random heads of every kind.

The oracle computes every block anew from all tokens before it; the head keeps its context's keys and values.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.compiler.deferred import deferred
from outrider.compiler.models.block_config import Confidence
from outrider.compiler.models.decoder import Decoder
from outrider.compiler.models.drafting import BlockDraft

from .block_heads import (
    MASK,
    VOCAB,
    Array,
    KeptContext,
    NumpyLayers,
    agree,
    defer_block,
    load_block,
    random_target,
    write_block,
)  # fmt: skip
from .eagle3_heads import TABLES, pack_head, target_config

ROUNDS = (6, 1, 4)  # context tokens that each block has more than the block before it
SPECULATORS = {"layout": "speculators-dspark", "draft_vocab": 25, "confidence": "markov"}
CASES: dict[str, dict[str, Any]] = {
    "dflash": {"layout": "zlab"},
    "dflash-tied": {"layout": "zlab", "tied": True},
    "dflash-one-layer-and-stream": {"layout": "zlab", "layers": 1, "streams": (3,)},
    "dflash-five-streams": {"layout": "zlab", "streams": (0, 1, 3, 4, 7)},
    "dflash-one-kv-head": {"layout": "zlab", "kv_heads": 1, "head_dim": 12},
    "dflash-biases": {"layout": "zlab", "bias": True},
    "dflash-rope-linear": {"layout": "zlab", "decoder": {"rope_scaling": {"type": "linear", "factor": 2.5}}},
    "dflash-deepspec": {"layout": "deepspec"},
    "dflash-speculators": {"layout": "speculators-dflash", "draft_vocab": 25},
    "dflash-speculators-from-anchor": {"layout": "speculators-dflash", "sample_from_anchor": True},
    "dflash-speculators-targets-embedding": {"layout": "speculators-dflash", "draft_vocab": 25, "own_embedding": False},
    "dspark-speculators": SPECULATORS | {"markov": ("gated", 6)},
    "dspark-speculators-not-from-anchor": {
        "layout": "speculators-dspark",
        "markov": ("vanilla", 6),
        "sample_from_anchor": False,
        "speculators_config": {"algorithm": "dspark"},
    },
    "dspark-confidence-alone": {"layout": "deepspec", "confidence": "hidden"},
    "jetspec": {"layout": "jetspec"},
    "jetspec-no-gqa": {"layout": "jetspec", "kv_heads": 4, "layers": 3},
    **{
        f"dspark-{kind}-{confidence}": {"layout": "deepspec", "markov": (kind, 6), "confidence": confidence}
        for kind, confidence in (("vanilla", None), ("gated", "hidden"), ("rnn", "markov"), ("rnn", None))
    },
}

PACKED: dict[str, dict[str, Any]] = {
    "dflash": {"layout": "zlab", "bias": True},
    "jetspec": {"layout": "jetspec"},
    "dflash-speculators": {"layout": "speculators-dflash", "draft_vocab": 25},
    "dspark-speculators": SPECULATORS | {"markov": ("gated", 32)},
    **{
        f"dspark-{kind}": {"layout": "deepspec", "markov": (kind, 32), "confidence": "hidden"}
        for kind in ("vanilla", "gated", "rnn")
    },
}


class NumpyBlock(NumpyLayers):
    """One pass over a context and a block."""

    def __init__(self, tensors: dict[str, Tensor], case: dict[str, Any]) -> None:
        super().__init__(tensors, 4, int(case.get("kv_heads", 2)), int(case.get("head_dim", 8)))
        self.layers, self.causal = int(case.get("layers", 2)), case["layout"] == "jetspec"
        self.stretch = 2.5 if "decoder" in case else 1.0
        self.kind = (case.get("markov") or ("", 0))[0]
        self.sees_markov = case.get("confidence") == "markov"

    def hidden(self, features: Array, embedded: Array) -> Array:
        """Features [C, taps * Ht] of all tokens before the tip, embeddings [B, H] of the tip and the masks."""
        context = self.norm(self.linear(features, "fc"), "hidden_norm")
        count, size = len(context), len(embedded)
        positions = np.arange(count + size)[:, None, None]
        h = embedded
        for index in range(self.layers):
            layer = f"layers.{index}"
            x = self.norm(h, f"{layer}.input_layernorm")
            # Keys and values of the context come of one vector for all layers, which no layer's norm touches.
            sources = np.concatenate([context, x])
            q, k, v = (
                self.linear(of, f"{layer}.self_attn.{name}_proj").reshape(len(of), heads, self.head_dim)
                for of, name, heads in (
                    (x, "q", self.heads),
                    (sources, "k", self.kv_heads),
                    (sources, "v", self.kv_heads),
                )
            )
            q = self.rotated(self.norm(q, f"{layer}.self_attn.q_norm"), positions[count:])
            k = self.rotated(self.norm(k, f"{layer}.self_attn.k_norm"), positions)
            seen = [count + 1 + (slot if self.causal else size - 1) for slot in range(size)]
            attended = np.stack([self.attended(q[slot], k[:last], v[:last]) for slot, last in enumerate(seen)])
            h = h + self.linear(attended, f"{layer}.self_attn.o_proj")
            h = h + self.unit(self.norm(h, f"{layer}.post_attention_layernorm"), f"{layer}.mlp")
        return self.norm(h, "norm")

    def biases(self, hidden: Array, previous: NDArray[np.int64]) -> Array:
        """Of consecutive slots `hidden` [n, H], each after the token `previous` [n]."""
        latent = self.w["markov_head.markov_w1.weight"][previous]
        w2, rank = self.w["markov_head.markov_w2.weight"], latent.shape[1]
        if self.kind == "vanilla":
            return latent @ w2.T
        if self.kind == "gated":
            return sigmoid(self.linear(np.concatenate([hidden, latent], -1), "markov_head.gate_proj")) * latent @ w2.T
        state, out = np.zeros(rank), []
        for h, before in zip(hidden, latent, strict=True):
            parts = self.linear(np.concatenate([state, before, h]), "markov_head.joint_proj")
            gate = sigmoid(parts[:rank])
            state = gate * state + (1 - gate) * np.tanh(parts[rank : 2 * rank])
            out.append(np.tanh(parts[2 * rank :]) @ w2.T)
        return np.stack(out)

    def confidences(self, hidden: Array, previous: NDArray[np.int64]) -> Array:
        if self.sees_markov:
            hidden = np.concatenate([hidden, self.w["markov_head.markov_w1.weight"][previous]], -1)
        return self.linear(hidden, "confidence_head.proj")[:, 0]


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize("name", CASES)
def test_blocks_after_a_growing_context_equal_numpy(name: str, tmp_path: Path) -> None:
    case = {key: value for key, value in CASES[name].items() if key != "tied"}
    tensors = write_block(tmp_path, **case)
    target = random_target(tied="tied" in CASES[name])
    expect_numpy(BlockDraft(load_block(tmp_path, target_config()), target), target, tensors, case)


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize(("bits", "size", "symmetric"), [(4, 32, True), (8, 32, False), (8, 16, True)])
def test_a_packed_head_is_that_of_the_numbers_that_its_integers_stand_for(
    bits: int, size: int, symmetric: bool, name: str, tmp_path: Path
) -> None:
    """All products of all layouts, the bias and the confidence among them; tables of tokens stay floats."""
    case = PACKED[name]
    before = write_block(tmp_path, hidden=32, intermediate=64, **case)
    numbers = pack_head(tmp_path, bits, size, symmetric)
    target = random_target(hidden=32)
    expect_numpy(BlockDraft(load_block(tmp_path, target.config), target), target, numbers, case)
    projections = {each for each in before if before[each].ndim == 2 and each not in TABLES}
    assert {each for each in before if not torch.equal(before[each], numbers[each])} == projections
    stored = deferred(defer_block(tmp_path, target.config))
    kept = {each.stored_name for each in stored.values() if each.tensors.quantized(each.stored_name) is not None}
    assert kept == (projections if size == 32 else set())


def expect_numpy(draft: BlockDraft, target: Decoder, tensors: dict[str, Tensor], case: dict[str, Any]) -> None:
    """The head computes after a growing context what NumPy does with its tensors."""
    head, config = draft.head, draft.head.config
    oracle = NumpyBlock(tensors, case)
    table = tensors.get("embed_tokens.weight", target.embedding)
    of_target = target.embedding if target.lm_head is None else target.lm_head.weight.T
    output = tensors.get("lm_head.weight", of_target)
    if "d2t" in tensors:
        assert draft.vocabulary is not None
        assert torch.equal(draft.vocabulary, torch.arange(len(tensors["d2t"])) + tensors["d2t"])

    rng = np.random.default_rng(1)
    features = rng.standard_normal((sum(ROUNDS), config.feature_size))
    execution, length = KeptContext(head), 0
    for more in ROUNDS:
        execution.keep(torch.from_numpy(features[length : length + more]).float())
        length += more
        block = torch.tensor([int(rng.integers(VOCAB)), *[MASK] * (config.block_size - 1)])
        hidden = execution.block(draft.embed(block))
        expected = oracle.hidden(features[:length], table[block].double().numpy())
        agree(hidden, expected)

        hidden, expected = hidden[config.first_slot :], expected[config.first_slot :]
        assert len(hidden) == config.drafted
        logits, wanted = draft.logits(hidden), expected @ output.double().numpy().T
        agree(logits, wanted)
        previous = rng.integers(VOCAB, size=config.drafted)
        state = None
        if config.markov is not None:
            biases = []
            for slot, token in enumerate(previous):
                state, bias = head.markov_bias(state, torch.tensor(token), hidden[slot])
                biases.append(bias)
            agree(torch.stack(biases), oracle.biases(expected, previous))
            assert (state is None) == (config.markov.kind != "rnn")
        if config.confidence is not Confidence.NONE:
            agree(head.confidence(hidden, torch.from_numpy(previous)), oracle.confidences(expected, previous))
