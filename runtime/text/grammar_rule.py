"""The rule that a text keeps to a grammar: at each token, those of the vocabulary that it may continue with."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from time import thread_time

import numpy as np
from numpy.typing import NDArray

from outrider.plans.errors import RequestError
from outrider.runtime.text.common_length import common_length
from outrider.runtime.text.grammar_compiler import Vocabulary, compile_grammar, reason_of
from outrider.runtime.text.rules import LogitsRule, failing_alone

_AT_ONCE = 32  # tokens that are read before the time is looked at
_FREE = 0.005  # seconds of a processor that a mask, or taking tokens in, may take
_SPARE = 3.0  # seconds beyond those that a text may take, its drafts' too: all other requests wait meanwhile


class GrammarRule(LogitsRule):
    """The rule that a text keeps to a grammar, and ends with an end token where the grammar has been satisfied."""

    def __init__(self, vocabulary: Vocabulary, grammar: str, ends: Collection[int]) -> None:
        """`grammar` is one that `check_grammar` has found right."""
        self._vocabulary, self._text = vocabulary, grammar
        self._ends = np.array(sorted(ends), np.int64)
        self._path: list[int] = []  # what the matcher has read
        self._grammar = compile_grammar(vocabulary.tokenizer, grammar)  # takes nothing in
        self._matcher = self._grammar.deep_copy()
        self._mask = np.zeros((vocabulary.size + 1 + 31) // 32, np.int32)
        self._address = self._mask.ctypes.data
        self._begun = False
        self._spent = 0.0  # beyond what is free

    def begin(self, prompt: Sequence[int]) -> GrammarRule:
        """Return the rule itself for the first text, so that only further ones are compiled for here."""
        if self._begun:
            return GrammarRule(self._vocabulary, self._text, self._ends.tolist()).begin(prompt)
        self._begun = True
        return self

    def apply(self, logits: NDArray[np.float32], path: Sequence[int]) -> None:
        """Exclude tokens that the grammar does not allow after `path`. Raises RequestError where it allows none."""
        self._follow(path)
        with self._spending():
            np.copyto(logits, -np.inf, where=self._excluded())

    def forced(self, path: Sequence[int], limit: int) -> Sequence[int]:
        try:
            with failing_alone(self.name):
                self._follow(path)
                with self._spending():
                    return self._matcher.compute_ff_tokens()[:limit]
        except RequestError:
            return ()

    @contextmanager
    def _spending(self) -> Iterator[None]:
        """Count the time that it takes. Raises RequestError where the text has taken more than it may."""
        began = thread_time()
        yield
        self._spent += max(0.0, thread_time() - began - _FREE)
        if self._spent > _SPARE:
            raise RequestError(
                f"The grammar takes too long to follow after {len(self._path)} tokens. Make it simpler: let no two of "
                "its rules read the same text, as with `s: s s`."
            )

    def _follow(self, path: Sequence[int]) -> None:
        """Bring the matcher after `path`. Raises RequestError where the grammar does not allow it."""
        known = len(self._path)
        if path[:known] != self._path:
            common = common_length(self._path, path)
            if not self._matcher.rollback(known - common):  # as with grammars that count tokens
                self._matcher, common = self._grammar.deep_copy(), 0
            del self._path[common:]
            known = common
        for start in range(known, len(path), _AT_ONCE):
            rest = list(path[start : start + _AT_ONCE])
            with self._spending():
                taken = self._matcher.try_consume_tokens(rest)
                self._path += rest[:taken]
            self._check()
            if taken < len(rest):
                raise RequestError("The grammar does not allow the text so far; no token may follow it.")

    def _check(self) -> None:
        """Raise RequestError where llguidance has given up: at a limit, or where no token has the text."""
        if self._matcher.is_error():
            if self._matcher.get_error().startswith("NoExtension"):
                raise RequestError(
                    "The grammar allows no token at this place of the text, and the text may not end here either. "
                    "Correct the grammar: every text that it allows must lead to an end."
                )
            raise RequestError(f"The grammar {reason_of(self._matcher.get_error())}. Make it simpler.")

    def _excluded(self) -> NDArray[np.bool_]:
        """Return bool `[vocab]`: the tokens that may not come next. Raises RequestError where none may."""
        size = self._vocabulary.size
        self._matcher.unsafe_compute_mask_ptr(self._address, self._mask.nbytes)
        self._check()
        excluded = ~np.unpackbits(self._mask.view(np.uint8), count=size, bitorder="little").view(np.bool_)
        excluded[self._ends] = not self._matcher.is_accepting()
        excluded[self._vocabulary.absent] = True
        return excluded
