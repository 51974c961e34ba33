"""SentencePiece's own file as a tokenizer, against SentencePiece."""

from __future__ import annotations

import io
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import AddedToken, Tokenizer

from compiler.formats.sentencepiece_model import make_tokenizer, read_model
from plans.errors import CheckpointError
from plans.tokenizer import Tokenizer as PlanTokenizer
from tests.tokenizer_families import CORPUS, TEXTS

PLAIN = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
LINES = ["<b>", "\n", "\n\n", "▁▁", "▁▁▁"]
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "bpe", "split_digits": True, **PLAIN},
    "gemma": {
        "model_type": "bpe", "add_dummy_prefix": False, "user_defined_symbols": LINES, "pad_id": 0, "eos_id": 1,
        "bos_id": 2, "unk_id": 3, **PLAIN,
    },
    "normalized": {"model_type": "bpe"},
    "unigram": {"model_type": "unigram", "vocab_size": 120, "byte_fallback": False},
}  # fmt: skip


@cache
def trained(kind: str) -> bytes:
    model = io.BytesIO()
    options = {"vocab_size": 420, "byte_fallback": True} | KINDS[kind]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=model, hard_vocab_limit=False, minloglevel=2, **options
    )
    return model.getvalue()


def made(folder: Path, kind: str, added: dict[int, AddedToken] | None = None, **settings: object) -> Tokenizer:
    (folder / "tokenizer.model").write_bytes(trained(kind))
    return make_tokenizer(read_model(folder / "tokenizer.model"), settings, added or {})


def texts() -> list[str]:
    drawn = random.Random(0)
    parts = ["the ", " world", "  ", "\n", "\n\n", "é", "日", "<b>", "▁", "ﬁ", "Ⅷ", "12", "\t", "end", "of", "words"]
    return [*TEXTS, *("".join(drawn.choices(parts, k=drawn.randint(1, 30))) for _ in range(200))]


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_sentencepiece(kind: str, tmp_path: Path) -> None:
    oracle = sentencepiece.SentencePieceProcessor(model_proto=trained(kind))
    tokenizer = made(tmp_path, kind)
    for text in texts():
        ids = tokenizer.encode(text).ids
        assert ids == [oracle.bos_id(), *oracle.encode(text)]
        if kind != "unigram":  # which has unknown tokens
            assert tokenizer.decode(ids) == oracle.decode(ids[1:])
    PlanTokenizer(tokenizer)  # streams exactly


def test_settings_say_what_stands_around_a_text(tmp_path: Path) -> None:
    plain = made(tmp_path, "llama", add_bos_token=False).encode("the end").ids
    assert made(tmp_path, "llama").encode("the end").ids == [1, *plain]
    assert made(tmp_path, "llama", add_eos_token=True).encode("the end").ids == [1, *plain, 2]
    assert made(tmp_path, "llama", add_bos_token=False, add_prefix_space=False).encode(" the end").ids == plain


def test_added_tokens_have_their_ids_and_flags(tmp_path: Path) -> None:
    size = made(tmp_path, "llama").get_vocab_size()
    added = {
        size + 1: AddedToken("<|user|>", rstrip=True, special=True, normalized=False),
        size: AddedToken("<tool>", normalized=False),
        2: AddedToken("</s>", special=True, normalized=False),
    }
    for legacy, name in ((True, "▁the"), (False, "t")):
        tokenizer = made(tmp_path, "llama", added, legacy=legacy, add_bos_token=False)
        tokens = [tokenizer.id_to_token(number) for number in tokenizer.encode("<tool><|user|>  the").ids]
        assert tokens[:3] == ["<tool>", "<|user|>", name]
        assert tokenizer.decode([size, size + 1]) == "<tool>"
    with pytest.raises(CheckpointError, match=rf"added token '<x>' has the id {size + 7}, and would get {size} behind"):
        made(tmp_path, "llama", {size + 7: AddedToken("<x>")})


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.model"
    model = trained("llama")
    for content in (b"", b"\x00", b"IQ== 0\nIg== 1\n", model[: len(model) // 2], b"\x0a\x02\x0a\x00" * 2, b"\xff" * 30):
        file.write_bytes(content)
        with pytest.raises(
            CheckpointError, match="no model of SentencePiece that can be read, and there is no tokenizer"
        ):
            read_model(file)
