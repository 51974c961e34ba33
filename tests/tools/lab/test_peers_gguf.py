"""A checkpoint written as GGUF is the same model: transformers reads it back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

gguf = pytest.importorskip("gguf")

from outrider.tools.lab.peers.gguf_file import write_gguf  # noqa: E402  (imports gguf)

SIZES = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "eos_token_id": 0, "bos_token_id": None,
}  # fmt: skip


def write_checkpoint(folder: Path, config: LlamaConfig | Qwen2Config | Qwen3Config) -> torch.nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "norm.weight")):  # are zeros and ones when they are made
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained(folder)
    vocab = {chr(0x100 + index): index for index in range(290)}
    tokenizer = {
        "model": {"type": "BPE", "vocab": vocab, "merges": [["\u0101", "\u0102"]]},
        "added_tokens": [{"id": 290, "content": "<end>", "special": True}],
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return model.eval()


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES, tie_word_embeddings=False, rope_theta=5000.0),
        Qwen2Config(**SIZES, tie_word_embeddings=True),
        Qwen3Config(**SIZES, tie_word_embeddings=False),
    ],
    ids=["llama", "qwen2", "qwen3"],
)
def test_the_file_is_the_same_model(config: LlamaConfig | Qwen2Config | Qwen3Config, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "checkpoint", config)
    write_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf", "F32")
    path = str(tmp_path / "model.gguf")
    again = AutoModelForCausalLM.from_config(type(config)(**load_gguf_checkpoint(path)["config"])).eval()
    read = load_gguf_checkpoint(path, return_tensors=True, model_to_load=again)
    missing, unexpected = again.load_state_dict(read["tensors"], strict=False)
    assert (set(missing), unexpected) == ({"lm_head.weight"} if config.tie_word_embeddings else set(), [])
    ids = torch.arange(24)[None] * 11 % 290
    with torch.inference_mode():
        torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


def test_matrices_are_quantised_and_the_outer_ones_have_8_bits(tmp_path: Path) -> None:
    config = Qwen3Config(**SIZES | {"intermediate_size": 80}, head_dim=32, tie_word_embeddings=False)
    write_checkpoint(tmp_path / "checkpoint", config)
    write_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf", "Q4_0")
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    kinds = {name: tensor.tensor_type.name for name, tensor in found.items()}
    assert (kinds["token_embd.weight"], kinds["output.weight"]) == ("Q8_0", "Q8_0")
    assert (kinds["blk.1.attn_q.weight"], kinds["blk.1.ffn_up.weight"]) == ("Q4_0", "Q4_0")
    assert kinds["blk.0.ffn_down.weight"] == "F32"  # 80 inputs are no whole blocks
    assert kinds["blk.0.attn_norm.weight"] == "F32"
    tensor = found["blk.0.attn_q.weight"]
    stored = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    weights = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint").state_dict()
    original = weights["model.layers.0.self_attn.q_proj.weight"].numpy()
    assert 0 < np.abs(stored - original).max() < np.abs(original).max() / 7
