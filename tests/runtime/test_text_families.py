"""Streamed text, and the bytes of tokens, on tokenizers in the shapes that model families ship."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from outrider.plans.tokenizer import Tokenizer
from outrider.runtime.text.stream import TextStream
from tests.tokenizer_families import FAMILIES, TEXTS

AWKWARD = "👩‍👧🏳️‍🌈é日\u0301".encode() + b"\xed\xa0\xff\xc0 e"
PAST = 5  # ids that only the target has


@cache
def of(family: str) -> Tokenizer:
    return Tokenizer(FAMILIES[family]())


@cache
def by_bytes(family: str) -> dict[bytes, int]:
    """Tokens by what they add to a text."""
    texts = of(family).text_bytes()
    return {text: token for token, text in reversed(list(enumerate(texts))) if text}


def spelled(family: str, text: str) -> list[int]:
    """The tokens of a text's bytes one by one, as far as the vocabulary has them."""
    tokenizer, tokens = of(family), by_bytes(family)
    if tokenizer.byte_level:
        return [tokens[bytes([byte])] for byte in text.encode()]
    fallback = {tokenizer.fallback_byte(token): token for token in range(tokenizer.vocab_size)}
    return [fallback[bytes([byte])] for byte in text.encode()]


@cache
def token_lists(family: str) -> st.SearchStrategy[list[int]]:
    """Bytes that nearly are UTF-8, bytes of whole characters, texts, added tokens, and any others."""
    tokenizer = of(family)
    size = tokenizer.vocab_size
    added = sorted(FAMILIES[family]().get_added_tokens_decoder())
    parts = [
        st.integers(0, size + PAST).map(lambda token: [token]),
        st.sampled_from(added).map(lambda token: [token]),
        st.sampled_from(TEXTS).flatmap(
            lambda text: st.integers(1, 9).map(lambda count: tokenizer.encode(text, add_special_tokens=False)[:count])
        ),
    ]
    if family != "unigram without bytes":
        parts += [
            st.lists(st.sampled_from(AWKWARD), min_size=1, max_size=5).map(
                lambda found: [token for byte in found for token in byte_token(family, byte)]
            ),
            st.sampled_from(["é", "日", "👩‍👧", "🏳️‍🌈"]).map(lambda text: spelled(family, text)),
        ]
    return st.lists(st.one_of(parts), max_size=9).map(lambda found: [token for part in found for token in part])


def byte_token(family: str, byte: int) -> list[int]:
    tokenizer = of(family)
    one = tokenizer.token_bytes if tokenizer.byte_level else tokenizer.fallback_byte
    return [token for token in range(tokenizer.vocab_size) if one(token) == bytes([byte])][:1]


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data(), sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_streamed_text_is_what_the_libraries_decode(family: str, data: st.DataObject, sizes: list[int]) -> None:
    """What is shown is never taken back: the parts, joined, are the whole, and so no half of a character is a part."""
    ids = data.draw(token_lists(family))
    stream, text, start = TextStream(of(family)), "", 0
    while start < len(ids):
        size = sizes[start % len(sizes)]
        text += stream.push(ids[start : start + size]).text
        start += size
    text += stream.finish()
    assert text == FAMILIES[family]().decode(ids)
    known = [token for token in ids if token < of(family).vocab_size]
    assert text == oracle(family).decode(known, skip_special_tokens=True)


@cache
def oracle(family: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=FAMILIES[family]())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_encoded_as_in_transformers_and_streamed_without_half_a_character(family: str, text: str) -> None:
    tokenizer = of(family)
    ids = tokenizer.encode(text)
    assert ids == oracle(family)(text).input_ids
    assert tokenizer.encode(text, add_special_tokens=False) == oracle(family)(text, add_special_tokens=False).input_ids
    assert tokenizer.least_tokens(text) <= len(ids)
    whole, stream, shown = tokenizer.decode(ids), TextStream(tokenizer), ""
    for place, token in enumerate(ids):
        shown += stream.push([token]).text
        assert "\ufffd" not in shown or "\ufffd" in text
        if tokenizer.byte_level:  # every character that is complete is shown
            assert shown == b"".join(map(tokenizer.token_bytes, ids[: place + 1])).decode(errors="ignore")
        elif not tokenizer.fallback_byte(token) and not tokenizer.is_skipped(token):
            assert shown == tokenizer.decode(ids[: place + 1])
    assert shown + stream.finish() == whole


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "unigram without bytes"])
@pytest.mark.parametrize("stop", ["日本", "👩‍👧", "e👩‍", "\u200d👧the", "é!"])
def test_stop_strings_of_characters_that_many_tokens_spell(family: str, stop: str) -> None:
    tokenizer = of(family)
    the = tokenizer.encode_continuation("the")
    for ids in (
        [*the, *spelled(family, "日本"), *the, *spelled(family, "👩‍👧"), *the, *spelled(family, "é!"), *the],
        tokenizer.encode(f"the end, {stop}the"),
    ):
        text = TextStream(tokenizer).push([*ids, *the]).text
        for size in (1, 2, len(ids)):
            stream, shown = TextStream(tokenizer, stop=[stop]), ""
            for start in range(0, len(ids), size):
                pushed = stream.push(ids[start : start + size])
                shown += pushed.text
                if pushed.stop:
                    break
            shown += stream.finish()
            assert stop in text
            assert (shown, stream.stopped) == (text[: text.index(stop)], stop)


def test_special_tokens_part_no_character_and_print_nothing() -> None:
    for family in FAMILIES:
        tokenizer = of(family)
        if family == "unigram without bytes":
            continue
        the, smile = tokenizer.encode_continuation("the"), spelled(family, "👧")
        for special in tokenizer.special_tokens:
            stream = TextStream(tokenizer, the)
            assert stream.push([*smile[:2], special]).text == ""
            assert stream.push([*smile[2:], *the]).text == "👧the"


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
def test_the_bytes_of_tokens_are_the_text_that_they_add(family: str, data: st.DataObject) -> None:
    tokenizer = of(family)
    table = tokenizer.text_bytes()
    ids = [token for token in data.draw(token_lists(family)) if token < tokenizer.vocab_size]
    added = b"".join(table[token] for token in ids)
    assert all(table[token] == b"" for token in tokenizer.special_tokens)
    try:
        expected = added.decode()
    except UnicodeDecodeError:  # which no grammar reads
        return
    before = tokenizer.encode_continuation("the")
    assert tokenizer.decode([*before, *ids]) == tokenizer.decode(before) + expected
