"""The decoder against transformers, on small random checkpoints: what `test_published_configs` does not have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from outrider.compiler.checkpoint import load_decoder
from outrider.compiler.export import export_target
from outrider.compiler.models.decoder import Decoder
from outrider.compiler.models.eager import sequence_logits
from outrider.compiler.models.rope import RopeScaling
from outrider.compiler.opening import read_config

from .conftest import MakeCheckpoint

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LINEAR = {"rope_type": "linear", "factor": 2.0}
YARN_AS_IT_IS = {**YARN, "beta_fast": 8.0, "truncate": False}
GPT_OSS = {"head_dim": 16, "sliding_window": 20, "num_local_experts": 6, "num_experts_per_tok": 4}
EXPERTS = {"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2}

CASES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {}),
    "llama-wide-heads": ("llama", {"head_dim": 12}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_theta": 10000.0, **LINEAR}}),
    "llama-llama3": ("llama", {"rope_parameters": {"rope_theta": 5000.0, **LLAMA3}}),
    "ministral-mixed": (
        "ministral",
        {"head_dim": 8, "sliding_window": 9, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "olmo2": ("olmo2", {"rms_norm_eps": 1e-6}),
    "smollm3-window": (
        "smollm3",
        {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 9, "pad_token_id": 0},
    ),
    "qwen2-window": (
        "qwen2",
        {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen2-yarn": ("qwen2", {"rope_parameters": {"rope_theta": 10000.0, **YARN}}),
    "qwen3": ("qwen3", {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen3_moe-mixed": (
        "qwen3_moe",
        {"head_dim": 16, "num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [1], **EXPERTS},
    ),
    "qwen3_moe-window": (
        "qwen3_moe",
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1, **EXPERTS},
    ),
    "gpt_oss": (
        "gpt_oss",
        {**GPT_OSS, "num_hidden_layers": 3, "rope_parameters": {"rope_theta": 1e4, **YARN_AS_IT_IS}},
    ),
    "gpt_oss-mixed": (
        "gpt_oss",
        {**GPT_OSS, "layer_types": ["full_attention", "sliding_attention"], "swiglu_alpha": 1.3, "swiglu_limit": 0.9},
    ),
    "gpt_oss-no-biases": ("gpt_oss", {**GPT_OSS, "attention_bias": False, "tie_word_embeddings": True}),
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


def test_sharded_checkpoint_equals_transformers(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    oracle = make_checkpoint("qwen3", max_shard_size="20KB", head_dim=16)
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


def test_a_window_as_wide_as_the_kv_cache_is_none(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    make_checkpoint("mistral", sliding_window=64)
    decoder = load_decoder(tmp_path)
    found = [[node.op_type for node in export_target(decoder, slots).graph].count("WindowBias") for slots in (64, 128)]
    assert found == [0, 1]
