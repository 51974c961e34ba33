"""One generation's text, as its tokens arrive: whole characters, nothing past a stop string.

Two stages, each with what it holds back. Detokenising holds the bytes of an unfinished character. Stop strings hold
text that may be the start of one. Neither looks at more than it holds, so a token costs the same at any length.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Protocol

from outrider.plans.errors import RequestError
from outrider.plans.tokenizer import TokenIds, Tokenizer, as_ids

# How far back into the context a stream looks: an unfinished character is at most 3 tokens that print, and what lies
# between (special tokens at the end of a chat prompt) is short.
CONTEXT_TOKENS = 64


@dataclass(slots=True)
class StreamedText:
    """Text that a span of tokens brought.

    `text` may be shown now and stays. `consumed` tokens of the span count: all of them, or, where `stop` names the
    stop string that was found, those up to and including the token that completed it.
    """

    text: str
    consumed: int
    stop: str | None


class TextStream:
    """Detokenises one generation and ends it at the first stop string.

    All texts that `push` and `finish` return, joined, are `tokenizer.decode` of all the tokens, cut where the first
    stop string begins; how tokens were spread over spans makes no difference. The first stop string is the one that
    is complete first; of several complete at the same character, the longest. It is never part of the text.
    """

    def __init__(self, tokenizer: Tokenizer, context: TokenIds = (), stop: Sequence[str] = ()) -> None:
        """Start after the tokens of `context`, of which only the last 64 matter.

        With a context the text continues that of the context: a first token that starts with a space keeps it, and
        a character that the context leaves unfinished is the stream's. Stop strings are looked for in the stream's
        text only. Raises RequestError for a stop string that is empty or no text.
        """
        tail = as_ids(context[-CONTEXT_TOKENS:])
        self._detokenizer: _Detokenizer = (
            _ByteLevelText(tokenizer, tail) if tokenizer.byte_level else _PieceText(tokenizer, tail)
        )
        self._stops = _StopStrings(stop)
        self._taken = 0
        self.least = 0
        """How many tokens come before stop strings count: one that a later token completes does."""

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._stops.found

    def push(self, token_ids: TokenIds) -> StreamedText:
        """Take newly committed tokens, in order. Raises RuntimeError once a stop string has been found."""
        if self.stopped is not None:
            raise RuntimeError(f"The text has ended with the stop string {self.stopped!r}; start a new TextStream.")
        ids = token_ids if type(token_ids) is list else as_ids(token_ids)  # the session's spans are lists
        if not self._stops.wanted:
            return StreamedText(self._detokenizer.push(ids), len(ids), None)
        shown = []
        for place, token_id in enumerate(ids):
            text = self._detokenizer.push([token_id])
            self._taken += 1
            if text:
                shown.append(self._stops.push(text, ends=self._taken > self.least))
                if self.stopped is not None:
                    return StreamedText("".join(shown), place + 1, self.stopped)
        return StreamedText("".join(shown), len(ids), None)

    def finish(self) -> str:
        """The text still held back, when no more tokens come: bytes of an unfinished character become U+FFFD.

        These may complete a stop string after all (one that holds U+FFFD, or one spelled in byte-fallback tokens):
        `stopped` then has it.
        """
        if self.stopped is not None:
            return ""
        shown = self._stops.push(self._detokenizer.finish(), ends=self._taken > self.least)
        return shown + self._stops.flush()

    def preview(self, token_ids: TokenIds) -> str:
        """The text that `push` of these tokens and `finish` would return. Changes nothing."""
        detokenizer, stops, taken = self._detokenizer, self._stops, self._taken
        self._detokenizer, self._stops = copy(detokenizer), copy(stops)
        try:
            shown = self.push(token_ids).text
            return shown + self.finish()
        finally:
            self._detokenizer, self._stops, self._taken = detokenizer, stops, taken


class _Detokenizer(Protocol):
    """Token ids in, text that will not change out."""

    def push(self, token_ids: list[int]) -> str: ...

    def finish(self) -> str: ...

    def __copy__(self) -> _Detokenizer: ...


class _ByteLevelText:
    """Tokens are bytes. Python and the library replace invalid UTF-8 alike (Unicode's maximal subparts)."""

    def __init__(self, tokenizer: Tokenizer, context: list[int]) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self.push(context)

    def __copy__(self) -> _ByteLevelText:
        other = object.__new__(_ByteLevelText)
        other._token_bytes = self._token_bytes
        other._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        other._utf8.setstate(self._utf8.getstate())
        return other

    def push(self, token_ids: list[int]) -> str:
        return self._utf8.decode(b"".join(map(self._token_bytes, token_ids)))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _PieceText:
    """Tokens are pieces of text, except for runs of byte-fallback tokens and for the first piece.

    A run waits for its end: the library turns ALL its bytes into U+FFFD if any of them are invalid, so that a
    character shown early could not be taken back. The first piece waits until it prints, since leading spaces are
    dropped before it.
    """

    def __init__(self, tokenizer: Tokenizer, context: list[int]) -> None:
        self._tokenizer = tokenizer
        settled, unfinished = _split_unfinished(tokenizer, context)
        self._begun = tokenizer.decode(settled) != ""
        self._pending = unfinished

    def __copy__(self) -> _PieceText:
        other = object.__new__(_PieceText)
        other._tokenizer, other._begun, other._pending = self._tokenizer, self._begun, list(self._pending)
        return other

    def push(self, token_ids: list[int]) -> str:
        shown = ""
        for token_id in token_ids:
            if self._tokenizer.is_skipped(token_id):
                continue
            self._pending.append(token_id)
            if not self._tokenizer.fallback_byte(token_id):
                shown += self.finish()
        return shown

    def finish(self) -> str:
        if not self._pending:
            return ""
        text = self._tokenizer.continuation(self._pending) if self._begun else self._tokenizer.decode(self._pending)
        if self._begun or text:
            self._begun = True
            self._pending = []
        return text


def _split_unfinished(tokenizer: Tokenizer, context: list[int]) -> tuple[list[int], list[int]]:
    """Part byte-fallback tokens that only start a character from the end of a context."""
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    settled = [token_id for token_id in context if not tokenizer.is_skipped(token_id)]
    for token_id in settled:
        byte = tokenizer.fallback_byte(token_id)
        if byte:
            utf8.decode(byte)
        else:
            utf8.reset()
    unfinished_bytes, _ = utf8.getstate()
    cut = len(settled) - len(unfinished_bytes)
    return settled[:cut], settled[cut:]


class _StopStrings:
    """Finds the first of many strings in a text that arrives in pieces (Aho and Corasick, CACM 18(6), 1975).

    A state is the longest end of the text that starts a stop string. Its length is exactly what must be held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str):
            raise RequestError("`stop` must be a list of texts; put the one stop string into a list.")
        self.found: str | None = None
        self.wanted = bool(stops)
        self._held = ""
        self._state = 0
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._match: list[str | None] = [None]  # the longest stop string that ends in the state
        for place, stop in enumerate(stops):
            self._add(stop, place)
        self._fail = self._link()

    def push(self, text: str, *, ends: bool = True) -> str:
        """Text that may be shown: up to a stop string that `ends` here, or up to what may start one."""
        if not self.wanted:
            return text
        state = self._state
        for place, character in enumerate(text):
            state = self._step(state, character)
            match = self._match[state]
            if match is not None and ends:
                self.found = match
                # The match is an end of held + text up to here, and a held text is its start: it fits.
                return (self._held + text[: place + 1])[: -len(match)]
        self._state = state
        text = self._held + text
        shown = len(text) - self._depth[state]
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """Return what is held: no more text comes."""
        held, self._held, self._state = self._held, "", 0
        return "" if self.found is not None else held

    def _step(self, state: int, character: str) -> int:
        while True:
            following = self._next[state].get(character)
            if following is not None:
                return following
            if state == 0:
                return 0
            state = self._fail[state]

    def _add(self, stop: object, place: int) -> None:
        if not isinstance(stop, str) or not stop:
            raise RequestError(f"stop[{place}] must be a text of at least one character, not {stop!r}.")
        state = 0
        for character in stop:
            following = self._next[state].get(character)
            if following is None:
                following = self._next[state][character] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._match.append(None)
            state = following
        self._match[state] = stop

    def _link(self) -> list[int]:
        """For each state, the state of its longest proper end; matches are passed on along these links."""
        self._fail = [0] * len(self._next)
        waiting = deque(self._next[0].values())
        while waiting:
            state = waiting.popleft()
            for character, following in self._next[state].items():
                self._fail[following] = self._step(self._fail[state], character)
                if self._match[following] is None:
                    self._match[following] = self._match[self._fail[following]]
                waiting.append(following)
        return self._fail
