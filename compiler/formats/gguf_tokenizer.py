"""The tokenizer in a GGUF file's metadata, as a `tokenizers` object.

Two kinds: `gpt2`, byte-level BPE with merges, whose pre-tokenizer is known by a name; and `llama`, SentencePiece's BPE,
which has a score for each piece instead of merges.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from outrider.compiler.formats.gguf_file import GgufFile
from outrider.compiler.formats.sentencepiece_model import (
    CONTROL,
    NORMAL,
    SPACE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Pieces,
    merges,
    pieces_decoder,
    surround,
)
from outrider.plans.errors import CheckpointError

_PREFIX = "tokenizer.ggml."
TOKENS, TOKEN_TYPES = f"{_PREFIX}tokens", f"{_PREFIX}token_type"
_TEMPLATE, _TOOLS_TEMPLATE = "tokenizer.chat_template", "tokenizer.chat_template.tool_use"
_DEFAULT = "default"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CASED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CASED}\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CASED}\p{{N}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_NUMBERS = r"\p{N}+"
_SYMBOLS = r"[\p{P}$+<=>^~|]+"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORT}|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class _Splitting:
    """How text is split before merges: regular expressions, one after another; `whole` words need no merges."""

    patterns: tuple[str, ...]
    whole: bool = False
    begins: bool = False  # with the beginning-of-sequence token, unless the metadata says otherwise
    composed: bool = False  # Unicode's normal form C first


_SPLITTINGS = {
    **dict.fromkeys(("gpt-2", "gpt2", "olmo"), _Splitting((_GPT2,))),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _Splitting((_LLAMA3,), whole=True, begins=True)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _Splitting((_QWEN2,), composed=True)),
    **dict.fromkeys(("smollm", "starcoder", "refact"), _Splitting((r"\p{N}", _GPT2))),
    "dbrx": _Splitting((_LLAMA3,)),
    "gpt-4o": _Splitting((_GPT4O,)),
    "tekken": _Splitting((_TEKKEN,), whole=True, begins=True),
    _DEFAULT: _Splitting((_SYMBOLS, _GPT2, _NUMBERS, "[0-9][0-9][0-9]")),
}
"""By llama.cpp's names. `default` is that of files which name none; it is llama.cpp's, and no model's own."""


@dataclass(frozen=True)
class GgufText:
    """A file's tokenizer, chat templates, and texts of its tokens of beginning and end; None for what it has not."""

    tokenizer: Tokenizer
    template: str | None
    tools_template: str | None
    bos_token: str | None
    eos_token: str | None


def read_gguf_text(file: GgufFile) -> GgufText:
    """Build the tokenizer of the file."""
    vocabulary = _Vocabulary(file)
    kinds = {"gpt2": _byte_level, "llama": _sentencepiece}
    kind = vocabulary.text("model")
    if kind not in kinds:
        raise vocabulary.wrong("model", f"is {kind!r}; tokenizers of the kinds {' and '.join(kinds)} are read")
    templates = file.value(_TEMPLATE, str), file.value(_TOOLS_TEMPLATE, str)
    return GgufText(kinds[kind](vocabulary), *templates, vocabulary.token_of("bos"), vocabulary.token_of("eos"))


