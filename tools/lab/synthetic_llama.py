"""Random Llama checkpoints of published geometries, written a layer at a time, so that the memory of one will do.

For what a large model costs to build, to load and to run. Its text means nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor


@dataclass(frozen=True)
class LlamaShape:
    """Geometry of a Llama whose head is its embedding."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def parameters(self) -> int:
        attention = 2 * self.hidden**2 + 2 * self.hidden * self.kv_heads * self.head_dim
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.vocabulary * self.hidden + self.layers * layer + self.hidden

    def layer_tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the sizes of a layer's weights by name."""
        hidden, kv = self.hidden, self.kv_heads * self.head_dim
        return {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (self.intermediate, hidden),
            "mlp.up_proj": (self.intermediate, hidden),
            "mlp.down_proj": (hidden, self.intermediate),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }

    def config(self, context: int) -> dict[str, object]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": context,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "eos_token_id": 0,
        }


SHAPES = {"llama-3.2-1b": LlamaShape(16, 2048, 8192, 32, 8, 128256)}
"""Published geometries by name."""


def write_llama(
    shape: LlamaShape, folder: Path, context: int, seed: int, progress: Callable[[int, int, str], None]
) -> None:
    """Write `config.json` and bfloat16 weights, a file for the embedding and one for each layer, into `folder`.

    A matrix has variance 1 / inputs, so that every layer adds about as much as there is.
    """
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    weight_map: dict[str, str] = {}
    files = shape.layers + 1
    for index, group in enumerate(_groups(shape, generator)):
        name = f"model-{index + 1:05d}-of-{files:05d}.safetensors"
        progress(index, files, f"writing {name}")
        save_file(group, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(group, name)
    index_file = {"metadata": {"total_size": 2 * shape.parameters}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_file, indent=1) + "\n", encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(shape.config(context), indent=1) + "\n", encoding="utf-8")


def _groups(shape: LlamaShape, generator: torch.Generator) -> Iterator[dict[str, Tensor]]:
    """Draw the tensors of the embedding, then those of one layer after another."""

    def matrix(outputs: int, inputs: int, spread: float) -> Tensor:
        return torch.empty(outputs, inputs, dtype=torch.bfloat16).normal_(0.0, spread, generator=generator)

    def ones() -> Tensor:
        return torch.ones(shape.hidden, dtype=torch.bfloat16)

    yield {"model.embed_tokens.weight": matrix(shape.vocabulary, shape.hidden, 1.0), "model.norm.weight": ones()}
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        yield {
            f"{prefix}{name}.weight": matrix(*size, size[1] ** -0.5) if len(size) == 2 else ones()
            for name, size in shape.layer_tensors().items()
        }
