"""Small random block drafters on disk, in the layouts of the projects that train them, and one row of context."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.compiler.block_checkpoint import open_block
from outrider.compiler.models.block import BlockHead
from outrider.compiler.models.block_config import BlockConfig
from outrider.compiler.models.config import DecoderConfig, WeightType
from outrider.compiler.models.decoder import Decoder, HeadNorms, norm_heads
from outrider.compiler.models.eagle3_config import Eagle3Config
from outrider.compiler.models.rope import rope_tables

from . import eagle3_heads
from .eagle3_heads import Draws, target_config, write_head

Array = NDArray[np.float64]
Layout = Literal["zlab", "jetspec", "deepspec", "speculators-dflash", "speculators-dspark"]
LAYOUTS: tuple[Layout, ...] = ("zlab", "jetspec", "deepspec", "speculators-dflash", "speculators-dspark")
HIDDEN, VOCAB, MASK = 16, 60, 59
Q, K = "layers.0.self_attn.q_proj.weight", "layers.0.self_attn.k_proj.weight"
UP = "layers.1.mlp.up_proj.weight"

refused = partial(eagle3_heads.refused, opening=open_block)


def read_block_config(path: Path, target: DecoderConfig) -> BlockConfig:
    return open_block(path, target).config


def load_block(path: Path, target: DecoderConfig, dtype: WeightType = "float32") -> BlockHead:
    return open_block(path, target).load(dtype)


def defer_block(path: Path, target: DecoderConfig, dtype: WeightType = "float32") -> BlockHead:
    return open_block(path, target).defer(dtype)


def write_block(
    folder: Path,
    *,
    layout: Layout = "zlab",
    hidden: int = HIDDEN,
    streams: tuple[int, ...] = (2, 4, 7),
    layers: int = 2,
    intermediate: int = 40,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    bias: bool = False,
    block_size: int = 5,
    markov: tuple[str, int] | None = None,
    confidence: Literal["hidden", "markov"] | None = None,
    draft_vocab: int | None = None,
    own_embedding: bool = True,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    decoder: dict[str, object] | None = None,
    vocab: int = VOCAB,
    mask: int = MASK,
    target_layers: int = 8,
    **config: object,
) -> dict[str, Tensor]:
    """Write a random head for `target_config()`, or for a target of the sizes given; return its tensors by stored name.

    `streams` are the target's streams that the head reads, numbered by the layer that they enter. `own_embedding` is
    of speculators' layout. Keywords of `decoder` go to the layers' geometry, other ones to config.json as they are;
    None leaves a key out.
    """
    draws = Draws(seed)
    matrix, vector = draws.matrix, draws.vector
    draft_vocab = draft_vocab or vocab
    tensors = {
        "fc.weight": matrix(hidden, len(streams) * hidden),
        "hidden_norm.weight": vector(hidden),
        "norm.weight": vector(hidden),
    }
    for index in range(layers):
        layer, attention = f"layers.{index}.", f"layers.{index}.self_attn."
        tensors |= {
            f"{layer}input_layernorm.weight": vector(hidden),
            f"{layer}post_attention_layernorm.weight": vector(hidden),
            f"{attention}q_norm.weight": vector(head_dim),
            f"{attention}k_norm.weight": vector(head_dim),
            f"{layer}mlp.gate_proj.weight": matrix(intermediate, hidden),
            f"{layer}mlp.up_proj.weight": matrix(intermediate, hidden),
            f"{layer}mlp.down_proj.weight": matrix(hidden, intermediate),
        }
        sizes = {"q": heads, "k": kv_heads, "v": kv_heads}
        tensors |= {f"{attention}{each}_proj.weight": matrix(n * head_dim, hidden) for each, n in sizes.items()}
        tensors[f"{attention}o_proj.weight"] = matrix(hidden, heads * head_dim)
        if bias:
            tensors |= {f"{attention}{each}_proj.bias": vector(n * head_dim, 0) for each, n in sizes.items()}
            tensors[f"{attention}o_proj.bias"] = vector(hidden, 0)
    if markov is not None:
        kind, rank = markov
        tensors["markov_head.markov_w1.weight"] = draws.table(vocab, rank)
        tensors["markov_head.markov_w2.weight"] = matrix(draft_vocab, rank)
        if kind != "vanilla":
            name, rows, columns = {
                "gated": ("gate_proj", rank, hidden + rank),
                "rnn": ("joint_proj", 3 * rank, hidden + 2 * rank),
            }[kind]
            tensors[f"markov_head.{name}.weight"] = matrix(rows, columns)
            tensors[f"markov_head.{name}.bias"] = vector(rows, 0)
    if confidence is not None:
        width = hidden + (markov[1] if markov is not None and confidence == "markov" else 0)
        tensors["confidence_head.proj.weight"] = matrix(1, width)
        tensors["confidence_head.proj.bias"] = vector(1, 0)
    speculators = layout.startswith("speculators")
    if layout == "deepspec" or (speculators and own_embedding):
        tensors["embed_tokens.weight"] = draws.table(vocab, hidden)
    if layout == "deepspec" or speculators:
        tensors["lm_head.weight"] = matrix(draft_vocab, hidden)
    if draft_vocab < vocab:
        tensors |= draws.vocabulary(vocab, draft_vocab)
    tensors = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}

    geometry = {
        "model_type": "qwen3",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "attention_bias": bias,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500.0,
        "vocab_size": vocab,
        "layer_types": ["full_attention"] * layers,
        "tie_word_embeddings": False,
    } | (decoder or {})
    heads_of = {
        "markov_rank": 0 if markov is None else markov[1],
        "markov_head_type": None if markov is None else markov[0],
        "enable_confidence_head": confidence is not None,
        "confidence_head_with_markov": confidence == "markov",
    }
    left = [stream - 1 for stream in streams]
    values: dict[str, object] = {"torch_dtype": "float32"}
    if layout in ("zlab", "jetspec"):
        dflash: dict[str, object] = {"target_layer_ids": left, "mask_token_id": mask}
        if layout == "jetspec":
            dflash["causal_head"] = True
        values |= geometry | {
            "architectures": ["DFlashDraftModel"],
            "block_size": block_size,
            "num_target_layers": target_layers,
            "dflash_config": dflash,
        }
    elif layout == "deepspec":
        values |= geometry | heads_of | {
            "architectures": ["Qwen3DSparkModel"],
            "block_size": block_size,
            "num_target_layers": target_layers,
            "target_layer_ids": left,
            "mask_token_id": mask,
        }  # fmt: skip
    else:
        kind = layout.removeprefix("speculators-")
        values |= (heads_of if kind == "dspark" else {}) | {
            "architectures": ["DSparkDraftModel" if kind == "dspark" else "DFlashDraftModel"],
            "speculators_model_type": kind,
            "speculators_version": "0.5.0",
            "speculators_config": {
                "algorithm": kind,
                "default_proposal_method": "greedy",
                "proposal_methods": [
                    {"proposal_type": "greedy", "speculative_tokens": block_size - (kind == "dflash")}
                ],
                "verifier": {"name_or_path": "some/model", "architectures": ["Qwen3ForCausalLM"]},
            },
            "transformer_layer_config": {key: value for key, value in geometry.items() if value is not None},
            "draft_vocab_size": draft_vocab,
            "block_size": block_size,
            "aux_hidden_state_layer_ids": list(streams),
            "mask_token_id": mask,
            "sliding_window_non_causal": False,
        }
    write_head(folder, values | config, tensors)
    return tensors


def random_target(*, tied: bool = False, seed: int = 9, hidden: int = HIDDEN) -> Decoder:
    """A target with random weights, for its embedding and its output weights."""
    config = DecoderConfig(**(target_config(hidden=hidden).__dict__ | {"tie_embeddings": tied}))
    target = Decoder(config).requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for parameter in target.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return target


class NumpyLayers:
    """Formulas of a head's layers in float64, by the names of its stored tensors."""

    theta, stretch = 500.0, 1.0

    def __init__(self, tensors: dict[str, Tensor], heads: int, kv_heads: int, head_dim: int) -> None:
        self.w = {name: tensor.double().numpy() for name, tensor in tensors.items() if tensor.is_floating_point()}
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim

    def linear(self, x: Array, name: str) -> Array:
        return np.asarray(x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", 0.0))

    def norm(self, x: Array, name: str) -> Array:
        return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * self.w[f"{name}.weight"])

    def rotated(self, x: Array, positions: Array | int) -> Array:
        """Heads `[..., heads, head_dim]` at `positions` `[..., 1, 1]`."""
        half = self.head_dim // 2
        angle = positions / self.stretch * self.theta ** (-np.arange(half) / half)
        first, second = x[..., :half], x[..., half:]
        turned = first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)
        return np.concatenate(turned, axis=-1)

    def attended(self, query: Array, keys: Array, values: Array) -> Array:
        """A query `[heads, head_dim]` over keys and values `[T, kv_heads, head_dim]`, flat."""
        found = []
        for head, q in enumerate(query):
            group = head * self.kv_heads // self.heads
            scores = keys[:, group] @ q / np.sqrt(self.head_dim)
            weights = np.exp(scores - scores.max())
            found.append(weights / weights.sum() @ values[:, group])
        return np.concatenate(found)

    def unit(self, x: Array, prefix: str) -> Array:
        """The gated unit."""
        gate, up = self.linear(x, f"{prefix}.gate_proj"), self.linear(x, f"{prefix}.up_proj")
        return self.linear(gate / (1 + np.exp(-gate)) * up, f"{prefix}.down_proj")


