"""Small tokenizers in the shapes in which model families ship theirs, trained here on a few lines."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from functools import cache

import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.conftest import train_byte_level

CORPUS = [
    "the end of the world and the beginning of another, with 12345 words and 2024 more of them",
    "hello there, hello world! I'll see you; we've been here. What's the time?",
    "def main() -> None:\n    return {'a': 1}\n\n\n",
    "naïve café, Straße, 日本語, 한국어, Привет мир",
] * 4
_FEW = [*CORPUS[:3], "naïve 日本"]  # whose other characters are left to the bytes
TEXTS = [
    "the end of the world",
    "  two spaces first, and  two within ",
    "I'll say 1234567: naïve 日本語 Привет\r\n\r\n\tx = {'a': 1}",
    "👩‍👩‍👧‍👦 and 🏳️‍🌈, é (e\u0301), \U00010348, \x00 and \ufffd",
    "▁ is a character too, <0x41> is none",
    "<start_of_turn>user\nhello <tool> the end</tool> <|end|>  \n again<unused1><|im_end|>",
    "",
    " ",
]
SPACE = "▁"  # stands for a space in SentencePiece's pieces
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE, _SHORT = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}"
O200K = (
    rf"{_BEFORE}{_UPPER}*{_LOWER}+{_SHORT}?|{_BEFORE}{_UPPER}+{_LOWER}*{_SHORT}?|"
    rf"\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}"
)
CL100K = rf"{_SHORT}|{_BEFORE}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}"
QWEN2 = CL100K.replace(r"\p{N}{1,3}", r"\p{N}")


def _begins(tokenizer: Tokenizer, bos: str) -> Tokenizer:
    """Put `bos` before a text."""
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    return tokenizer


def _plain(*tokens: str) -> list[AddedToken]:
    return [AddedToken(token, normalized=False) for token in tokens]


def _fallback(strip: bool) -> decoders.Decoder:
    stripped = [decoders.Strip(" ", 1, 0)] if strip else []
    return decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *stripped])


def _pieces(special: Sequence[str]) -> Tokenizer:
    """SentencePiece's BPE as it is converted: special tokens, bytes, pieces."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", SPACE)
    trained.pre_tokenizer = pre_tokenizers.Split(SPACE, "merged_with_next")
    trained.train_from_iterator(_FEW, trainers.BpeTrainer(vocab_size=160, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].get)
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: number for number, token in enumerate(tokens)},
            merges=[tuple(merge) for merge in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.add_special_tokens(_plain(*special))
    return tokenizer


@cache
def gemma() -> Tokenizer:
    """No space before a text; words are split off; tokens of turns, many unused ones, and runs of line ends."""
    tokenizer = _pieces(["<pad>", "<eos>", "<bos>", "<unk>"])
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = _fallback(strip=False)
    tokenizer.add_special_tokens(_plain("<start_of_turn>", "<end_of_turn>"))
    unused = (f"<unused{number}>" for number in range(20))
    tokenizer.add_tokens(_plain(*unused, "\n\n", "\n\n\n", "<b>", "</b>"))
    return _begins(tokenizer, "<bos>")


@cache
def llama() -> Tokenizer:
    """Llama 2 and Mistral up to v3: a space before a text, which decoding drops."""
    tokenizer = _pieces(["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    tokenizer.decoder = _fallback(strip=True)
    return _begins(tokenizer, "<s>")


@cache
def phi3() -> Tokenizer:
    """As Llama, with tokens that take up the white space around them, and some that are text."""
    tokenizer = _pieces(["<unk>", "<s>", "</s>"])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    tokenizer.decoder = _fallback(strip=True)
    tokenizer.add_tokens(
        [
            AddedToken("<|endoftext|>", normalized=False, special=True),
            AddedToken("<|end|>", rstrip=True, normalized=False, special=True),
            AddedToken("<|user|>", lstrip=True, rstrip=True, normalized=False, special=True),
            AddedToken("<tool>", lstrip=True, normalized=True, special=False),
            AddedToken("</tool>", rstrip=True, normalized=False, special=False),
        ]
    )
    return _begins(tokenizer, "<s>")


@cache
def metaspace() -> Tokenizer:
    """As Llama without its legacy: the space is put before the first word alone."""
    tokenizer = _pieces(["<unk>", "<s>", "</s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = _fallback(strip=True)
    tokenizer.add_tokens([AddedToken("<tool>", normalized=True), AddedToken("</tool>", normalized=False)])
    return _begins(tokenizer, "<s>")


@cache
def sentencepiece_model(kind: str, byte_fallback: bool = True) -> bytes:
    """A `tokenizer.model`: `kind` is bpe or unigram."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=model, model_type=kind, vocab_size=400 if byte_fallback else 120,
        byte_fallback=byte_fallback, character_coverage=0.98, hard_vocab_limit=False, split_digits=True,
        pad_id=3, minloglevel=2,
    )  # fmt: skip
    return model.getvalue()


@cache
def unigram(byte_fallback: bool = True) -> Tokenizer:
    """SentencePiece's Unigram with its normalizer; without bytes, what is unknown is one token."""
    model = sentencepiece_model_pb2.ModelProto.FromString(sentencepiece_model("unigram", byte_fallback))
    pieces = [(piece.piece, piece.score) for piece in model.pieces]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=model.trainer_spec.unk_id, byte_fallback=byte_fallback))
    table = normalizers.Precompiled(model.normalizer_spec.precompiled_charsmap)
    tokenizer.normalizer = normalizers.Sequence([table, normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = _fallback(strip=True) if byte_fallback else decoders.Metaspace(prepend_scheme="always")
    tokenizer.add_special_tokens(_plain("<unk>", "<s>", "</s>", "<pad>"))
    tokenizer.add_tokens(_plain("<tool>"))
    return _begins(tokenizer, "<s>")


def _byte_level(
    split: pre_tokenizers.PreTokenizer | str | None,
    special: Sequence[str],
    plain: Sequence[AddedToken] = (),
    ignore_merges: bool = False,
) -> Tokenizer:
    if isinstance(split, str):
        split = pre_tokenizers.Split(Regex(split), "isolated")
    first = [] if split is None else [split]
    # With no expression of the family's own, it is that of GPT-2.
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not isinstance(split, pre_tokenizers.Split))
    parts = pre_tokenizers.Sequence([*first, whole])
    tokenizer = train_byte_level(CORPUS, 330, special, parts, ignore_merges=ignore_merges)
    tokenizer.add_tokens(list(plain))
    return tokenizer


@cache
def tekken() -> Tokenizer:
    """Mistral's since NeMo."""
    return _begins(_byte_level(TEKKEN, ["<unk>", "<s>", "</s>", "[INST]"], ignore_merges=True), "<s>")


@cache
def gpt_oss() -> Tokenizer:
    """o200k_harmony: messages in channels between special tokens."""
    special = ["<|startoftext|>", "<|endoftext|>", "<|return|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>"]
    tokenizer = _byte_level(O200K, [*special, "<|call|>"])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


@cache
def qwen() -> Tokenizer:
    """Normal form C first; some added tokens are text that a reader sees."""
    tokenizer = _byte_level(QWEN2, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_tokens(_plain("<tool>", "</tool>", "<think>", "日 é"))
    return tokenizer


@cache
def olmo() -> Tokenizer:
    """cl100k's expression; tokens that stand for what personal data was."""
    plain = [AddedToken(f"|||{name}|||", normalized=False) for name in ("PHONE_NUMBER", "EMAIL_ADDRESS")]
    return _byte_level(CL100K, ["<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"], plain)


@cache
def granite() -> Tokenizer:
    """Digits one by one, as SmolLM's, then GPT-2's expression."""
    plain = [AddedToken("<tool>", normalized=True, single_word=True), AddedToken("</tool>", lstrip=True)]
    digits = pre_tokenizers.Digits(individual_digits=True)
    return _byte_level(digits, ["<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>"], plain)


FAMILIES: dict[str, Callable[[], Tokenizer]] = {
    **{make.__name__: make for make in (gemma, llama, phi3, metaspace, unigram, tekken, gpt_oss, qwen, olmo, granite)},
    "unigram without bytes": lambda: unigram(byte_fallback=False),
}
