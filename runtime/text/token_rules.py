"""Rules of options: single tokens, texts that are not completed, penalties, and a caller's own functions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from outrider.plans.errors import RequestError
from outrider.plans.tokenizer import Tokenizer
from outrider.runtime.text.common_length import common_length
from outrider.runtime.text.rules import LogitsRule, RuleContext

LogitsProcessor = Callable[[list[int], NDArray[np.float32]], ArrayLike | None]
"""A function of the tokens generated so far and the logits f32 `[vocab]`: it returns logits, or None if it has changed
these in place."""


class AllowedTokens(LogitsRule):
    """Excludes all tokens but some."""

    def __init__(self, allowed: Collection[int]) -> None:
        self._ids = np.array(sorted(set(allowed)), np.int64)

    def apply(self, logits: NDArray[np.float32], path: Sequence[int]) -> None:
        kept = logits[self._ids]
        logits.fill(-np.inf)
        logits[self._ids] = kept


class MinTokens(LogitsRule):
    """Excludes end tokens until `count` tokens were generated."""

    def __init__(self, count: int, ends: Collection[int]) -> None:
        self._count, self._ends = count, np.array(sorted(set(ends)), np.int64)

    @classmethod
    def from_options(cls, context: RuleContext) -> list[LogitsRule]:
        return [cls(context.values["min_tokens"], context.ends)] if context.ends else []

    def apply(self, logits: NDArray[np.float32], path: Sequence[int]) -> None:
        if len(path) < self._count:
            logits[self._ends] = -np.inf


class LogitBias(LogitsRule):
    """Adds a bias to the logits of some tokens."""

    def __init__(self, biases: Mapping[int, float]) -> None:
        self._ids = np.array(list(biases), np.int64)
        self._biases = np.array(list(biases.values()), np.float32)

    def apply(self, logits: NDArray[np.float32], path: Sequence[int]) -> None:
        logits[self._ids] += self._biases


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


class Penalties(LogitsRule):
    """Lowers logits of repeated tokens as vLLM and OpenAI do, in this order:

    - repetition: a logit of a token of the prompt or the generated text is divided by the penalty where it is above 0,
      else multiplied (arXiv 1909.05858);
    - frequency: minus the penalty times how often the token was generated;
    - presence: minus the penalty, if the token was generated.

    The cost follows the text's distinct tokens, not the vocabulary.
    """

    def __init__(self, presence: float, frequency: float, repetition: float, prompt: Sequence[int] = ()) -> None:
        self._presence, self._frequency = np.float32(presence), np.float32(frequency)
        self._repetition = np.float32(repetition)
        first = list(dict.fromkeys(prompt)) if repetition != 1 else []
        self._place = {token: place for place, token in enumerate(first)}  # in the arrays below
        self._prompted = len(first)
        self._ids = np.array(first, np.int64)
        self._counts = np.zeros(len(first), np.float32)  # how often each was generated
        self._path: list[int] = []

    @classmethod
    def from_options(cls, context: RuleContext) -> list[LogitsRule]:
        presence, frequency, repetition = (
            context.values[f"{name}_penalty"] for name in ("presence", "frequency", "repetition")
        )
        return [cls(presence, frequency, repetition)]

    def begin(self, prompt: Sequence[int]) -> Penalties:
        return Penalties(float(self._presence), float(self._frequency), float(self._repetition), prompt)

    def apply(self, logits: NDArray[np.float32], path: Sequence[int]) -> None:
        self._count(path)
        used = len(self._place)
        ids, counts = self._ids[:used], self._counts[:used]
        found = logits[ids]
        if self._repetition != 1:
            repeated = np.where(found > 0, found / self._repetition, found * self._repetition)
            seen = counts > 0
            seen[: self._prompted] = True
            found = np.where(seen, repeated, found)
        found -= self._frequency * counts
        found -= self._presence * (counts > 0)
        logits[ids] = found

    def _count(self, path: Sequence[int]) -> None:
        """Count the tokens of `path`, continuing from the path that was counted last."""
        known = common_length(self._path, path)
        for token in self._path[known:]:
            self._counts[self._place[token]] -= 1
        del self._path[known:]
        for token in path[known:]:
            place = self._place_of(token)  # first: it may make the arrays anew
            self._counts[place] += 1
            self._path.append(token)

    def _place_of(self, token: int) -> int:
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros(len(self._ids) + 64, np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(len(self._counts) + 64, np.float32)])
        self._ids[place] = token
        return place


class Processor(LogitsRule):
    """Applies a caller's function; what it raises ends the request alone (`failing_alone`)."""

    def __init__(self, process: LogitsProcessor, place: int) -> None:
        """`place` is that of the function among the request's `logits_processors`."""
        self._process, self.name = process, f"logits_processors[{place}]"

    def apply(self, logits: NDArray[np.float32], path: Sequence[int]) -> None:
        made = self._process(list(path), logits)
        given = logits if made is None else np.asarray(made, np.float32)
        if given.shape != logits.shape:
            raise RequestError(
                f"{self.name} returned logits of shape {given.shape}; return a row of {len(logits)}, or None for a "
                "row that was changed in place."
            )
        if given is not logits:
            logits[:] = given


def processors(context: RuleContext) -> list[LogitsRule]:
    """Return the rules of `logits_processors`."""
    return [Processor(each, place) for place, each in enumerate(context.values["logits_processors"])]
