"""What tokens add to a text, against the text that `tokenizers` decodes."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from outrider.plans.tokenizer import Tokenizer
from outrider.runtime.text.token_texts import TokenTexts

SMILE = "\N{SMILING FACE WITH SMILING EYES}".encode()


def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    found = tokenizers.Tokenizer(models.BPE(vocab={each: place for place, each in enumerate(alphabet)}, merges=[]))
    found.pre_tokenizer, found.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    found.add_special_tokens([AddedToken("<|end|>", special=True)])
    return Tokenizer(found)


def pieces() -> Tokenizer:
    """As Llama 2's: spaces are part of tokens, and characters without one are bytes."""
    vocab = {"<unk>": 0, "<s>": 1} | {f"<0x{byte:02X}>": 2 + byte for byte in range(256)}
    for piece in ("\u2581", "a", "A", "\u2581a", "b"):
        vocab[piece] = len(vocab)
    found = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=[("\u2581", "a")], unk_token="<unk>", byte_fallback=True)
    )
    found.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    found.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    found.add_special_tokens([AddedToken("<unk>", special=True), AddedToken("<s>", special=True)])
    return Tokenizer(found)


@pytest.mark.parametrize("tokenizer", [byte_level(), pieces()], ids=["bytes", "pieces"])
@pytest.mark.parametrize("before", [None, "a"])
@pytest.mark.parametrize("text", ["a b", "\u00fc\u4e16\U0001f60a!", " a", "e\u0301a"])
def test_bytes_of_tokens_are_the_text(tokenizer: Tokenizer, before: str | None, text: str) -> None:
    context = [] if before is None else tokenizer.encode(before)
    ids = tokenizer.encode_continuation(text)
    if before is None and not tokenizer.byte_level:
        text = text.removeprefix(" ")  # which begins no text of this kind
    texts, joined = TokenTexts(tokenizer, context), b""
    for token_id in ids:
        whole = joined.decode(errors="ignore")
        assert texts.length == len(whole)
        joined += texts.bytes_of(token_id)
        texts.push(token_id)
    assert joined.decode() == text


def test_tokens_have_names() -> None:
    tokenizer = byte_level()
    (end,) = tokenizer.special_tokens
    texts, ids = TokenTexts(tokenizer), tokenizer.encode(SMILE.decode() + "x")
    assert [texts.name(each) for each in ids] == [f"bytes:\\x{byte:02x}" for byte in SMILE] + ["x"]
    assert (texts.name(end), texts.bytes_of(end)) == ("<|end|>", b"")
    assert texts.name(9999) == "token_id:9999"
    other = pieces()
    spaced, plain, byte = (other.token_id(each) or 0 for each in ("\u2581a", "a", "<0x61>"))
    begun, fresh = TokenTexts(other, [plain]), TokenTexts(other)
    assert [begun.name(each) for each in (spaced, plain, byte)] == [" a", "a", "a"]
    assert [fresh.name(each) for each in (spaced, plain, byte)] == ["a", "a", "a"]
