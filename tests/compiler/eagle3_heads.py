"""Small random EAGLE3 heads on disk, in the layouts of the projects that train them."""

from __future__ import annotations

import json
from collections.abc import Callable, Set
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.compiler.eagle3_checkpoint import open_eagle3
from outrider.compiler.models.config import DecoderConfig, WeightType, config_from
from outrider.compiler.models.eagle3 import Eagle3Head
from outrider.compiler.models.eagle3_config import Eagle3Config, Eagle3Overrides
from outrider.plans.errors import CheckpointError

from .formats.packed import compressed_settings, compressed_tensors

Layout = Literal["safeailab", "specforge", "angelslim"]
LAYOUTS: tuple[Layout, ...] = ("safeailab", "specforge", "angelslim")
SAFETENSORS, PICKLED = "model.safetensors", "pytorch_model.bin"
WIDE: dict[str, Any] = {"target_hidden": 32, "intermediate": 64}
"""Sizes of a head for `target_config(hidden=32)`, all projections of which have a multiple of 32 inputs."""
Q, K, V, O = (f"midlayer.self_attn.{name}_proj.weight" for name in "qkvo")  # noqa: E741

NORMS = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
GIVEN = Eagle3Overrides()


def read_eagle3_config(path: Path, target: DecoderConfig, given: Eagle3Overrides = GIVEN) -> Eagle3Config:
    return open_eagle3(path, target, given).config


def load_eagle3(
    path: Path, target: DecoderConfig, dtype: WeightType = "float32", given: Eagle3Overrides = GIVEN
) -> Eagle3Head:
    return open_eagle3(path, target, given).load(dtype)


def defer_eagle3(path: Path, target: DecoderConfig, dtype: WeightType = "float32") -> Eagle3Head:
    return open_eagle3(path, target).defer(dtype)


def target_config(*, layers: int = 8, hidden: int = 16, vocab: int = 60) -> DecoderConfig:
    """The geometry of a target that a head may belong to."""
    sizes = {"hidden_size": hidden, "vocab_size": vocab, "num_hidden_layers": layers, "intermediate_size": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256}
    file = Path("config.json")
    return config_from({"model_type": "llama", **sizes, **heads}, file, 0, file, None)


class Draws:
    """Random tensors of a head."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def table(self, rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=self.generator)

    def matrix(self, rows: int, columns: int) -> Tensor:
        return self.table(rows, columns) / columns**0.5

    def vector(self, size: int, mean: float = 1) -> Tensor:  # not at its initial value, where a mistake would not show
        return mean + 0.3 * torch.randn(size, generator=self.generator)

    def vocabulary(self, vocab: int, draft_vocab: int) -> dict[str, Tensor]:
        """Which of the target's tokens are drafted."""
        ids = torch.randperm(vocab, generator=self.generator)[:draft_vocab].sort().values
        marked = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True)
        return {"d2t": ids - torch.arange(draft_vocab), "t2d": marked}


def write_head(folder: Path, config: dict[str, object], tensors: dict[str, Tensor], file: str = SAFETENSORS) -> None:
    """Write a head; None leaves a key of config.json out."""
    folder.mkdir(parents=True, exist_ok=True)
    present = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(present))
    _store(folder / file, tensors)


