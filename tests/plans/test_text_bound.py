"""The least number of tokens of a text, against what texts become; Unicode's own data for the normal forms."""

from __future__ import annotations

import threading
import time
import unicodedata
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as LibraryTokenizer

from outrider import Runtime
from outrider.plans.errors import RequestError
from outrider.plans.text_bound import _NORMAL_FORM
from outrider.plans.tokenizer import Tokenizer
from tests.plans.test_tokenizer import byte_level, pieces


def with_normalizers(*parts: normalizers.Normalizer) -> LibraryTokenizer:
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.Sequence(list(parts))
    return tokenizer


def swallowing_blanks() -> LibraryTokenizer:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken("<|end|>", rstrip=True, lstrip=True)])
    return tokenizer


def falling_back() -> LibraryTokenizer:
    listed = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a"]
    vocabulary = {piece: place for place, piece in enumerate(listed)}
    tokenizer = LibraryTokenizer(
        models.BPE(vocab=vocabulary, merges=[("▁", "a")], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


BOUNDED = {
    "bytes": byte_level(),
    "normal forms": with_normalizers(normalizers.NFC(), normalizers.Lowercase(), normalizers.Replace("hello", "o")),
    "blanks vanish": swallowing_blanks(),
    "byte fallback": falling_back(),
    "an unknown token a character": pieces(None),
}
TEXTS = st.lists(
    st.one_of(
        st.text(max_size=8),
        st.sampled_from([" hello", "<|end|>", "   ", "\u212b", "\u212a", "\uac01", "a\u0323\u0307", "日本語"]),
    ),
    max_size=12,
).map("".join)


@pytest.mark.parametrize("kind", BOUNDED)
@given(text=TEXTS, times=st.integers(1, 40))
def test_no_text_has_fewer_tokens_than_its_bytes_say(kind: str, text: str, times: int) -> None:
    tokenizer = Tokenizer(BOUNDED[kind])
    assert tokenizer.least_tokens("word " * 100_000) > 100
    for each in (text * times, unicodedata.normalize("NFD", text) * times):
        assert tokenizer.least_tokens(each) <= len(tokenizer.encode(each, add_special_tokens=False))


@pytest.mark.parametrize("form", ["NFC", "NFKC", "NFD", "NFKD"])
def test_normal_forms_shrink_a_text_by_no_more_than_is_allowed_for(form: str) -> None:
    codes = [code for code in range(0x32000) if not 0xD800 <= code < 0xE000]  # beyond, nothing has another form
    sources: dict[str, int] = {}  # of a part: bytes of the longest character that becomes it
    for code in codes:
        part = unicodedata.normalize(form.replace("C", "D"), chr(code))
        if len(part) == 1:
            sources[part] = max(sources.get(part, 0), len(chr(code).encode()))
    for code in codes:
        if unicodedata.normalize(form, chr(code)) != chr(code):
            continue
        parts = unicodedata.normalize("NFD", chr(code)) if form.endswith("C") else chr(code)
        assert sum(sources[part] for part in parts) <= _NORMAL_FORM * len(chr(code).encode())


def without_bound() -> list[LibraryTokenizer]:
    words = LibraryTokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    fused = pieces(None)
    fused.model = models.BPE(vocab=fused.get_vocab(), merges=[], unk_token="<unk>", fuse_unk=True)
    dropping = pieces(None)
    dropping.model = models.BPE(vocab=dropping.get_vocab(), merges=[])
    erasing, removing = with_normalizers(normalizers.Replace(Regex(" +"), " ")), byte_level()
    removing.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("o", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    blanking = with_normalizers(normalizers.Replace("d", " "), normalizers.Strip())  # letters become blanks first
    prefixed = byte_level()  # a byte inside a word has no token
    prefixed.model = models.BPE(vocab=prefixed.get_vocab(), merges=[], continuing_subword_prefix="##")
    return [words, fused, dropping, erasing, removing, blanking, prefixed]


@pytest.mark.parametrize("library", without_bound())
def test_where_text_may_vanish_without_limit_nothing_is_said(library: LibraryTokenizer) -> None:
    if library.decoder is None:
        library.decoder = decoders.Fuse()
    assert Tokenizer(library).least_tokens("word " * 100_000) == 0


def test_a_text_of_megabytes_is_refused_before_it_is_encoded(toy: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tokenizer, "encode", Mock(side_effect=AssertionError("it was encoded")))
    with pytest.raises(RequestError, match=r"at least \d+ tokens before any is generated; the plan's context is"):
        toy.generate("x" * 20_000_000)


def test_other_threads_run_while_a_text_is_encoded() -> None:
    """For as much of the processor's time, whatever else it does."""
    tokenizer, encoding = Tokenizer(byte_level()), list[float]()

    def encode() -> None:
        tokenizer.encode("hello world, again " * 30_000)
        encoding.append(time.thread_time())

    thread, began = threading.Thread(target=encode), time.thread_time()
    thread.start()
    while thread.is_alive():
        pass
    assert time.thread_time() - began > 0.2 * encoding[0]
