"""What tokens add to a text, against the text that `tokenizers` decodes."""

from __future__ import annotations

import pytest

from outrider.plans.tokenizer import Tokenizer
from outrider.runtime.text.token_texts import TokenTexts
from tests import tokenizer_families as families

SMILE = "\N{SMILING FACE WITH SMILING EYES}".encode()


BYTES, PIECES = Tokenizer(families.tekken()), Tokenizer(families.llama())


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["bytes", "pieces"])
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
    texts, end = TokenTexts(BYTES), BYTES.token_id("</s>") or 0
    ids = BYTES.encode(SMILE.decode() + "x", add_special_tokens=False)
    assert [texts.name(each) for each in ids] == [f"bytes:\\x{byte:02x}" for byte in SMILE] + ["x"]
    assert (texts.name(end), texts.bytes_of(end)) == ("</s>", b"")
    assert texts.name(9999) == "token_id:9999"
    spaced, plain, byte = (PIECES.token_id(each) or 0 for each in ("\u2581m", "m", "<0x6D>"))
    begun, fresh = TokenTexts(PIECES, [plain]), TokenTexts(PIECES)
    assert [begun.name(each) for each in (spaced, plain, byte)] == [" m", "m", "m"]
    assert [fresh.name(each) for each in (spaced, plain, byte)] == ["m", "m", "m"]
