"""Streamed text is the decoded text, for any tokens, spans, context and stop strings; what tokens add to a text."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache, partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import decoders, models

from outrider.plans.errors import RequestError
from outrider.plans.tokenizer import Tokenizer
from outrider.runtime.text.stream import TextStream
from outrider.runtime.text.token_texts import TokenTexts
from tests import tokenizer_families as families
from tests.properties import cheap

PIECES = ["▁", "▁▁", "▁the", "the", "▁end", "e", "n", "d", ".", "##ing", "��", "日", "", "User", ":", "'t", "▁n't"]


@cache
def pieces(kind: str) -> Tokenizer:
    """A vocabulary of pieces and byte-fallback tokens under one of the decoders of that world."""
    decoder = {
        "llama": decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
        "gemma": decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
        "bytes first": decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " ")]),
        "metaspace": decoders.Metaspace(),
        "wordpiece": decoders.WordPiece(),
        "none": None,
    }[kind]
    vocab = {token: place for place, token in enumerate(["<unk>", "<s>", "</s>"])}
    vocab |= {f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)}
    vocab |= {piece: len(vocab) + place for place, piece in enumerate(PIECES)}
    library = LibraryTokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    if decoder is not None:
        library.decoder = decoder
    return Tokenizer(library)


TOKENIZERS = {"byte-level": cache(lambda: Tokenizer(families.qwen()))} | {
    kind: partial(pieces, kind) for kind in ("llama", "gemma", "bytes first", "metaspace", "wordpiece", "none")
}


def token_lists(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Anything, with a liking for what is awkward: bytes that nearly are UTF-8, special tokens, ids without token."""
    if tokenizer.byte_level:
        awkward = [i for i in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(i)) == 1]
        awkward = [i for i in awkward if tokenizer.token_bytes(i)[0] in b"\xf0\x9f\x98\x80\xe2\x96\x81\xed\xa0\xffend"]
    else:
        awkward = [3 + byte for byte in b"\xf0\x9f\x98\x80\xe2\x96\x81\xed\xff\x20e"]
    every = st.integers(0, tokenizer.vocab_size + 3)
    printing = st.integers(256 + 3, tokenizer.vocab_size - 1)
    return st.lists(st.one_of(every, printing, st.sampled_from(awkward), st.integers(0, 2)), max_size=24)


STOPS = st.lists(
    st.one_of(
        st.text("end\ufffd ", min_size=1, max_size=4),
        st.text("日本😀▁eé", min_size=1, max_size=3),
        st.sampled_from(["User:", " the", "\n\n", "ing", "world, 日", "e", "ee", "eee"]),
    ),
    max_size=6,
)


