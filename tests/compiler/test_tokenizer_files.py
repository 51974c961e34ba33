"""A checkpoint's tokenizer, special tokens and end tokens in a plan, against transformers'."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from outrider.compiler.checkpoint import checkpoint_hashes
from outrider.compiler.text import read_vocabulary
from outrider.plans.errors import CheckpointError
from tests import tokenizer_families as families
from tests.compiler.checkpoint_texts import checkpoint, loaded, prompt_ids, read


def test_tokens_that_the_settings_alone_call_special_print_nothing(tmp_path: Path) -> None:
    """As in transformers: those with a name, those of a list, one that has been a plain token of the vocabulary."""
    for place, (further, names) in enumerate(
        (
            ({"additional_special_tokens": ["<tool>", {"__type": "AddedToken", "content": "<think>"}]}, {}),
            ({"extra_special_tokens": ["<tool>"], "think_token": "<think>"}, {}),
            ({"extra_special_tokens": {"think_token": "<think>"}, "unk_token": "<tool>"}, {}),
            ({}, {"additional_special_tokens": ["<tool>", "<think>", "<nowhere>"], "pad_token": {"content": "h"}}),
        )
    ):
        folder = tmp_path / f"{place}"
        checkpoint(folder, families.qwen(), {"eos_token": "<|im_end|>", **further}, padding=9)
        (folder / "special_tokens_map.json").write_text(json.dumps(names))
        oracle, tokenizer = AutoTokenizer.from_pretrained(folder), loaded(folder)
        assert {"<tool>", "<think>"} <= set(tokenizer.special_tokens.values())
        for number in range(families.qwen().get_vocab_size()):
            assert tokenizer.decode([number]) == oracle.decode([number], skip_special_tokens=True)
        for text in families.TEXTS:
            assert tokenizer.encode(text) == oracle(text).input_ids


def decoder_of(tokenizer: tokenizers.Tokenizer, **changes: dict[str, bool]) -> dict[str, Any]:
    """The `added_tokens_decoder` that transformers saves beside a tokenizer, with other flags of some tokens."""
    flags = ("lstrip", "rstrip", "normalized", "single_word", "special")
    return {
        str(number): {"content": token.content, **{flag: getattr(token, flag) for flag in flags}}
        | changes.get(token.content.strip("<|>"), {})
        for number, token in tokenizer.get_added_tokens_decoder().items()
    }


STRIPS = {"lstrip": True, "rstrip": True}
THE = {"__type": "AddedToken", "content": "the", "normalized": False, "single_word": False, **STRIPS}


@pytest.mark.parametrize(
    ("further", "changes", "oracle"),
    [
        ({}, {"think": {"special": True}, "tool": STRIPS}, AutoTokenizer),
        ({}, {"im_start": {"special": False}}, AutoTokenizer),
        ({}, {"im_end": STRIPS}, PreTrainedTokenizerFast),
        ({"mask_token": {**THE, "content": "<think>"}}, {"think": {"lstrip": True}}, PreTrainedTokenizerFast),
        ({"additional_special_tokens": ["<think>"]}, {}, AutoTokenizer),
        ({"mask_token": THE}, {}, PreTrainedTokenizerFast),
    ],
)
def test_the_settings_flags_of_added_tokens_win(
    further: dict[str, Any], changes: dict[str, dict[str, bool]], oracle: Any, tmp_path: Path
) -> None:
    table = decoder_of(families.qwen(), **changes)
    settings = {"eos_token": "<|im_end|>", "added_tokens_decoder": table, **further}
    folder = checkpoint(tmp_path / "checkpoint", families.qwen(), settings)
    tokenizer, expected = loaded(folder), oracle.from_pretrained(folder)
    for text in ("a <think> b <|im_start|> c <tool> the end <|im_end|> of", *families.TEXTS):
        ids = tokenizer.encode(text)
        assert ids == expected(text).input_ids
        assert tokenizer.decode(ids) == expected.decode(ids, skip_special_tokens=True)


def test_tokens_that_the_settings_alone_add_are_added_and_counted(tmp_path: Path) -> None:
    size = families.qwen().get_vocab_size()
    table = decoder_of(families.qwen()) | {str(size): {"content": "<new>", "special": True, "normalized": False}}
    table[str(size + 5)] = {"content": "<after a gap>"}
    folder = checkpoint(tmp_path / "checkpoint", families.qwen(), {"added_tokens_decoder": table}, padding=1)
    assert loaded(folder).encode("<new>") == [size] == AutoTokenizer.from_pretrained(folder)("<new>").input_ids
    other = checkpoint(tmp_path / "other", families.qwen(), {"added_tokens_decoder": table})
    rowless = loaded(other)  # its spelling is text like any other
    assert rowless.last_id < size
    assert rowless.decode(rowless.encode("<new>")) == "<new>"
    table[str(size)]["special"] = False
    checkpoint(folder, families.qwen(), {"added_tokens_decoder": table})
    with pytest.raises(CheckpointError, match=f"has tokens up to id {size}, and the model {size} of them"):
        read(folder)


@pytest.mark.parametrize(
    ("make", "end", "listed", "expected"),
    [
        (families.gemma, "<eos>", ["<eos>", "<end_of_turn>"], ["<eos>", "<end_of_turn>"]),
        (families.phi3, {"content": "<|endoftext|>"}, ["<|end|>"], ["<|end|>", "<|endoftext|>"]),
        (families.gpt_oss, "<|return|>", ["<|call|>", "<|return|>"], ["<|call|>", "<|return|>"]),
        (families.olmo, None, ["<|im_end|>"], ["<|im_end|>"]),
        (families.olmo, "<nowhere>", ["<|im_end|>"], ["<|im_end|>"]),
    ],
)
def test_a_plan_has_all_end_tokens(
    make: Callable[[], tokenizers.Tokenizer], end: object, listed: list[str] | None, expected: list[str], tmp_path: Path
) -> None:
    """Those of the generation's configuration and the tokenizer's own."""
    tokenizer = make()
    ids = None if listed is None else [tokenizer.token_to_id(token) for token in listed]
    folder = checkpoint(tmp_path / "checkpoint", tokenizer, {"eos_token": end}, ids)
    assert read(folder).text.eos_token_ids == tuple(tokenizer.token_to_id(token) for token in expected)


def without_json(folder: Path, settings: Mapping[str, Any], ends: object = None) -> Path:
    """Write a checkpoint with SentencePiece's file alone."""
    checkpoint(folder, families.gemma(), settings, ends)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(families.sentencepiece_model("bpe"))
    return folder