def agree(ours: Tensor, expected: Array) -> None:
    torch.testing.assert_close(ours.detach().double(), torch.from_numpy(expected), rtol=0, atol=1e-5)


class KeptRow:
    """An execution over one row: new tokens at `positions` see all kept keys and values, and those up to their own,
    which are kept as well."""

    keeps, causal = True, True

    def __init__(self, config: BlockConfig | Eagle3Config, layers: int = 1) -> None:
        self.config = config
        tables = rope_tables(config.rope_theta, config.head_dim, 64, config.rope_scaling)
        self.cos, self.sin = (torch.from_numpy(table) for table in tables)
        empty = torch.empty(config.num_kv_heads, 0, config.head_dim)
        self.kept = [(empty, empty)] * layers
        self.positions: Sequence[int] = ()

    @property
    def length(self) -> int:
        return self.kept[0][0].shape[1]

    def rotate(self, x: Tensor, heads: int) -> Tensor:
        first, second = x.view(-1, heads, self.config.head_dim).chunk(2, dim=-1)
        cos, sin = self.cos[list(self.positions), None], self.sin[list(self.positions), None]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).view(x.shape)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = (torch.cat((kept, self.heads(x)), 1) for kept, x in zip(self.kept[layer], (k, v), strict=True))
        return keys, values

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, norms: HeadNorms = (None, None), sinks: Tensor | None = None
    ) -> Tensor:
        assert sinks is None, "heads have none"
        q = self.rotate(norm_heads(q, norms[0]), self.config.num_heads)
        k = self.rotate(norm_heads(k, norms[1]), self.config.num_kv_heads)
        past, size, (keys, values) = self.length, len(self.positions), self.append(layer, k, v)
        seen = torch.ones(size, past + size, dtype=torch.bool)
        out = torch.nn.functional.scaled_dot_product_attention(
            self.heads(q)[None],
            keys[None],
            values[None],
            attn_mask=seen.tril(past) if self.causal else seen,
            enable_gqa=True,
        )
        if self.keeps:
            self.kept[layer] = keys, values
        return out[0].transpose(0, 1).reshape(q.shape)

    def heads(self, x: Tensor) -> Tensor:
        return x.view(len(self.positions), -1, self.config.head_dim).transpose(0, 1)


class KeptContext(KeptRow):
    """An execution over one row of a block head: the context so far, and one block after it, which is not kept."""

    keeps = False

    def __init__(self, head: BlockHead) -> None:
        super().__init__(head.config, head.config.num_layers)
        self.head, self.causal = head, head.config.causal

    def keep(self, features: Tensor) -> None:
        """Append the context tokens with these features."""
        context = self.head.fuse(features)
        self.positions = range(self.length, self.length + context.shape[-2])
        appended = []
        for layer in range(len(self.kept)):
            k, v = self.head.context_kv(context, layer)
            k = self.rotate(norm_heads(k, self.head.layers[layer].k_norm), self.config.num_kv_heads)  # type: ignore[arg-type]
            appended.append(self.append(layer, k, v))
        self.kept = appended

    def block(self, embedded: Tensor) -> Tensor:
        """Return the hidden states of a block after the context."""
        self.positions = range(self.length, self.length + embedded.shape[-2])
        return self.head.run(embedded, self)
