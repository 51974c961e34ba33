"""The decoder against transformers: published configurations with small sizes, mostly in the spelling from before
transformers 5, and settings that these do not have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from outrider.compiler.checkpoint import load_decoder
from outrider.compiler.export import export_target
from outrider.compiler.models.decoder import Decoder
from outrider.compiler.models.eager import sequence_logits
from outrider.compiler.opening import read_config
from outrider.plans.errors import CheckpointError

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


def test_end_tokens_of_the_generation_config_win_and_absent_key_value_heads_are_the_query_heads(
    tmp_path: Path, make_checkpoint: MakeCheckpoint
) -> None:
    make_checkpoint("llama", eos_token_id=3, num_key_value_heads=4)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"num_key_value_heads": 4', '"num_key_value_heads": null'))
    assert load_decoder(tmp_path).config.num_kv_heads == 4
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
    for slots, window in ((64, 0), (128, 64)):
        nodes = [node for node in export_target(decoder, slots).graph if node.op_type == "BranchAttention"]
        assert {node.attributes.get_int("window", 0) for node in nodes} == {window}


SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": [1, 2], "torch_dtype": "bfloat16", "use_cache": True,
}  # fmt: skip
GEMMA: dict[str, Any] = {"head_dim": 16, "rms_norm_eps": 1e-6, "max_position_embeddings": 8192}
GEMMA3 = GEMMA | {
    "model_type": "gemma3_text", "attn_logit_softcapping": None, "final_logit_softcapping": None, "rope_theta": 1000000,
    "cache_implementation": "hybrid", "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 16,
    "rope_local_base_freq": 10000, "rope_scaling": None, "sliding_window": 24, "sliding_window_pattern": 3,
}  # fmt: skip
PHI3: dict[str, Any] = {"model_type": "phi3", "original_max_position_embeddings": 64, "rope_theta": 10000.0}


def longrope(pairs: int, **more: object) -> dict[str, object]:
    tables = {"long_factor": [1 + 0.7 * i for i in range(pairs)], "short_factor": [1 + 0.05 * i for i in range(pairs)]}
    return {"type": "longrope", **tables, **more}


CONFIGS: dict[str, dict[str, Any]] = {
    "mistral-7b-v0.1": {"model_type": "mistral", "hidden_act": "silu", "rope_theta": 10000.0, "sliding_window": 24},
    "ministral-8b": {"model_type": "mistral", "head_dim": 16, "rope_theta": 1e8, "sliding_window": 24},
    "a-switch-that-mistral-does-not-read": {
        "model_type": "mistral", "sliding_window": 24, "use_sliding_window": False,
    },
    "gemma-2b": GEMMA | {"model_type": "gemma", "hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"},
    "gemma-2b-first": GEMMA | {"model_type": "gemma", "hidden_act": "gelu", "hidden_activation": None},
    "gemma-2-2b": GEMMA | {
        "model_type": "gemma2", "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0, "sliding_window": 24,
        "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 24,
    },
    "gemma-3-4b": GEMMA3 | {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
    "gemma-3-270m": {key: value for key, value in GEMMA3.items() if key != "sliding_window_pattern"} | {
        "_sliding_window_pattern": 6, "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "use_bidirectional_attention": False,
    },
    "phi-3-mini-4k": PHI3 | {"max_position_embeddings": 64, "rope_scaling": None, "sliding_window": 23},
    "phi-3-mini-128k": PHI3 | {
        "max_position_embeddings": 2048, "rope_scaling": longrope(4), "sliding_window": 262144, "attention_bias": False,
    },
    "phi-4-mini": PHI3 | {
        "max_position_embeddings": 2048, "partial_rotary_factor": 0.75, "rope_scaling": longrope(3), "mlp_bias": False,
        "tie_word_embeddings": True, "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False,
    },
    "olmo-2": {"model_type": "olmo2", "rope_scaling": None, "rope_theta": 500000, "rms_norm_eps": 1e-6},
    "olmo-3": {
        "model_type": "olmo3", "layer_types": ["sliding_attention"] * 3 + ["full_attention"], "rope_theta": 500000,
        "sliding_window": 24, "rope_scaling": {
            "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
            "original_max_position_embeddings": 64, "rope_type": "yarn",
        },
    },
    "olmo-3-without-a-pattern": {"model_type": "olmo3", "sliding_window": 24, "sliding_window_pattern": 2},
    "smollm3": {
        "model_type": "smollm3", "layer_types": ["full_attention"] * 4, "max_window_layers": 28, "mlp_bias": False,
        "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0], "pretraining_tp": 2, "rope_theta": 5000000.0,
        "sliding_window": None, "use_sliding_window": False,
    },
    "granite-3.3": {
        "model_type": "granite", "attention_multiplier": 0.125, "embedding_multiplier": 12.0, "logits_scaling": 16.0,
        "residual_multiplier": 0.22, "rope_theta": 10000000.0, "tie_word_embeddings": True, "attention_bias": False,
    },
    "lfm2-1.2b": {
        "model_type": "lfm2", "block_auto_adjust_ff_dim": True, "block_dim": 32, "block_ff_dim": 96,
        "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 8, "block_norm_eps": 1e-5, "conv_L_cache": 3,
        "conv_bias": False, "conv_dim": 32, "full_attn_idxs": [1, 3], "norm_eps": 1e-5, "rope_theta": 1000000.0,
        "tie_embedding": True,
    },
    "lfm2-with-biases": {
        "model_type": "lfm2", "block_multiple_of": 8, "conv_L_cache": 4, "conv_bias": True, "tie_word_embeddings": True,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    },
    "qwen3.5-0.8b": {
        "model_type": "qwen3_5_text", "full_attention_interval": 2, "head_dim": 16, "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_value_head_dim": 24,
        "tie_word_embeddings": True, "rope_parameters": {
            "mrope_interleaved": True, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25, "rope_theta": 1e7,
            "rope_type": "default",
        },
    },
    "qwen2.5": {
        "model_type": "qwen2", "max_window_layers": 2, "sliding_window": 24, "use_sliding_window": False,
        "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 64, "type": "yarn"}, "rope_theta": 1e6,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "decoder_sparse_step": 1, "head_dim": 16, "max_window_layers": 48,
        "mlp_only_layers": [], "moe_intermediate_size": 24, "norm_topk_prob": True, "num_experts": 8,
        "num_experts_per_tok": 2, "rope_theta": 1000000.0, "sliding_window": None, "use_sliding_window": False,
    },
}  # fmt: skip


def write(folder: Path, config: dict[str, Any]) -> PreTrainedModel:
    """Write a random model with this config.json, as it is, and return it as transformers reads it."""
    text = json.dumps(SIZES | config)
    (folder / "config.json").write_text(text, encoding="utf-8")
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        centre, spread = (1.0, 0.3) if "norm" in name else (0.0, 0.2)
        parameter.data = centre + spread * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(text, encoding="utf-8")
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return loaded


@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_read_as_by_transformers(name: str, tmp_path: Path) -> None:
    oracle = write(tmp_path, CONFIGS[name])
    ids = [(37 * i) % 96 + 1 for i in range(100)]
    with torch.no_grad():
        wanted = oracle(torch.tensor([ids]), use_cache=False).logits[0]
    torch.testing.assert_close(sequence_logits(load_decoder(tmp_path), ids), wanted, rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        ("gemma-3-4b", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0, which Gemma 3 (text) models"),
        ("olmo-2", {"layer_types": ["conv"] * 4}, "layer_types has 'conv', and layers of OLMo 2 models have none"),
        ("lfm2-1.2b", {"full_attn_idxs": []}, "layer_types: no layer attends, and a plan has a KV cache"),
        ("lfm2-1.2b", {"conv_L_cache": 1}, "conv_L_cache must be at least 2"),
        ("olmo-2", {"is_causal": False}, "is_causal must be True, found False"),
        ("qwen2.5", {"rope_scaling": longrope(4)}, "is of longrope, and original_max_position_embeddings is missing"),
    ],
)
def test_what_changes_the_computation_is_not_ignored(
    name: str, changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    config = CONFIGS[name]
    write(tmp_path, config)
    (tmp_path / "config.json").write_text(json.dumps(SIZES | config | changes), encoding="utf-8")
    with pytest.raises(CheckpointError) as refused:
        load_decoder(tmp_path)
    assert sentence in str(refused.value)


def test_the_text_model_within_one_with_vision_is_read(tmp_path: Path) -> None:
    """As Qwen3.5 is published: a `text_config`, names of its own, parts that are not read."""
    oracle = write(tmp_path, CONFIGS["qwen3.5-0.8b"])
    tensors = load_file(tmp_path / "model.safetensors")
    named = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    save_file(
        named | {"model.visual.patch": torch.ones(2), "mtp.fc.weight": torch.ones(2)}, tmp_path / "model.safetensors"
    )
    text = SIZES | CONFIGS["qwen3.5-0.8b"] | {"eos_token_id": 7}
    del text["tie_word_embeddings"]
    whole = {"model_type": "qwen3_5", "tie_word_embeddings": True, "text_config": text, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(whole), encoding="utf-8")
    (tmp_path / "generation_config.json").unlink()
    decoder, ids = load_decoder(tmp_path), [(37 * i) % 96 + 1 for i in range(40)]
    assert decoder.config.eos_token_ids == (7,)
    with torch.no_grad():
        wanted = oracle(torch.tensor([ids]), use_cache=False).logits[0]
    torch.testing.assert_close(sequence_logits(decoder, ids), wanted, rtol=0, atol=2e-4)


def test_the_text_model_of_one_with_vision_is_saved_as_the_readme_says(tmp_path: Path) -> None:
    readme = Path(__file__).parents[2] / "compiler" / "models" / "README.md"
    code = readme.read_text(encoding="utf-8").split("# one with vision\n")[1].split("\n\n")[0]
    text = {key: value for key, value in (SIZES | GEMMA).items() if key not in ("torch_dtype", "use_cache")}
    text |= {"model_type": "gemma3_text", "num_hidden_layers": 2}
    vision: dict[str, Any] = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14, "model_type": "siglip_vision_model",
    }  # fmt: skip
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision)
    whole = AutoModelForCausalLM.from_config(config)
    source, out = tmp_path / "whole", tmp_path / "text"
    whole.float().eval().save_pretrained(source)
    with pytest.raises(CheckpointError, match=r"compiler/models/README.md says how"):
        load_decoder(source)
    exec("\n".join(line[4:] for line in code.splitlines()), {"source": str(source), "out": str(out)})
    ids = [(37 * i) % 96 + 1 for i in range(40)]
    with torch.no_grad():
        wanted = whole(input_ids=torch.tensor([ids])).logits[0].float()
    torch.testing.assert_close(sequence_logits(load_decoder(out), ids), wanted, rtol=0, atol=2e-4)
