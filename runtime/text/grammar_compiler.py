"""A grammar, compiled by llguidance for the tokens of a plan."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from outrider.plans.errors import RequestError
from outrider.plans.tokenizer import Tokenizer

_LIMITS: dict[str, Any] = {"verbose_errors": False, "step_max_items": 200_000}
# Items in a row: llguidance's own default, and one for each character of the grammar, since each of an enum or `anyOf`
# of thousands is an item. A row of a grammar that is ambiguous, or right-recursive, grows with the text.
_ROW, _LARGEST_ROW = 2_000, 20_000
_LONGEST = 200  # characters that are shown of an excerpt or a reason
_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): (.*)", re.DOTALL)
_SPECIAL = b"\xff"  # what llguidance knows a special token by: no text has the byte


class Vocabulary:
    """A plan's tokens as llguidance takes them.

    Its end token is one more than the target has: requests have end tokens of their own.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None
    special_token_ids: tuple[int, ...] = ()

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        """`size` is the target's vocabulary, which may be larger than the tokenizer's."""
        self._tokenizer, self.size = tokenizer, size
        special = {token: _SPECIAL + text.encode() for token, text in tokenizer.special_tokens.items()}
        texts = tokenizer.text_bytes()
        self.tokens = [special.get(token) or (texts[token] if token < len(texts) else b"") for token in range(size)]
        self.absent = np.array([token for token, text in enumerate(self.tokens) if not text], np.int64)
        self.tokens.append(_SPECIAL + b"<the end>")
        self.eos_token_id = size
        self.tokenizer = LLTokenizer(self)  # type: ignore[arg-type]  # any object of these attributes

    def __call__(self, text: str) -> list[int]:
        """Tokens of a text that a grammar forces, as the model would write it where the tokenizer can."""
        ids = self._tokenizer.encode_continuation(text)
        if b"".join(self.tokens[token] for token in ids) == text.encode():
            return ids
        return list(self.tokenizer.greedy_tokenize(text))


def compile_grammar(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Return a matcher that has read nothing, for one text: its limits count what it and its copies do.

    Lets other threads of Python run. A grammar that is wrong makes a matcher that `is_error()`.
    """
    row = min(_LARGEST_ROW, _ROW + len(grammar))
    return LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**_LIMITS, max_items_in_row=row))


def check_grammar(tokenizer: LLTokenizer, grammar: str, where: str) -> None:
    """Raise RequestError, which calls it `where`, for a grammar that is wrong, or that no text can keep to."""
    matcher = compile_grammar(tokenizer, grammar)
    if matcher.is_error():
        raise RequestError(f"{where} {reason_of(matcher.get_error())}. Correct it.")
    matcher.compute_bitmask()
    if matcher.is_error():
        raise RequestError(f"{where} has no text that the plan's tokens can spell, or is too complex. Correct it.")


def reason_of(error: str) -> str:
    """A sentence's end for what llguidance says, which may be many lines with excerpts."""
    place = _PLACE.fullmatch(error.strip())
    where, said = (f" at line {place[1]}, column {place[2]}", place[3]) if place else ("", error.strip())
    lines = said.split("\n")
    reason = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    reason = reason[:_LONGEST].rstrip(".")
    if "regex parse error" in lines[0] and len(lines) > 1:
        return f"has a regular expression that cannot be read, {lines[1].strip()[:_LONGEST]}: {reason}"
    return f"cannot be served{where}: {reason}"