def test_a_tokenizer_is_made_of_sentencepieces_file(tmp_path: Path) -> None:
    oracle = sentencepiece.SentencePieceProcessor(model_proto=families.sentencepiece_model("bpe"))
    size = oracle.vocab_size()
    added = {"1": {"content": "<s>", "special": True}, f"{size}": {"content": "<|end|>", "special": True}}
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": "{{ bos_token }}hello<|end|>"}
    folder = without_json(tmp_path / "checkpoint", settings | {"added_tokens_decoder": added}, size)
    tokenizer = loaded(folder)
    assert tokenizer.encode("the end") == [1, *oracle.encode("the end")]
    assert prompt_ids([{"role": "user", "content": ""}], tokenizer) == [1, *oracle.encode("hello"), size]
    assert tokenizer.decode([1, *oracle.encode("日本 end"), size]) == "日本 end"
    assert read(folder).text.eos_token_ids == (size, 2)
    assert read_vocabulary(folder) == {**{oracle.id_to_piece(i): i for i in range(size)}, "<|end|>": size}
    before = checkpoint_hashes(folder)
    (folder / "tokenizer.model").write_bytes(families.sentencepiece_model("unigram"))
    assert before != checkpoint_hashes(folder)
    older = without_json(tmp_path / "older", {"eos_token": "<|end|>"})  # with added tokens in a file of their own
    (older / "added_tokens.json").write_text(json.dumps({"<|end|>": size}))
    assert read(older).text.eos_token_ids == (size,)
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {"1": "<s>"}}))
    with pytest.raises(CheckpointError, match="added_tokens_decoder must be an object of tokens such as"):
        read(folder)


@pytest.mark.parametrize("others", [(), ("tekken.json",), ("vocab.json", "merges.txt")])
def test_a_checkpoint_without_a_tokenizer_is_refused_with_a_remedy(others: tuple[str, ...], tmp_path: Path) -> None:
    folder = without_json(tmp_path / "checkpoint", {})
    (folder / "tokenizer.model").unlink()
    for name in others:
        (folder / name).write_text("{}")
    with pytest.raises(CheckpointError) as error:
        read(folder)
    assert f"{folder / 'tokenizer.json'} does not exist, nor tokenizer.model" in str(error.value)
    assert "Add the model's tokenizer.json" in str(error.value)
    assert all(name in str(error.value) for name in others)
    assert read_vocabulary(folder) is None
