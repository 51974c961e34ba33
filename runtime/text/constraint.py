"""Constrained decoding: at each token, a mask of the vocabulary's tokens that the text may continue with.

Source: FEATURES row 11. A mask is made once for each state of the grammar that a text comes to, for the whole
vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plans import names
from plans.errors import RequestError
from plans.step_buffers import sampling_buffers
from plans.tokenizer import Tokenizer
from plugins import native
from runtime.sampling import SamplingParams
from runtime.text.grammar import DEAD, Grammar


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


class Constraint:
    """The constraint of one text. A generation with a constraint decodes plainly, token by token."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.state, self.begun = 0, False
        size = len(vocabulary.texts)
        table = {buffer.name: np.zeros(1, buffer.dtype.numpy) for buffer in sampling_buffers(1)}
        self._logits = np.zeros((1, size), np.float32)
        self._position, self._chosen = np.zeros(1, np.int64), np.zeros(1, np.int64)
        self._settings = table
        arrays: dict[str, NDArray[Any]] = {
            names.LOGITS_OUT: self._logits,
            names.LOGIT_INDICES: np.zeros(1, np.int64),
            names.POSITIONS: self._position,
            names.BRANCH: np.zeros(1, np.int64),
            names.COMMITTED: self._chosen,
            **{name: table[name] for name in _SETTINGS},
        }
        self._sample = native.create("Sample", arrays, {})

    def choose(self, logits: NDArray[np.float32], position: int, params: SamplingParams) -> int:
        """Return the target's choice among the allowed tokens, from `logits` `[vocab]` behind the token at `position`.

        The draw is the one that the token would have without a constraint. Raises `RequestError` where no token is
        allowed.
        """
        mask = self._vocabulary.mask(self.state)
        if not mask.any():
            raise RequestError("The form allows no token of the vocabulary here: it has bytes that no token has.")
        self._logits[0] = np.where(mask, logits, -np.inf)
        self._position[0] = position
        for name, value in params.slots().items():
            self._settings[name][0] = value
        self._sample(1, 1)
        return int(self._chosen[0])

    def advance(self, token: int) -> None:
        """Take note of a committed token."""
        self.begun = True
        self.state = self._vocabulary.grammar.follow(self.state, self._vocabulary.texts[token])


_SETTINGS = (names.TEMPERATURE, names.TOP_K, names.TOP_P, names.MIN_P, names.FILTER_ORDER, names.SEED, names.STREAM)
