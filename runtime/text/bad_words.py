"""The rule that some texts are not completed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.plans.tokenizer import Tokenizer
from outrider.runtime.text.rules import LogitsRule, RuleContext


class BadWords(LogitsRule):
    """Excludes the last token of each of some token sequences where the others have just been generated."""

    def __init__(self, sequences: Iterable[Sequence[int]]) -> None:
        ending: dict[tuple[int, ...], list[int]] = {}
        for tokens in sequences:
            ending.setdefault(tuple(tokens[:-1]), []).append(tokens[-1])
        self._last = {before: np.array(last, np.int64) for before, last in ending.items()}
        self._lengths = sorted({len(before) for before in self._last})

    @classmethod
    def from_options(cls, context: RuleContext) -> list[LogitsRule]:
        return [cls(token_sequences(context.values["bad_words"], context.grammars.tokenizer))]

    def apply(self, logits: NDArray[np.float32], path: Sequence[int]) -> None:
        for length in self._lengths:
            if length > len(path):
                break
            last = self._last.get(tuple(path[len(path) - length :]))
            if last is not None:
                logits[last] = -np.inf


def token_sequences(words: Iterable[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Encode each text as vLLM does: as the text begins, and with a space before it where that gives as many tokens, of
    which the first is another."""
    found = []
    for word in words:
        plain, spaced = (tokenizer.encode(prefix + word.lstrip(), add_special_tokens=False) for prefix in ("", " "))
        found.append(plain)
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            found.append(spaced)
    return found