class _Vocabulary:
    """The tokens of a file, their types, and further values by the last part of their keys."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        tokens = file.texts(TOKENS)
        if not tokens:
            raise self.wrong("tokens", "must be a list of texts; a plan carries the tokenizer")
        types = file.array(TOKEN_TYPES, len(tokens), integers=True)
        if types is None:
            types = np.full(len(tokens), NORMAL)
        self.tokens, self.types = tokens, types
        self.ids: dict[str, int] = {}
        for number, token in enumerate(tokens):
            if types[number] == UNUSED:
                continue  # fills the vocabulary up to the model's
            if token in self.ids:
                raise self.wrong("tokens", f"has {token!r} twice, as {self.ids[token]} and {number}")
            self.ids[token] = number

    def text(self, key: str, default: str | None = None) -> str:
        found = self._file.value(_PREFIX + key, str)
        value = default if found is None else found
        if value is None:
            raise self.wrong(key, "is missing; convert the model again")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._file.value(_PREFIX + key, bool)
        return default if value is None else value

    def merges(self) -> list[tuple[str, str]]:
        merges = self._file.texts(f"{_PREFIX}merges")
        if merges is None:
            raise self.wrong("merges", "must be a list of texts; convert the model again")
        pairs = [(first, second) for first, _, second in (merge.partition(" ") for merge in merges)]
        wrong = next((merge for merge, pair in zip(merges, pairs, strict=True) if not all(pair)), None)
        if wrong is not None:
            raise self.wrong("merges", f"has {wrong!r}, which is no pair of tokens")
        return pairs

    def scores(self) -> NDArray[np.generic]:
        scores = self._file.array(f"{_PREFIX}scores", len(self.tokens))
        if scores is None:
            raise self.wrong("scores", f"must be a list of {len(self.tokens)} numbers; convert the model again")
        return scores

    def token_of(self, role: str) -> str | None:
        """Return the text of the token with a role, such as `bos`; None where the file gives none."""
        number = self._file.value(f"{_PREFIX}{role}_token_id", int)
        if number is None:
            return None
        if not 0 <= number < len(self.tokens):
            raise self.wrong(f"{role}_token_id", f"is {number}; there are {len(self.tokens)} tokens")
        if self.types[number] == UNUSED:
            raise self.wrong(f"{role}_token_id", f"is {number}, a token that token_type calls unused")
        return self.tokens[number]

    def added(self) -> list[AddedToken]:
        """Return the tokens that are matched in a text before all others."""
        return [
            AddedToken(self.tokens[number], special=bool(self.types[number] != USER_DEFINED), normalized=False)
            for number in np.flatnonzero(np.isin(self.types, (UNKNOWN, CONTROL, USER_DEFINED)))
        ]

    def surround(self, tokenizer: Tokenizer, bos: bool) -> Tokenizer:
        """Add special tokens, and those around a text; `bos` is the default of the kind."""
        first = self.token_of("bos") if self.flag("add_bos_token", bos) else None
        last = self.token_of("eos") if self.flag("add_eos_token", False) else None
        surround(tokenizer, *(None if token is None else (token, self.ids[token]) for token in (first, last)))
        tokenizer.add_tokens(self.added())
        return tokenizer

    def wrong(self, key: str, how: str) -> CheckpointError:
        return self._file.wrong(_PREFIX + key, how)


def _byte_level(vocabulary: _Vocabulary) -> Tokenizer:
    name = vocabulary.text("pre", _DEFAULT)
    if name not in _SPLITTINGS:
        raise vocabulary.wrong("pre", f"is {name!r}; known pre-tokenizers: {', '.join(_SPLITTINGS)}")
    splitting = _SPLITTINGS[name]
    tokenizer = Tokenizer(_bpe(vocabulary, vocabulary.merges(), ignore_merges=splitting.whole))
    if splitting.composed:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in splitting.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return vocabulary.surround(tokenizer, bos=splitting.begins)


def _sentencepiece(vocabulary: _Vocabulary) -> Tokenizer:
    unknown = vocabulary.token_of("unknown")
    pieces = Pieces(vocabulary.tokens, vocabulary.types.tolist(), vocabulary.scores().tolist())
    found = merges(pieces, vocabulary.ids)
    tokenizer = Tokenizer(_bpe(vocabulary, found, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = vocabulary.flag("add_space_prefix", True)
    before = [normalizers.Prepend(SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", SPACE)])
    tokenizer.decoder = pieces_decoder(prefix)
    return vocabulary.surround(tokenizer, bos=True)


def _bpe(vocabulary: _Vocabulary, merges: list[tuple[str, str]], **options: Any) -> BPE:
    try:
        return BPE(vocab=vocabulary.ids, merges=merges, **options)
    except Exception as error:  # the tokenizers library raises plain `Exception`
        raise vocabulary.wrong("tokens", f"and the merges make no tokenizer: {error}") from None
