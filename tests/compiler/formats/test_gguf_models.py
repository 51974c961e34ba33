"""Decoders out of GGUF files against transformers' model of the same numbers, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from outrider.compiler.checkpoint import load_decoder
from outrider.compiler.formats.gguf_file import GgufFile
from outrider.compiler.models.config import read_folder_config
from outrider.compiler.models.eager import sequence_logits
from outrider.compiler.opening import open_checkpoint, read_config
from outrider.plans.errors import CheckpointError
from outrider.plugins.reference import dequantize

from .ggufs import write_model
from .models import VOCABULARY, logits_of, random_model

IDS = [(37 * i) % 310 + 2 for i in range(60)]
Q_PROJ = "model.layers.0.self_attn.q_proj"
Q4_K_M = {"embed_tokens": "Q4_K", "lm_head": "Q6_K", "v_proj": "Q6_K", "down_proj": "Q5_K", "": "Q4_K"}

MODELS: dict[str, tuple[str, str | Mapping[str, str], dict[str, object]]] = {
    "llama f32": ("llama", "F32", {"num_hidden_layers": 2}),
    "llama f16": ("llama", "F16", {}),
    "llama q8_0, tied": ("llama", "Q8_0", {"tie_word_embeddings": True, "num_hidden_layers": 2}),
    "llama q4_0": ("llama", "Q4_0", {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}),
    "llama k, other head size": ("llama", Q4_K_M, {"head_dim": 128}),
    "llama with biases": ("llama", "Q4_1", {"attention_bias": True, "mlp_bias": True}),
    "qwen2 q5_1": ("qwen2", "Q5_1", {"rms_norm_eps": 1e-6}),
    "qwen3 q5_0": ("qwen3", "Q5_0", {"head_dim": 128}),
    "qwen3 bf16": ("qwen3", "BF16", {}),
}


@pytest.mark.parametrize("name", MODELS)
def test_decoder_is_transformers_at_every_position_and_keeps_integers(name: str, tmp_path: Path) -> None:
    """With rows reordered as the numbers are; and a matrix has no integers only where its type has no form."""
    family, kind, changes = MODELS[name]
    model = random_model(family, **changes)
    model.save_pretrained(tmp_path / "original")
    file = tmp_path / "model.gguf"
    write_model(file, model, kind)
    decoder = load_decoder(file)
    torch.testing.assert_close(sequence_logits(decoder, IDS), logits_of(model, IDS), atol=2e-5, rtol=1e-5)
    given = read_folder_config(tmp_path / "original")
    assert (decoder.config.rope_scaling.kind, given.rope_scaling.kind) == ("default", "default")
    assert replace(decoder.config, rope_scaling=given.rope_scaling, eos_token_ids=given.eos_token_ids) == given
    tensors, kept = open_checkpoint(file).tensors, 0
    for stored_name, stored in tensors.found.items():
        source = tensors.quantized(stored_name)
        assert (source is None) == (stored.dtype in ("F32", "F16", "BF16", "Q6_K"))
        if source is not None:
            made = source.read()
            numbers = dequantize(made.integers, made.scales, made.minimums)
            np.testing.assert_array_equal(numbers, tensors.read(stored_name).numpy())
            kept += 1
    assert bool(kept) == (kind not in ("F32", "F16", "BF16"))


def frequencies(model: Any) -> torch.Tensor:
    found: torch.Tensor = model.model.rotary_emb.inv_freq
    return found


def test_divisors_of_rotary_frequencies(tmp_path: Path) -> None:
    """llama.cpp's converter writes Llama 3's scaling as a tensor of divisors, and no word of it into the metadata."""
    theta = {"rope_theta": 10000.0}
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    model = random_model(rope_parameters={"rope_type": "llama3", **scaling, **theta})
    plain = random_model(rope_parameters={"rope_type": "default", **theta})
    divisors = (frequencies(plain) / frequencies(model)).numpy().astype(np.float32)
    assert divisors.max() == 8
    write_model(tmp_path / "model.gguf", model, "Q8_0", extra={"rope_freqs.weight": divisors})
    found = sequence_logits(load_decoder(tmp_path / "model.gguf"), IDS)
    torch.testing.assert_close(found, logits_of(model, IDS), atol=5e-5, rtol=1e-5)
    assert (found - logits_of(plain, IDS)).abs().max() > 0.01


@pytest.mark.parametrize(
    ("kind", "written", "original"),
    [
        ("linear", {}, None),  # llama.cpp's default type
        ("default", {"factor": 1.0}, None),
        ("yarn", {"type": "yarn", "original_context_length": 64}, 64),
        ("yarn", {"type": "yarn"}, 256),  # the model's own context length
    ],
)
def test_rotary_scaling_of_the_metadata(
    kind: str, written: dict[str, object], original: int | None, tmp_path: Path
) -> None:
    parameters = {"rope_type": kind, "rope_theta": 10000.0} | ({} if kind == "default" else {"factor": 4.0})
    context = {} if original is None else {"original_max_position_embeddings": original}
    model = random_model("qwen2", rope_parameters=parameters | context)
    metadata = {f"{{arch}}.rope.scaling.{key}": value for key, value in ({"factor": 4.0} | written).items()}
    write_model(tmp_path / "model.gguf", model, "F32", metadata=metadata)
    found = sequence_logits(load_decoder(tmp_path / "model.gguf"), IDS)
    torch.testing.assert_close(found, logits_of(model, IDS), atol=5e-5, rtol=1e-5)


CONTROL, NORMAL, USER = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL, gguf.TokenType.USER_DEFINED


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        ({"<|im_end|>": CONTROL, "<|endoftext|>": CONTROL, "<|eot_id|>": NORMAL}, (7, 3, 8, 9)),  # of any type
        ({"<|end_of_text|>": USER, "<EOT>": NORMAL, "_<EOT>": NORMAL, "<|flush|>": NORMAL}, (7, 3, 8, 9, 10)),
        ({"t": CONTROL, "<end_of_utterance>": CONTROL, "[EOS]": CONTROL, "\uff5cend\uff5c": CONTROL}, (7, 3, 8, 9)),
        ({"t": NORMAL, "<\uff5cend\u2581of\u2581sentence\uff5c>": CONTROL}, (7, 3, 8)),
        ({"t": NORMAL, "</s>": NORMAL}, (7, 3)),  # a tag of HTML
        ({"<|return|>": CONTROL, "<|call|>": CONTROL, "<|end|>": CONTROL}, (7, 3, 8)),  # of a part of an answer
    ],
)
def test_end_tokens_are_those_named_and_those_known_by_name(
    tokens: dict[str, gguf.TokenType], found: tuple[int, ...], tmp_path: Path
) -> None:
    texts = [f"t{i}" for i in range(VOCABULARY)]
    kinds = [gguf.TokenType.NORMAL] * VOCABULARY
    for number, (text, kind) in enumerate(tokens.items(), start=7):
        texts[number], kinds[number] = text, kind
    named = {"tokenizer.ggml.eos_token_id": 7, "tokenizer.ggml.eot_token_id": 3}
    write_model(tmp_path / "model.gguf", random_model(), metadata=named, vocabulary=(texts, kinds))
    assert read_config(tmp_path / "model.gguf").eos_token_ids == found


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("llama.context_length", "llama.kontext_length", "the key llama.context_length is missing"),
        ("llama.rope.freq_base", "llama.rope.freq_baze", "llama.rope.freq_baze is 10000.0, which no decoder here"),
        ("general.architecture", "general.architektur!", "general.architecture is None; GGUF files of llama, qwen2"),
        ("blk.0.attn_q.weight", "blk.9.attn_q.weight", "'model.layers.0.self_attn.q_proj.weight' is missing"),
        ("blk.0.attn_q.weight", "blk.0.attn_x.weight", "tensor 'blk.0.attn_x.weight' is unexpected"),
        ("token_embd.weight", "token_embb.weight", "tensor 'token_embd.weight' is missing"),
    ],
)
def test_what_is_missing_or_unknown_is_named(old: str, new: str, said: str, tmp_path: Path) -> None:
    """Keys and tensors, renamed in place by names of the same length."""
    file = tmp_path / "model.gguf"
    write_model(file, random_model())
    content = file.read_bytes()
    assert content.count(old.encode()) == 1
    file.write_bytes(content.replace(old.encode(), new.encode()))
    refused(file, said)


@pytest.mark.parametrize(
    ("metadata", "extra", "said"),
    [
        ({"{arch}.expert_count": 8}, {}, "llama.expert_count is 8, which no decoder here computes"),
        ({"{arch}.rope.scaling.type": "longrope"}, {}, "rope_scaling is of longrope"),
        ({"split.count": 3}, {}, "one of 3 parts"),
        ({}, {"rope_freqs.weight": np.ones(5, "f4")}, "'rope_freqs.weight' is F32 of shape [5], expected F32 of [32]"),
        ({}, {"rope_freqs.weight": np.zeros(32, "f4")}, "divisors.0 must be at least 1e-06, found 0.0"),
        ({}, {f"{Q_PROJ}.weight": np.ones((256, 256), "f4")}, f"'{Q_PROJ}.weight' is unexpected: GGUF files of llama"),
    ],
)  # fmt: skip
def test_what_no_decoder_computes_is_named(
    metadata: dict[str, object], extra: dict[str, Any], said: str, tmp_path: Path
) -> None:
    write_model(tmp_path / "model.gguf", random_model(), metadata=metadata, extra=extra)
    refused(tmp_path / "model.gguf", said)


def refused(file: Path, said: str) -> None:
    with pytest.raises(CheckpointError) as error:
        load_decoder(file)
    assert str(file) in str(error.value)
    assert said in str(error.value)


def test_scales_that_are_not_finite_are_named(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_model(file, random_model(), "Q4_0")
    offset = GgufFile.open(file).tensors["blk.0.ffn_up.weight"].offset
    content = bytearray(file.read_bytes())
    content[offset : offset + 2] = b"\x00\x7c"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"up_proj.weight' holds values that are not finite"):
        load_decoder(file)
    source = open_checkpoint(file).tensors.quantized("model.layers.0.mlp.up_proj.weight")
    assert source is not None
    with pytest.raises(CheckpointError, match=r"'blk.0.ffn_up.weight' has scales that are not finite"):
        source.read()
