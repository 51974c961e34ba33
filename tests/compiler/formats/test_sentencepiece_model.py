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

from outrider.compiler.formats.sentencepiece_model import NORMAL, Pieces, make_tokenizer, merges, read_model
from outrider.plans.errors import CheckpointError
from outrider.plans.tokenizer import Tokenizer as PlanTokenizer
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
    "symbols": {"model_type": "bpe", "user_defined_symbols": ["<b>", "end"], **PLAIN},
    "suffix": {"model_type": "bpe", "treat_whitespace_as_suffix": True, **PLAIN},
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


@pytest.mark.parametrize("kind", ["llama", "gemma", "normalized", "unigram"])
def test_tokens_are_those_of_sentencepiece(kind: str, tmp_path: Path) -> None:
    oracle = sentencepiece.SentencePieceProcessor(model_proto=trained(kind))
    tokenizer = made(tmp_path, kind)
    for text in texts():
        ids = tokenizer.encode(text).ids
        assert ids == [oracle.bos_id(), *oracle.encode(text)]
        if kind != "unigram":  # which has unknown tokens
            assert tokenizer.decode(ids) == oracle.decode(ids[1:])
    PlanTokenizer(tokenizer)  # streams exactly


def test_a_space_is_put_before_a_text_and_not_before_a_symbol_that_begins_it(tmp_path: Path) -> None:
    """Unlike SentencePiece, which puts it before the symbol, too. Other texts have its tokens; one that begins with a
    space gets no second one of transformers, where `legacy` is false, nor here."""
    oracle = sentencepiece.SentencePieceProcessor(model_proto=trained("symbols"))
    tokenizer = made(tmp_path, "symbols", add_bos_token=False, legacy=False)
    begins, others = [], 0
    for text in texts():
        tokens = tokenizer.encode(text).tokens
        if text.startswith(("<b>", "end")):
            begins.append(text)
            assert oracle.encode(text, out_type=str) in (["▁", *tokens], ["▁" + tokens[0], *tokens[1:]])
        elif not text.startswith((" ", "▁")):
            assert tokens == oracle.encode(text, out_type=str)
            others += bool(text)
    assert others > 50
    assert len(begins) > 20
    assert made(tmp_path, "symbols", add_bos_token=False).encode("the<b>the").tokens[-2:] == ["<b>", "▁the"]


def test_spaces_that_are_treated_otherwise_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has treat_whitespace_as_suffix set, which is not read; add a tokenizer"):
        made(tmp_path, "suffix")
    file = tmp_path / "tokenizer.model"
    file.write_bytes(trained("llama") + b"\x1a\x02\x28\x00")  # a normalizer's further field, which is merged
    with pytest.raises(CheckpointError, match="has escape_whitespaces switched off, which is not read"):
        read_model(file)


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
    with pytest.raises(CheckpointError, match=rf"added token '<x>' has the id {size + 7}, and would get {size} after"):
        made(tmp_path, "llama", {size + 7: AddedToken("<x>")})


def test_pieces_that_hold_each_other_are_refused_before_they_fill_the_memory() -> None:
    tokens = ["a" * length for length in range(1, 1001)]
    pieces = Pieces(tokens, [NORMAL] * len(tokens), [0.0] * len(tokens))
    with pytest.raises(CheckpointError, match="in too many ways: merges of over 67108864 characters; add a tokenizer"):
        merges(pieces, {token: number for number, token in enumerate(tokens)})


def test_a_damaged_file_is_read_or_refused(tmp_path: Path) -> None:
    file, drawn, refused = tmp_path / "tokenizer.model", random.Random(0), 0
    damaged = [b"\x0a\x02\x18\x01", b"\x0a\x05\x0a\x01a\x10\x07", b"\x0a\x03\x08\x01\x18", b"\x10\x01\x18\x01"]
    model = trained("llama")
    nothing = (b"", b"\x00", b"IQ== 0\nIg== 1\n", model[: len(model) // 2], b"\x0a\x02\x0a\x00" * 2, b"\xff" * 30)
    for content in nothing:
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match="no model of SentencePiece that can be read, and there is no tok"):
            read_model(file)
    for _ in range(600):
        mutated = bytearray(model[: drawn.choice([60, 200, 2000, len(model)])])
        for _ in range(drawn.randint(1, 4)):
            mutated[drawn.randrange(len(mutated))] = drawn.randrange(256)
        damaged.append(bytes(mutated))
    for content in damaged:
        file.write_bytes(content)
        try:
            read_model(file)
        except CheckpointError:
            refused += 1
    assert 300 < refused < len(damaged)
