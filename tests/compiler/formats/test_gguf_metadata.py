"""Metadata of other types than the format gives them: each value is read, or refused by a sentence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from outrider.compiler.formats.gguf_config import read_gguf_config
from outrider.compiler.formats.gguf_file import GgufFile, Value
from outrider.compiler.formats.gguf_tokenizer import read_gguf_text
from outrider.plans.errors import CheckpointError

from .ggufs import close

OTHERS: tuple[Value, ...] = (
    -1, 0, 3, 2**64 - 1, 2.5, float("nan"), float("inf"), "text", "", True, False, [], ["text"], np.arange(3),
    np.ones(2, np.float32), np.zeros(1, bool), np.array([], np.uint8),
)  # fmt: skip
WITHOUT_DIVISORS: dict[str, Value] = {
    "llama.attention.key_length": 4,
    "llama.attention.value_length": 4,
    "llama.rope.dimension_count": 4,
    "llama.rope.scaling.type": "yarn",
    "llama.rope.scaling.factor": 4.0,
}
EXTRA: dict[str, Value] = {
    "split.count": 1,
    "llama.expert_count": 0,
    "llama.attention.causal": True,
    "llama.rope.scaling.attn_factor": 1.0,
    "llama.rope.scaling.original_context_length": 64,
    "llama.rope.scaling.yarn_beta_fast": 32.0,
    "llama.rope.scaling.yarn_beta_slow": 1.0,
    "llama.vocab_size": 8,
    "llama.attention.head_count_kv": 1,
    "llama.rope.freq_base": 10000.0,
    **{f"tokenizer.ggml.{role}_token_id": 1 for role in ("bos", "eos", "eot", "eom", "unknown")},
    **{f"tokenizer.ggml.add_{what}": True for what in ("bos_token", "eos_token", "space_prefix")},
    "tokenizer.chat_template": "{{ messages }}",
}


def written(path: Path, tokenizer: dict[str, Value], rope_freqs: bool) -> GgufFile:
    """A file with every key that is read, `tokenizer`'s among them; or with divisors of frequencies, and fewer keys."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_block_count(1)
    writer.add_feed_forward_length(16)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((8, 8), np.float32))
    if rope_freqs:
        writer.add_tensor("rope_freqs.weight", np.ones(2, np.float32))
    close(writer)
    file = GgufFile.open(path)
    return replace(file, metadata={**file.metadata, **EXTRA, **({} if rope_freqs else WITHOUT_DIVISORS), **tokenizer})


TOKENS: dict[str, Value] = {
    "tokenizer.ggml.tokens": ["<s>", "</s>", "<unk>", "a", "b", "ab"],
    "tokenizer.ggml.token_type": np.array([3, 3, 2, 1, 1, 1], np.int32),
}
BYTES = TOKENS | {
    "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.merges": ["a b"],
}  # fmt: skip
SCORES = np.array([0, 0, 0, -2, -1, -0.5], np.float32)
PIECES = TOKENS | {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": SCORES}


def sentence_of(read: Callable[[GgufFile], object], file: GgufFile) -> str | None:
    try:
        read(file)
    except CheckpointError as error:
        return str(error)
    return None


@pytest.mark.parametrize(("tokenizer", "rope_freqs"), [(BYTES, False), (PIECES, True)])
@pytest.mark.parametrize("read", [read_gguf_config, read_gguf_text])
def test_any_value_in_place_of_another_is_read_or_gets_a_sentence(
    read: Callable[[GgufFile], object], tokenizer: dict[str, Value], rope_freqs: bool, tmp_path: Path
) -> None:
    file = written(tmp_path / "model.gguf", tokenizer, rope_freqs)
    read(file)
    changed = [replace(file, metadata={**file.metadata, key: other}) for key in file.metadata for other in OTHERS]
    refused = [sentence for each in changed if (sentence := sentence_of(read, each))]
    assert len(refused) > 5 * len(OTHERS)
    assert all(str(file.path) in sentence for sentence in refused)


@pytest.mark.parametrize(
    ("read", "key", "value", "said"),
    [
        (read_gguf_config, "general.architecture", 3, "must be a text, found 3"),
        (read_gguf_config, "llama.block_count", True, "must be an integer, found True"),
        (read_gguf_config, "llama.attention.causal", 1, "must be true or false, found 1"),
        (read_gguf_config, "tokenizer.ggml.tokens", "text", "must be a list of texts, found 'text'"),
        (read_gguf_config, "tokenizer.ggml.token_type", ["a"] * 6, "must be a list of 6 integers, found a list of 6"),
        (read_gguf_text, "tokenizer.ggml.add_bos_token", [], "must be true or false, found a list of 0"),
    ],
)
def test_the_key_of_a_mistyped_value_is_named(
    read: Callable[[GgufFile], object], key: str, value: Value, said: str, tmp_path: Path
) -> None:
    file = written(tmp_path / "model.gguf", BYTES, rope_freqs=False)
    sentence = sentence_of(read, replace(file, metadata={**file.metadata, key: value}))
    assert f"{file.path}: {key} {said}" in str(sentence)
