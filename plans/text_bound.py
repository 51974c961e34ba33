"""The least number of tokens that a text can become, known from its bytes alone.

Encoding a text takes much longer than counting its bytes, so a text that cannot fit a context is refused by its bytes.
The bound holds where every byte of a text reaches a token: a token then stands for at most the bytes of the longest one
in the vocabulary. Unicode's normal forms and replacements may shrink a text by a known factor. Where a tokenizer may
drop or merge text without limit (unknown words, deleted characters), there is no bound, and no text is refused by it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import models

# A character may become one of fewer bytes, but never none: 4 bytes are the longest, 1 the shortest.
_LOWERCASE = 4
# A composed character has at most four parts, each from a character of at most 4 bytes; those of three parts have 2
# bytes or more, those of four 3. The normal forms that only decompose stay below that.
_NORMAL_FORM = 6
_EXACT = {"ByteLevel", "Digits", "FixedLength", "Metaspace", "UnicodeScripts"}  # pre-tokenizers that drop nothing
_CUTTING = {"Split", "Punctuation"}  # the same, unless they are set to remove what they find
_DROP_BLANKS = {"BertPreTokenizer", "Whitespace", "WhitespaceSplit"}


@dataclass(frozen=True)
class TextBound:
    """A token stands for at most `bytes_per_token` bytes; None: for any number of them. With `blanks_vanish`, white
    space may leave no token, and is not counted."""

    bytes_per_token: int | None
    blanks_vanish: bool = False

    def least_tokens(self, text: str) -> int:
        """Tokens that `text` becomes at least; 0 where nothing is known."""
        if self.bytes_per_token is None:
            return 0
        counted = "".join(text.split()) if self.blanks_vanish else text
        return -(-len(counted.encode(errors="surrogatepass")) // self.bytes_per_token)


def bound_of(tokenizer: tokenizers.Tokenizer, alphabet: set[str]) -> TextBound:
    """Facts about a tokenizer; `alphabet` are the characters that stand for bytes in a byte-level vocabulary."""
    parts = [*parts_of(tokenizer.normalizer, "normalizers"), *parts_of(tokenizer.pre_tokenizer, "pretokenizers")]
    factor, blanks_vanish, blanks_appear = 1, False, False
    for part in parts:
        kind = part["type"]
        removes = kind in _CUTTING and part["behavior"] == "Removed"
        if kind in ("NFC", "NFD", "NFKC", "NFKD"):
            factor *= _NORMAL_FORM
        elif kind == "Lowercase":
            factor *= _LOWERCASE
        elif kind == "Replace":
            found, put = part["pattern"].get("String", ""), part["content"]
            if not (found and put):  # an expression may match any number of characters
                return TextBound(None)
            factor *= max(1, -(-len(found.encode()) // len(put.encode())))
            blanks_appear |= any(character.isspace() for character in put)
        elif kind in _DROP_BLANKS or kind == "Strip":
            blanks_vanish = True
        elif removes or kind not in {*_EXACT, *_CUTTING, "Prepend"}:
            return TextBound(None)
    added = tokenizer.get_added_tokens_decoder().values()
    blanks_vanish |= any(token.lstrip or token.rstrip for token in added)
    byte_level = any(part["type"] == "ByteLevel" for part in parts)
    if blanks_vanish and blanks_appear:  # what is no white space yet may vanish too
        return TextBound(None)
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    if not _is_complete(tokenizer.model, vocabulary, alphabet if byte_level else None):
        return TextBound(None)
    # A character of a byte-level vocabulary is a byte. A token that nothing spells stands for one character.
    longest = max((len(token) if byte_level else len(token.encode()) for token in vocabulary), default=1)
    longest = max(longest, 4, *(len(token.content.encode()) for token in added), 4)
    return TextBound(longest * factor, blanks_vanish)


def parts_of(component: Any, within: str) -> list[dict[str, Any]]:
    """The parts of a component of a tokenizer in order, as in `tokenizer.json`; none where it has no such."""
    return [] if component is None else flat_parts(json.loads(component.__getstate__()), within)


def flat_parts(part: dict[str, Any] | None, within: str) -> list[dict[str, Any]]:
    """A part of `tokenizer.json`, or those that a sequence of them has under the key `within`."""
    if part is None:
        return []
    return [each for inner in part[within] for each in flat_parts(inner, within)] if within in part else [part]


def _is_complete(model: models.Model, vocabulary: dict[str, int], alphabet: set[str] | None) -> bool:
    """Whether no text is without a token, and no two unknown characters share one."""
    if not isinstance(model, models.BPE):
        return False  # WordPiece, WordLevel and Unigram have one token for an unknown word of any length
    spelled_alike = not (model.continuing_subword_prefix or model.end_of_word_suffix)  # wherever a byte stands
    if alphabet is not None and alphabet <= vocabulary.keys() and spelled_alike:
        return True
    if model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
        return True
    return model.unk_token is not None and not model.fuse_unk