def write_eagle3(
    folder: Path,
    *,
    layout: Layout = "specforge",
    target_hidden: int = 16,
    hidden: int | None = None,
    vocab: int = 60,
    draft_vocab: int | None = None,
    intermediate: int = 40,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    own_embedding: bool | None = None,
    fc_norm: bool = False,
    norm_output: bool = False,
    rope_theta: float | None = None,
    aux_layer_ids: list[int] | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **config: object,
) -> dict[str, Tensor]:
    """Write a random head and return its tensors by stored name. `hidden` is the target's width unless given.

    SafeAILab's layout is a pickle without an embedding, and without a vocabulary map where it has no use; SpecForge's
    is safetensors without an embedding, AngelSlim's with one: `own_embedding` overrules. Other keywords go to
    config.json as they are; None leaves a key out.
    """
    hidden = hidden or target_hidden
    draft_vocab = draft_vocab or vocab
    own_embedding = layout == "angelslim" if own_embedding is None else own_embedding
    draws = Draws(seed)
    matrix, norm = draws.matrix, draws.vector
    tensors = {
        "fc.weight": matrix(hidden, 3 * target_hidden),
        **{f"midlayer.{name}.weight": norm(hidden) for name in NORMS},
        Q: matrix(heads * head_dim, 2 * hidden),
        K: matrix(kv_heads * head_dim, 2 * hidden),
        V: matrix(kv_heads * head_dim, 2 * hidden),
        O: matrix(hidden, heads * head_dim),
        "midlayer.mlp.gate_proj.weight": matrix(intermediate, hidden),
        "midlayer.mlp.up_proj.weight": matrix(intermediate, hidden),
        "midlayer.mlp.down_proj.weight": matrix(hidden, intermediate),
        "norm.weight": norm(hidden),
        "lm_head.weight": matrix(draft_vocab, hidden),
    }
    if fc_norm:
        tensors |= {f"fc_norm.{i}.weight": norm(target_hidden) for i in range(3)}
    if own_embedding:
        tensors["embed_tokens.weight"] = draws.table(vocab, hidden)
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    if draft_vocab < vocab or layout != "safeailab":
        tensors |= draws.vocabulary(vocab, draft_vocab)

    architectures = dict(
        zip(LAYOUTS, ("LlamaForCausalLM", "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"), strict=True)
    )
    values: dict[str, object] = {
        "architectures": [architectures[layout]],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": None if layout == "safeailab" else head_dim,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": rope_theta,
        "vocab_size": vocab,
        "draft_vocab_size": draft_vocab,
        "target_hidden_size": target_hidden if hidden != target_hidden else None,
        "fc_norm": fc_norm or None,
        "norm_output": norm_output or None,
    }
    if aux_layer_ids is not None and layout == "angelslim":
        values["aux_hidden_states_layer_ids"] = aux_layer_ids
    elif aux_layer_ids is not None:
        values["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": aux_layer_ids}
    write_head(folder, values | config, tensors, PICKLED if layout == "safeailab" else SAFETENSORS)
    return tensors


def change(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    """Rewrite the weights of a head after `edit`."""
    file = next(folder / name for name in (SAFETENSORS, PICKLED) if (folder / name).exists())
    tensors = load_file(file) if file.name == SAFETENSORS else torch.load(file, weights_only=True)
    edit(tensors)
    _store(file, tensors)


def change_config(folder: Path, **values: object) -> None:
    """Change keys of config.json, and keys of objects in it; None removes a key."""
    config = folder / "config.json"
    raw = json.loads(config.read_text())
    for key, value in values.items():
        inside = raw[key] | value if isinstance(value, dict) and isinstance(raw.get(key), dict) else value
        raw[key] = {k: v for k, v in inside.items() if v is not None} if isinstance(inside, dict) else inside
    config.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))


def _store(file: Path, tensors: dict[str, Tensor]) -> None:
    if file.name == PICKLED:
        torch.save(tensors, file)
    else:
        save_file(tensors, file)


def refused(
    folder: Path,
    *parts: str,
    target: DecoderConfig | None = None,
    opening: Callable[[Path, DecoderConfig], object] = open_eagle3,
) -> None:
    """The head in `folder` is refused, with one sentence that holds every part."""
    with pytest.raises(CheckpointError) as error:
        opening(folder, target or target_config())
    for part in parts:
        assert part in str(error.value), str(error.value)


TABLES = ("embed_tokens.weight", "markov_head.markov_w1.weight", "verifier_lm_head.weight")


def pack_head(
    folder: Path, bits: int = 8, size: int | None = 32, symmetric: bool = True, left: Set[str] = frozenset()
) -> dict[str, Tensor]:
    """Pack all projections of a head but those `left`, in place; return the numbers of its tensors by their names
    before.

    Groups have `size` inputs, or are whole rows.
    """
    found: dict[str, Tensor] = {}

    def pack(tensors: dict[str, Tensor]) -> None:
        for name, tensor in list(tensors.items()):
            found[name] = tensor
            if tensor.ndim != 2 or name in TABLES or name in left:
                continue
            parts, numbers = compressed_tensors(tensor.float(), bits, size, symmetric, torch.bfloat16)
            found[name] = torch.from_numpy(np.ascontiguousarray(numbers))
            del tensors[name]
            for last, part in parts.items():
                held = part if isinstance(part, Tensor) else torch.from_numpy(np.ascontiguousarray(part))
                tensors[f"{name.removesuffix('.weight')}.{last}"] = held.contiguous()

    change(folder, pack)
    ignored = [name.removesuffix(".weight") for name in sorted(left)]
    change_config(folder, quantization_config=compressed_settings(bits, size, symmetric) | {"ignore": ignored})
    return found
