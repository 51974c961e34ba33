"""Retrieval questions, as `tools/lab/reference/tasks.py` has them: renamed imports strewn into held-out text.

The model learned from texts with three such lines. Here every text has as many at every length, at fixed depths, and
each is asked for at the end, as the first question.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from outrider.plans.errors import RequestError
from outrider.tools.lab.context_quality.held_out import Lines
from outrider.tools.lab.reference.tasks import ASSISTANT, CLOSE, IMPORT, QUESTION, USER

_MARGIN = 4  # tokens that a line may take beyond its own, where its neighbours are cut otherwise


@dataclass(frozen=True)
class Question:
    """What follows a context. The import asked for lies at `depth`: 0 is the context's beginning, 1 its end."""

    depth: float
    asked: list[int]
    answer: list[int]


@dataclass(frozen=True)
class Context:
    """Tokens of a user's turn up to its question, and questions, each of which fits into the length with its answer."""

    ids: list[int]
    questions: list[Question]


class Contexts:
    """Makes contexts out of held-out lines and names."""

    def __init__(self, tokenizer: Tokenizer, lines: Lines, names: Sequence[str], needles: int) -> None:
        if len(names) < 2 * needles:
            raise RequestError(f"--needles is {needles}; the held-out files have names for {len(names) // 2}.")
        self._tokenizer, self._lines, self._names = tokenizer, lines, names
        self.depths = [(place + 0.5) / needles for place in range(needles)]

    def make(self, length: int, seed: int) -> Context:
        """A context that is `length` tokens long with its longest question and answer.

        Raises `RequestError` where the questions leave no room for text, or there is too little text.
        """
        rng = random.Random(f"{length} {seed}")
        chosen = rng.sample(self._names, 2 * len(self.depths))
        pairs = list(zip(chosen[::2], chosen[1::2], strict=True))
        questions = [
            Question(depth, self._encode(f"\n{QUESTION.format(alias=alias)}{CLOSE}{ASSISTANT}"), self._answer(name))
            for depth, (name, alias) in zip(self.depths, pairs, strict=True)
        ]
        imports = [IMPORT.format(name=name, alias=alias) for name, alias in pairs]
        size = length - max(len(question.asked) + len(question.answer) for question in questions)
        taken = len(self._encode(USER)) + sum(len(self._encode(line + "\n")) + _MARGIN for line in imports)
        if size <= taken:
            needed = length - size + taken + 1
            raise RequestError(f"--lengths has {length}; {len(imports)} needles and a question take {needed} tokens.")
        lines, before = self._lines.stretch(size, rng)
        places = [bisect_right(before, depth * (size - taken)) - 1 for depth in self.depths]
        for place, line in reversed(list(zip(places, imports, strict=True))):
            lines.insert(place, line)
        return Context(self._encode(USER + "\n".join(lines))[:size], questions)

    def _answer(self, name: str) -> list[int]:
        return self._encode(name + CLOSE.rstrip("\n"))

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids
