"""Tokenizers in GGUF files against the tokenizers that they were written from."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers, processors

from outrider.compiler.formats.gguf_file import GgufFile
from outrider.compiler.formats.gguf_tokenizer import GgufText, read_gguf_text
from outrider.plans.errors import CheckpointError
from outrider.plans.tokenizer import Tokenizer as PlanTokenizer
from tests.conftest import REPOSITORY, train_byte_level
from tests.tokenizer_families import CL100K, O200K, QWEN2, TEKKEN

from .ggufs import close, write_byte_level

LICENSE = (REPOSITORY / "LICENSE").read_text(encoding="utf-8")
TRAINING = [
    LICENSE,
    *(f"{number} {number} HTTPServer's camelCase's WON'T won't +=;\n+=;\n" for number in range(1000, 1400)),
]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
TEXTS = [
    README[:6000],
    "We'll see 12345 and I'M 6 don't   tabs\t\tand\r\n\r\n  lines \n\n\n",
    "naïve cafe\u0301 Straße 北京 Привет 👩‍👩‍👧 \U00010348 ½ ²",
    "",
    " ",
    "  two spaces first",
    "camelCaseWords HTTPServer x=y+1;// done",
    "<|begin|>Say <think>this</think> <|end|> now<|end|>",
]


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), whole])


# With the patterns of transformers' own tokenizers for these models.
PRE: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "llama-bpe": lambda: _split(CL100K),
    "qwen2": lambda: _split(QWEN2),
    "tekken": lambda: _split(TEKKEN),
    "gpt-4o": lambda: _split(O200K),
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
}
SPACE = "\u0120"  # of byte-level tokens
BEGINS = ("llama-bpe", "tekken")


def original(pre: str) -> Tokenizer:
    """A byte-level tokenizer trained on the licence, with control tokens and one that users may write."""
    tokenizer = train_byte_level(TRAINING, 700, ["<|begin|>", "<|end|>"], PRE[pre](), ignore_merges=pre in BEGINS)
    tokenizer.normalizer = normalizers.NFC() if pre == "qwen2" else None
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    if pre in BEGINS:
        tokenizer.post_processor = processors.TemplateProcessing("<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    return tokenizer


def written(folder: Path, fill: Callable[[gguf.GGUFWriter], object]) -> GgufText:
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    fill(writer)
    close(writer)
    return read_gguf_text(GgufFile.open(folder / "model.gguf"))


def same(found: Tokenizer, wanted: Tokenizer) -> None:
    for text in TEXTS:
        ids = wanted.encode(text).ids
        assert found.encode(text).ids == ids
        for skip in (True, False):
            assert found.decode(ids, skip_special_tokens=skip) == wanted.decode(ids, skip_special_tokens=skip)
    for number in range(wanted.get_vocab_size()):
        assert found.decode([number]) == wanted.decode([number])


@pytest.mark.parametrize("pre", PRE)
def test_byte_level_tokenizers_are_the_originals(pre: str, tmp_path: Path) -> None:
    tokenizer = original(pre)

    def fill(writer: gguf.GGUFWriter) -> None:
        write_byte_level(writer, tokenizer, pre)
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
        writer.add_chat_template("{{ messages }}")

    text = written(tmp_path, fill)
    same(text.tokenizer, tokenizer)
    assert (text.bos_token, text.eos_token, text.template) == ("<|begin|>", "<|end|>", "{{ messages }}")
    PlanTokenizer(text.tokenizer)  # streams exactly


@pytest.mark.parametrize("pre", ["default", None])
def test_default_pre_tokenizer_is_that_of_llama_cpp(pre: str | None, tmp_path: Path) -> None:
    """The pieces are tokens of llama-cpp-python 0.3.36, of a vocabulary that has all of the text's substrings."""

    def fill(writer: gguf.GGUFWriter) -> None:
        write_byte_level(writer, original("gpt-2"), "default")
        if pre is None:
            del writer.kv_data[0]["tokenizer.ggml.pre"]

    split = written(tmp_path, fill).tokenizer.pre_tokenizer
    assert split is not None
    pieces = [piece for piece, _ in split.pre_tokenize_str("It's $5.00+12345 (a!) 67")]
    assert pieces == ["It", "'", "s", SPACE, "$", "5", ".", "00", "+", "123", "45", SPACE, "(", "a", "!)", SPACE, "67"]


