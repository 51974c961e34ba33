"""The toy's target in NumPy, written from Qwen3's formulas: an oracle that shares no code with exports or kernels."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

Array = NDArray[np.float32]


def toy_log_probabilities(
    checkpoint: Path, tokens: list[int], rounded: Callable[[Array], Array] = lambda x: x
) -> Array:
    """Log-probabilities of the token after each of `tokens`, float32 `[tokens, vocabulary]`.

    Weights of products, what they are multiplied by, and keys and values are `rounded` first.
    """
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    weights: dict[str, Array] = load_file(checkpoint / "model.safetensors")
    heads, kv_heads, size = (config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    angles = np.arange(len(tokens))[:, None] / theta ** (np.arange(0, size, 2) / size)
    cos, sin = (np.tile(each(angles), 2)[:, None].astype(np.float32) for each in (np.cos, np.sin))
    seen = np.tri(len(tokens), dtype=bool)

    def norm(x: Array, name: str) -> Array:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config["rms_norm_eps"]) * weights[f"{name}.weight"]

    def linear(x: Array, name: str) -> Array:
        return rounded(x) @ rounded(weights[f"{name}.weight"]).T

    def rotated(x: Array) -> Array:
        return x * cos + np.concatenate((-x[..., size // 2 :], x[..., : size // 2]), -1) * sin

    embedding = weights["model.embed_tokens.weight"]
    x = rounded(embedding)[tokens]
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        at = f"{layer}.self_attn"
        normed = norm(x, f"{layer}.input_layernorm")
        q, k, v = (linear(normed, f"{at}.{name}_proj").reshape(len(tokens), -1, size) for name in "qkv")
        q, k = rotated(norm(q, f"{at}.q_norm")), rotated(norm(k, f"{at}.k_norm"))
        k, v = (np.repeat(rounded(each), heads // kv_heads, 1) for each in (k, v))
        scores = np.where(seen, np.einsum("ihd,jhd->hij", q, k) / np.sqrt(size), -np.inf)
        share = np.exp(scores - scores.max(-1, keepdims=True))
        mixed: Any = np.einsum("hij,jhd->ihd", share / share.sum(-1, keepdims=True), v).reshape(len(tokens), -1)
        x = x + linear(mixed, f"{at}.o_proj")
        normed = norm(x, f"{layer}.post_attention_layernorm")
        gate = linear(normed, f"{layer}.mlp.gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(normed, f"{layer}.mlp.up_proj"), f"{layer}.mlp.down_proj")
    head = weights.get("lm_head.weight", embedding)
    logits = rounded(norm(x, "model.norm")) @ rounded(head).T
    logits = logits - logits.max(-1, keepdims=True)
    found: Array = (logits - np.log(np.exp(logits).sum(-1, keepdims=True))).astype(np.float32)
    return found
