"""The decoder against transformers, on small random checkpoints of every family and feature."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from compiler.checkpoint import load_decoder
from compiler.models.decoder import Decoder
from compiler.models.eager import sequence_logits
from compiler.models.rope import RopeScaling
from compiler.opening import read_config

from .conftest import MakeCheckpoint

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "factor": 2.0}

CASES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-wide-heads": ("llama", {"head_dim": 12}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-no-gqa": ("llama", {"num_key_value_heads": 4}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_theta": 10000.0, **LINEAR}}),
    "llama-llama3": ("llama", {"rope_parameters": {"rope_theta": 5000.0, **LLAMA3}}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-wide-heads": ("mistral", {"sliding_window": None, "head_dim": 12, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {"rms_norm_eps": 1e-5}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-yarn": ("qwen2", {"rope_parameters": {"rope_theta": 10000.0, **YARN}}),
    "qwen3": ("qwen3", {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen3-tied": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-biases": ("qwen3", {"head_dim": 8, "attention_bias": True}),
    "qwen3-yarn": ("qwen3", {"head_dim": 16, "rope_parameters": {"rope_theta": 1e6, **YARN}}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_tokens_equal_transformers(
    case: str, tmp_path: Path, make_checkpoint: MakeCheckpoint
) -> None:
    family, changes = CASES[case]
    oracle = make_checkpoint(family, **changes)
    model = load_decoder(tmp_path)
    prompt = _prompt(100, model)

    torch.testing.assert_close(sequence_logits(model, prompt), _oracle_logits(oracle, prompt), rtol=0, atol=1e-4)
    assert _greedy(lambda ids: sequence_logits(model, ids), prompt[:5]) == _greedy(
        lambda ids: _oracle_logits(oracle, ids), prompt[:5]
    )


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_sharded_checkpoint_equals_transformers(family: str, tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    oracle = make_checkpoint(family, max_shard_size="20KB", head_dim=16)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    model = load_decoder(tmp_path)
    prompt = _prompt(30, model)
    torch.testing.assert_close(sequence_logits(model, prompt), _oracle_logits(oracle, prompt), rtol=0, atol=1e-4)


def test_bfloat16_checkpoint_computes_in_float32(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    make_checkpoint("qwen3", dtype=torch.bfloat16, head_dim=16, tie_word_embeddings=True)
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    model = load_decoder(tmp_path)
    prompt = _prompt(60, model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    torch.testing.assert_close(sequence_logits(model, prompt), _oracle_logits(oracle, prompt), rtol=0, atol=1e-4)


def test_replaced_rope_scaling_equals_transformers_with_it(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    make_checkpoint("qwen2")
    parameters = {"rope_theta": 10000.0, **YARN}
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, rope_parameters=parameters, dtype=torch.float32).eval()
    model = load_decoder(tmp_path, rope_scaling=RopeScaling.from_huggingface(YARN))
    prompt = _prompt(100, model)
    torch.testing.assert_close(sequence_logits(model, prompt), _oracle_logits(oracle, prompt), rtol=0, atol=1e-4)


def test_no_key_value_heads_means_one_for_each_query_head(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    make_checkpoint("llama", num_key_value_heads=4)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"num_key_value_heads": 4', '"num_key_value_heads": null'))
    assert load_decoder(tmp_path).config.num_kv_heads == 4


def test_end_tokens_of_the_generation_config_win(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    make_checkpoint("llama", eos_token_id=3)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert read_config(tmp_path).eos_token_ids == (5, 6)
    (tmp_path / "generation_config.json").unlink()
    assert read_config(tmp_path).eos_token_ids == (3,)


def _prompt(length: int, model: Decoder) -> list[int]:
    generator = torch.Generator().manual_seed(1)
    ids: list[int] = torch.randint(model.config.vocab_size, (length,), generator=generator).tolist()
    return ids


@torch.no_grad()
def _oracle_logits(oracle: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    logits: torch.Tensor = oracle(torch.tensor([token_ids]), use_cache=False).logits[0].float()
    return logits


def _greedy(logits, prompt: list[int], count: int = 64) -> list[int]:  # type: ignore[no-untyped-def]
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(logits(ids)[-1].argmax()))
    return ids[len(prompt) :]
