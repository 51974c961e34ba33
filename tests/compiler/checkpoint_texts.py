"""Checkpoints without weights, and what the compiler and the runtime read of their texts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from outrider.compiler.models.config import read_folder_config
from outrider.compiler.text import CheckpointText, read_text
from outrider.plans.manifest import Geometry
from outrider.plans.tokenizer import Tokenizer
from outrider.runtime.text.prompt import choose_prompt, prepare_prompt


def checkpoint(
    folder: Path, tokenizer: tokenizers.Tokenizer, settings: Mapping[str, Any], ends: object = None, padding: int = 0
) -> Path:
    """A checkpoint's files but for weights; `settings` are its `tokenizer_config.json`."""
    folder.mkdir(exist_ok=True)
    config = {"model_type": "qwen3", "vocab_size": tokenizer.get_vocab_size() + padding, "hidden_size": 64}
    config |= {"intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "rms_norm_eps": 1e-6}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def read(folder: Path) -> CheckpointText:
    return read_text(folder, read_folder_config(folder))


def loaded(folder: Path) -> Tokenizer:
    """The tokenizer of the plan that is made of the checkpoint."""
    text = read(folder)
    text.write(folder / "plan")
    return Tokenizer.load(folder / "plan", text.text.special_tokens)


def prompt_ids(messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer) -> list[int]:
    geometry = Geometry.model_construct(context=4096, vocab_size=tokenizer.vocab_size)
    return prepare_prompt(choose_prompt(None, messages, tokenizer, geometry), [], (), tokenizer, geometry).ids
