"""Constrained decoding: at each token, a mask of the vocabulary's tokens that the text may continue with.

Source: FEATURES row 11. A mask is made once for each state of the grammar that a text comes to, for the whole
vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from plans.errors import RequestError
from plans.tokenizer import Tokenizer
from runtime.text.common_length import common_length
from runtime.text.grammar import DEAD, Grammar
from runtime.text.rules import LogitsRule


class Vocabulary:
    """The tokens of a plan as bytes, and the masks of a grammar's states."""

    def __init__(self, grammar: Grammar, tokenizer: Tokenizer, size: int, ends: Iterable[int]) -> None:
        """`size` tokens; `ends` end a text wherever the grammar may end. Raises `RequestError` for a tokenizer whose
        tokens are not bytes.
        """
        if not tokenizer.byte_level:
            raise RequestError("A form is for byte-level tokenizers, and the plan's is none.")
        texts = [tokenizer.token_bytes(token) if token < tokenizer.vocab_size else b"" for token in range(size)]
        longest = max(map(len, texts))
        self.grammar, self.texts = grammar, texts
        self._bytes = np.zeros((longest, size), np.uint8)
        for token, text in enumerate(texts):
            self._bytes[: len(text), token] = np.frombuffer(text, np.uint8)
        self._lengths = np.array([len(text) for text in texts])
        self._ends = np.array(sorted(set(ends)), np.int64)
        self._masks: dict[int, NDArray[np.bool_]] = {}

    def mask(self, state: int) -> NDArray[np.bool_]:
        """Return bool `[size]`: the tokens that are allowed in `state`."""
        known = self._masks.get(state)
        if known is None:
            states = np.where(self._lengths > 0, state, DEAD)
            for place, column in enumerate(self._bytes):
                going = (self._lengths > place) & (states != DEAD)
                states[going] = self.grammar.table[states[going], column[going]]
            known = states != DEAD
            known[self._ends] = self.grammar.ends[state]
            self._masks[state] = known
        return known


class Constraint(LogitsRule):
    """The rule that a text keeps to a grammar."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._path: list[int] = []
        self._states = [0]  # behind each token of the path that was last asked for

    def begin(self, prompt: Sequence[int]) -> Constraint:
        return Constraint(self._vocabulary)

    def apply(self, logits: NDArray[np.float32], path: Sequence[int]) -> None:
        """Exclude tokens that the grammar does not allow behind `path`. Raises RequestError where it allows none."""
        mask = self._vocabulary.mask(self._follow(path))
        if not mask.any():
            raise RequestError("The form allows no token of the vocabulary here: it has bytes that no token has.")
        logits[~mask] = -np.inf

    def _follow(self, path: Sequence[int]) -> int:
        """Return the grammar's state behind `path`; the states on the way there are kept for the next call."""
        known = common_length(self._path, path)
        del self._path[known:], self._states[known + 1 :]
        for token in path[known:]:
            self._path.append(token)
            self._states.append(self._vocabulary.grammar.follow(self._states[-1], self._vocabulary.texts[token]))
        return self._states[-1]
