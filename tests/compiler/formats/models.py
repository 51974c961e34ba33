"""Small random models of every family, whose sizes all formats can pack, and a byte-level tokenizer for them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from tests.compiler.conftest import new_model
from tests.conftest import REPOSITORY, train_byte_level

VOCABULARY = 320
SIZES: dict[str, object] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
    "bos_token_id": 0,
}
TEXT = "Licensed under the Apache License, Version 2.0\n"


def random_model(family: str = "llama", seed: int = 0, **changes: object) -> PreTrainedModel:
    """A model whose logits are a few units apart."""
    model = new_model(family, **(SIZES | changes))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        centre, spread = (1.0, 0.3) if "norm" in name else (0.0, 0.06)
        parameter.data = centre + spread * torch.randn(parameter.shape, generator=generator)
    return model.eval()


@torch.no_grad()
def logits_of(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """transformers' logits `[N, vocab]` at every position."""
    found: torch.Tensor = model(torch.tensor([ids]), use_cache=False).logits[0].float()
    return found


def tokenizer(text: str = "LICENSE") -> Tokenizer:
    """A tokenizer of VOCABULARY tokens, trained on a file of the repository."""
    return train_byte_level([(REPOSITORY / text).read_text(encoding="utf-8")], VOCABULARY, ["<|begin|>", "<|end|>"])


def write_tokenizer(folder: Path) -> None:
    """The tokenizer's files in a checkpoint folder."""
    tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
