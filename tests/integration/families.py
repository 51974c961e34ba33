"""Toys of every model family: a random checkpoint as transformers writes it, a drafter of its kind, a recipe.

Sizes can be quantised, and every window is far shorter than the prompts.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from outrider.compiler.held_out import read_text
from tests.compiler.conftest import new_model
from tests.conftest import HELD_OUT

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2],
    "long_factor": [1.0, 2.0, 4.0],
    "original_max_position_embeddings": 64,
    "partial_rotary_factor": 0.75,
}


@dataclass(frozen=True)
class Toy:
    """`changes` are what config.json says beside SIZES, `spread` the deviation of the weights of projections: large
    enough that choices vary, small enough that rounding changes few of them, which norms of small sums enlarge.
    `experts`: layers have experts. `states`: layers keep states, so that only the backend onnxruntime-cpu runs them,
    and draft models are Llamas."""

    family: str
    changes: dict[str, Any]
    spread: float = 0.2
    experts: bool = False
    states: bool = False


TOYS: dict[str, Toy] = {
    "llama": Toy("llama", {}),
    "mistral": Toy("mistral", {"sliding_window": 20}),
    "ministral": Toy(
        "ministral", {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 24}
    ),
    "qwen2": Toy("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": Toy("qwen3", {}),
    "qwen3_moe": Toy(
        "qwen3_moe",
        {"moe_intermediate_size": 32, "num_experts": 6, "num_experts_per_tok": 2},
        experts=True,
    ),
    "gpt_oss": Toy(
        "gpt_oss",
        {
            "sliding_window": 12,
            "num_local_experts": 6,
            "num_experts_per_tok": 4,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_theta": 10000.0,
                "rope_type": "yarn",
                "factor": 4.0,
                "beta_fast": 8.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
        },
        spread=0.12,
        experts=True,
    ),
    "gemma": Toy("gemma", {}),
    "gemma2": Toy("gemma2", {"sliding_window": 20, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0}),
    "gemma3": Toy(
        "gemma3_text",
        {
            "num_hidden_layers": 3,
            "sliding_window": 10,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 2.0},
                "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
            },
        },
    ),
    "phi3": Toy("phi3", {"sliding_window": 20, "head_dim": None, "rope_parameters": LONGROPE}),
    "olmo2": Toy("olmo2", {"head_dim": None}),
    "olmo3": Toy(
        "olmo3",
        {
            "num_hidden_layers": 3,
            "sliding_window": 15,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "head_dim": None,
        },
    ),
    "smollm3": Toy("smollm3", {"head_dim": None, "no_rope_layer_interval": 2}),
    "granite": Toy(
        "granite",
        {
            "head_dim": None,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
    ),
    "qwen3_5": Toy(
        "qwen3_5_text",
        {
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 24,
            "max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            },
        },
        spread=0.07,
        states=True,
    ),
    "lfm2": Toy(
        "lfm2",
        {
            "head_dim": None,
            "num_hidden_layers": 4,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "block_multiple_of": 32,
            "max_position_embeddings": 4096,
        },
        states=True,
    ),
}
RECIPE = """\
name: {name}
held_out: held_out.jsonl
target: {{checkpoint: target}}
drafters:
  - {{name: ngram, kind: ngram, max_context: 3, min_context: 1, max_draft: 6}}
  - {{name: chain, kind: model, checkpoint: drafter, gamma: 1}}
  - {{name: bushy, kind: model, checkpoint: drafter, tree: {{top_k: 3, depth: 1, nodes: 7}}}}
capacity: {{context: 160, prefill_chunk: 16, branches: 16, batching: true}}
"""
ROUTERS = ("mlp.gate.weight", "mlp.router.weight")
DRAFTERS = ("none", "ngram", "chain", "bushy")


def calibration_text(folder: Path) -> Path:
    """Write a little of the reference's calibration text."""
    text, lines = folder / "text.jsonl", read_text(HELD_OUT.with_name("calibration.jsonl.gz")).splitlines()
    text.write_text("".join(f"{line}\n" for line in lines[:2]))
    return text


def _random_model(family: str, changes: dict[str, Any], spread: float, generator: torch.Generator) -> PreTrainedModel:
    model = new_model(family, **{key: value for key, value in (SIZES | changes).items() if value is not None})
    for name, parameter in model.named_parameters():
        # Stored norms of Gemma lack 1; a mistake with it would show either way.
        centre, deviation = (0.8, 0.2) if "norm" in name else (0.0, spread)
        if name.endswith(ROUTERS):
            deviation *= 5  # of experts that are nearly as good, rounding a token might choose the other
        parameter.data = centre + deviation * torch.randn(parameter.shape, generator=generator)
    return model


def write_toy(name: str, folder: Path, tokenizer: Path) -> None:
    """Write the recipe of a toy and what it names; `tokenizer` is a checkpoint with a tokenizer of its vocabulary, and
    beside it lies held-out text."""
    toy = TOYS[name]
    generator = torch.Generator().manual_seed(1)
    model = _random_model(toy.family, toy.changes, toy.spread, generator)
    model.save_pretrained(folder / "target")
    if toy.states:
        model = _random_model("llama", {"max_position_embeddings": 4096}, toy.spread, generator)
    else:
        for parameter in model.parameters():
            parameter.data += 0.05 * parameter.std(correction=0) * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder / "drafter")
    for part in ("target", "drafter"):
        shutil.copy(tokenizer / "tokenizer.json", folder / part)
    (folder / "target" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}), encoding="utf-8")
    shutil.copy(tokenizer.parent / "held_out.jsonl", folder)
    calibration_text(folder)
    (folder / "model.yaml").write_text(RECIPE.format(name=name), encoding="utf-8")