def test_metadata_says_what_stands_around_a_text_and_unused_tokens_print_nothing(tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        write_byte_level(writer, original("llama-bpe"), "llama-bpe")
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
        writer.add_add_bos_token(False)
        writer.add_add_eos_token(True)
        state: Any = writer.kv_data[0]
        state["tokenizer.ggml.tokens"].value += ["[PAD702]", "[PAD703]"]
        state["tokenizer.ggml.token_type"].value += [gguf.TokenType.UNUSED] * 2

    found = written(tmp_path, fill).tokenizer
    ids = found.encode("License").ids
    assert (ids[0] != 0, ids[-1]) == (True, 1)
    assert found.encode("License", add_special_tokens=False).ids == ids[:-1]
    assert found.decode([703]) == ""


@pytest.fixture(scope="module")
def pieces() -> sentencepiece.SentencePieceProcessor:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LICENSE.splitlines()), model_writer=model, model_type="bpe", vocab_size=600,
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False, split_digits=True,
        minloglevel=2,
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def write_pieces(writer: gguf.GGUFWriter, pieces: sentencepiece.SentencePieceProcessor) -> None:
    count = pieces.vocab_size()
    kinds = [
        gguf.TokenType.UNKNOWN if pieces.is_unknown(i)
        else gguf.TokenType.CONTROL if pieces.is_control(i)
        else gguf.TokenType.BYTE if pieces.is_byte(i)
        else gguf.TokenType.NORMAL
        for i in range(count)
    ]  # fmt: skip
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([pieces.id_to_piece(i) for i in range(count)])
    writer.add_token_scores([pieces.get_score(i) for i in range(count)])
    writer.add_token_types(kinds)
    writer.add_unk_token_id(pieces.unk_id())
    writer.add_bos_token_id(pieces.bos_id())
    writer.add_eos_token_id(pieces.eos_id())


def test_sentencepiece_is_the_original(tmp_path: Path, pieces: sentencepiece.SentencePieceProcessor) -> None:
    text = written(tmp_path, lambda writer: write_pieces(writer, pieces))
    found = text.tokenizer
    for example in [each for each in TEXTS if each] + LICENSE.splitlines()[:200]:
        ids = found.encode(example).ids
        if example:
            assert ids == [pieces.bos_id(), *pieces.encode(example)]
        assert found.decode(ids) == pieces.decode(ids[1:])
    assert (text.bos_token, text.eos_token) == ("<s>", "</s>")
    plan = PlanTokenizer(found)
    assert plan.fallback_byte(pieces.piece_to_id("<0xE5>")) == b"\xe5"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda kv: kv.pop("tokenizer.ggml.tokens"), "tokenizer.ggml.tokens must be a list"),
        (lambda kv: kv.pop("tokenizer.ggml.model"), "tokenizer.ggml.model is missing"),
        (lambda kv: setattr(kv["tokenizer.ggml.pre"], "value", "viking"), "pre is 'viking'; known pre-tokenizers: "),
        (lambda kv: setattr(kv["tokenizer.ggml.model"], "value", "rwkv"), "model is 'rwkv'; tokenizers of the kinds"),
        (lambda kv: kv["tokenizer.ggml.token_type"].value.pop(), "token_type must be a list of 702 integers"),
        (lambda kv: kv["tokenizer.ggml.tokens"].value.__setitem__(9, "!"), "has '!' twice"),
        (lambda kv: kv["tokenizer.ggml.merges"].value.__setitem__(9, "ab"), "has 'ab', which is no pair"),
        (lambda kv: kv["tokenizer.ggml.merges"].value.__setitem__(9, "zq qz"), "make no tokenizer"),
        (lambda kv: setattr(kv["tokenizer.ggml.bos_token_id"], "value", 702), "bos_token_id is 702; there are 702"),
    ],
)  # fmt: skip
def test_wrong_metadata_is_named(change: Callable[[dict[str, Any]], object], said: str, tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        write_byte_level(writer, original("gpt-2"), "gpt-2")
        writer.add_bos_token_id(0)
        change(writer.kv_data[0])

    with pytest.raises(CheckpointError) as error:
        written(tmp_path, fill)
    assert said in str(error.value)
    assert "model.gguf: tokenizer.ggml." in str(error.value)