def cut(text: str, stops: Sequence[str], least: int = 0) -> tuple[str, str | None]:
    """By trying all: the stop string that is complete first after `least` characters, of several the longest."""
    for end in range(least + 1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def stream(
    tokenizer: Tokenizer, ids: list[int], stops: Sequence[str], spans: Sequence[int], context: Sequence[int] = ()
) -> tuple[str, str | None, int]:
    """Text, stop string and counted tokens of pushing `ids` in spans of the given sizes (cycled)."""
    text_stream = TextStream(tokenizer, context, stops)
    text, start, turn = "", 0, 0
    while start < len(ids):
        span = ids[start : start + spans[turn % len(spans)]]
        pushed = text_stream.push(span)
        text += pushed.text
        start += pushed.consumed
        turn += 1
        assert pushed.stop == text_stream.stopped
        if pushed.stop is not None:
            return text + text_stream.finish(), pushed.stop, start
        assert pushed.consumed == len(span)
    text += text_stream.finish()
    return text, text_stream.stopped, start


@pytest.mark.parametrize("kind", TOKENIZERS)
@cheap
@given(data=st.data(), stops=STOPS, spans=st.lists(st.integers(1, 7), min_size=1, max_size=3))
def test_streamed_text_is_the_decoded_text_cut_at_the_first_stop_string(
    kind: str, data: st.DataObject, stops: list[str], spans: list[int]
) -> None:
    tokenizer = TOKENIZERS[kind]()
    ids = data.draw(token_lists(tokenizer))
    text, stop, count = stream(tokenizer, ids, stops, spans)
    assert (text, stop) == cut(tokenizer.decode(ids), stops)
    assert (text, stop, count) == stream(tokenizer, ids, stops, [1])
    assert (text, stop, count) == stream(tokenizer, ids, stops, [len(ids) + 1])


@pytest.mark.parametrize("kind", TOKENIZERS)
@cheap
@given(data=st.data(), stops=STOPS, pushed=st.integers(0, 9))
def test_a_preview_is_what_would_be_shown_and_changes_nothing(
    kind: str, data: st.DataObject, stops: list[str], pushed: int
) -> None:
    tokenizer = TOKENIZERS[kind]()
    ids = data.draw(token_lists(tokenizer))
    text_stream = TextStream(tokenizer, (), stops)
    shown = text_stream.push(ids[:pushed]).text
    if text_stream.stopped is not None:
        return
    for end in (len(ids), pushed, (pushed + len(ids)) // 2):
        expected, _ = cut(tokenizer.decode(ids[: max(end, pushed)]), stops)
        assert shown + text_stream.preview(ids[pushed:end]) == expected
    assert shown + text_stream.push(ids[pushed:]).text + text_stream.finish() == cut(tokenizer.decode(ids), stops)[0]


@pytest.mark.parametrize("kind", TOKENIZERS)
@cheap
@given(data=st.data(), stops=STOPS, least=st.integers(0, 9), size=st.integers(1, 7))
def test_stop_strings_count_after_the_least_tokens(
    kind: str, data: st.DataObject, stops: list[str], least: int, size: int
) -> None:
    tokenizer = TOKENIZERS[kind]()
    ids = data.draw(token_lists(tokenizer))
    before = len(TextStream(tokenizer).push(ids[:least]).text) if least < len(ids) else len(tokenizer.decode(ids))
    text_stream = TextStream(tokenizer, (), stops)
    text_stream.least = least
    shown = ""
    for start in range(0, len(ids), size):
        pushed = text_stream.push(ids[start : start + size])
        shown += pushed.text
        if pushed.stop is not None:
            break
    assert (shown + text_stream.finish(), text_stream.stopped) == cut(tokenizer.decode(ids), stops, before)


@pytest.mark.parametrize("kind", TOKENIZERS)
@cheap
@given(data=st.data(), stops=STOPS)
def test_a_stop_is_reported_at_the_token_that_completes_it(kind: str, data: st.DataObject, stops: list[str]) -> None:
    """With the counted tokens the stop string is there; with one token less it is not, or not for sure."""
    tokenizer = TOKENIZERS[kind]()
    ids = data.draw(token_lists(tokenizer))
    text, stop, count = stream(tokenizer, ids, stops, [3])
    assert cut(tokenizer.decode(ids[:count]), stops) == (text, stop)
    if stop is not None and count:
        before = TextStream(tokenizer, (), stops)
        assert before.push(ids[: count - 1]).stop is None


@pytest.mark.parametrize("kind", TOKENIZERS)
@cheap
@given(data=st.data())
def test_a_context_is_continued(kind: str, data: st.DataObject) -> None:
    """After whole characters, what is streamed is what the decoded whole has more than the decoded context."""
    tokenizer = TOKENIZERS[kind]()
    ids = data.draw(token_lists(tokenizer))
    context = data.draw(token_lists(tokenizer))
    context += tokenizer.encode("the end", add_special_tokens=False) if tokenizer.byte_level else [3 + 256 + 3]
    context += data.draw(st.lists(st.integers(0, 2) if not tokenizer.byte_level else st.integers(0, 1), max_size=3))
    text, _, _ = stream(tokenizer, ids, (), [2], context)
    assert tokenizer.decode(context) + text == tokenizer.decode(context + ids)


@pytest.mark.parametrize("kind", ["byte-level", "llama"])
def test_a_character_that_the_context_leaves_unfinished_is_finished(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    if tokenizer.byte_level:
        by_byte = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
        smile = [by_byte[bytes([byte])] for byte in "😀".encode()]
    else:
        smile = [3 + byte for byte in "😀".encode()]
    for known in range(4):
        assert stream(tokenizer, smile[known:], (), [1], smile + smile[:known])[0] == "😀"
    assert stream(tokenizer, [], (), [1], smile)[0] == ""


def test_text_that_may_start_a_stop_string_is_held_back_until_decided() -> None:
    tokenizer = TOKENIZERS["byte-level"]()
    letters = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    for stop, text, shown in (
        (["end!", "ende"], "xende", ["x", "", "", "", ""]),
        (["nnd"], "nnne", ["", "", "n", "nne"]),
    ):
        text_stream = TextStream(tokenizer, stop=stop)
        assert [text_stream.push([letters[letter.encode()]]).text for letter in text] == shown
    text_stream = TextStream(tokenizer, stop=["e"])
    text_stream.least = 1  # stop strings count after this number of tokens
    assert text_stream.push([letters[b"e"]] * 2).text == "e"
    assert text_stream.stopped == "e"


def test_nothing_may_follow_a_stop_string() -> None:
    tokenizer = TOKENIZERS["byte-level"]()
    text_stream = TextStream(tokenizer, stop=["the"])
    pushed = text_stream.push(tokenizer.encode("at the end of the"))
    assert (pushed.text, pushed.stop) == ("at ", "the")
    assert text_stream.finish() == ""
    with pytest.raises(RuntimeError, match="has ended with the stop string 'the'"):
        text_stream.push([5])


@pytest.mark.parametrize("stop", [[""], ["a", None], "end"])
def test_a_stop_string_must_be_text(stop: list[str]) -> None:
    said = r"stop\[\d\] must be a text of at least one character|put the one stop string into a list"
    with pytest.raises(RequestError, match=said):
        TextStream(TOKENIZERS["byte-level"](), stop=stop)


@pytest.mark.parametrize(("kind", "invalid"), [("byte-level", False), ("llama", True)])
def test_a_token_costs_the_same_at_any_length(kind: str, invalid: bool) -> None:
    """Ten times the tokens must not cost more than ten times the time, within a wide margin for a busy machine."""
    tokenizer, ids = TOKENIZERS[kind](), [256 + 3 + i % 8 for i in range(20_000)]
    if invalid:
        ids = [next(i for i in range(256 + 3) if tokenizer.fallback_byte(i) == b"\xff")] * 20_000

    def seconds(count: int) -> float:
        text_stream = TextStream(tokenizer, stop=["\n\nUser:", "never"])
        start = time.thread_time()
        for token_id in ids[:count]:
            text_stream.push([token_id])
        text_stream.finish()
        return time.thread_time() - start

    assert min(seconds(20_000) for _ in range(3)) < 40 * min(seconds(2_000) for _ in range(3))


SMILE = "\N{SMILING FACE WITH SMILING EYES}".encode()


BYTE_LEVEL, SENTENCEPIECE = Tokenizer(families.tekken()), Tokenizer(families.llama())


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["bytes", "pieces"])
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
    texts, end = TokenTexts(BYTE_LEVEL), BYTE_LEVEL.token_id("</s>") or 0
    ids = BYTE_LEVEL.encode(SMILE.decode() + "x", add_special_tokens=False)
    assert [texts.name(each) for each in ids] == [f"bytes:\\x{byte:02x}" for byte in SMILE] + ["x"]
    assert (texts.name(end), texts.bytes_of(end)) == ("</s>", b"")
    assert texts.name(9999) == "token_id:9999"
    spaced, plain, byte = (SENTENCEPIECE.token_id(each) or 0 for each in ("\u2581m", "m", "<0x6D>"))
    begun, fresh = TokenTexts(SENTENCEPIECE, [plain]), TokenTexts(SENTENCEPIECE)
    assert [begun.name(each) for each in (spaced, plain, byte)] == [" m", "m", "m"]
    assert [fresh.name(each) for each in (spaced, plain, byte)] == ["m", "m", "m"]
