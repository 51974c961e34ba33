"""Question files that a user brings, for `suite`: Spec-Bench's format, and that of DeepSpec's evaluation data.

Both are JSONL. Spec-Bench: `question_id`, `category`, `turns` and perhaps `reference`, which is not read. DeepSpec:
`turns` alone, and a file for each of its data sets, whose name is the category. A line of any other shape is refused.
A byte order mark, which some editors write, is not read.
Source: hemingkx/Spec-Bench, `data/spec_bench/question.jsonl`; deepseek-ai/DeepSpec, `eval_datasets/*.jsonl`.
"""

from __future__ import annotations

import json
import reprlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.plans.errors import RequestError
from outrider.plans.manifest import Geometry
from outrider.plans.text_file import read_text_file
from outrider.plans.tokenizer import Tokenizer
from outrider.runtime.text.prompt import chat_prompt, encode_prompt
from outrider.tools.bench.prompts import room_for_prompts

OVERALL = "overall"  # what tables call all categories together
_SPEC_BENCH, _DEEP_SPEC = ("question_id", "category", "turns"), ("turns",)
_KNOWN = (*_SPEC_BENCH, "reference")
_FORMATS = (
    "lines have question_id, category, turns and perhaps reference (Spec-Bench's format), or turns alone (DeepSpec's)"
)


@dataclass(frozen=True)
class Question:
    """What a user says, turn after turn; every turn follows the answer to the one before. `place` is FILE:LINE."""

    place: str
    category: str
    turns: tuple[str, ...]


def read_questions(paths: Sequence[Path], count: int | None = None) -> list[Question]:
    """The questions of all files, in their order, of each category the first `count` (None: all).

    Raises `RequestError` naming the file, the line and the key.
    """
    taken: Counter[str] = Counter()
    chosen = []
    for path in paths:
        for question in _read(path):
            taken[question.category] += 1
            if count is None or taken[question.category] <= count:
                chosen.append(question)
    return chosen


def _read(path: Path) -> list[Question]:
    try:
        lines = read_text_file(path).split("\n")  # JSON may hold what `splitlines` ends a line at
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(
            f"{path} cannot be read as UTF-8 text ({error}); correct the path of the questions."
        ) from None
    found = [_question(line, f"{path}:{number}", path.stem) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise RequestError(f"{path} holds no questions; {_FORMATS}.")
    return found


def _question(line: str, place: str, category: str) -> Question:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise RequestError(f"{place}: the line is not JSON; {_FORMATS}.") from None
    if not isinstance(row, dict):
        raise RequestError(f"{place}: the line is {reprlib.repr(row)}, which is no JSON object; {_FORMATS}.")
    if unknown := [key for key in row if key not in _KNOWN]:
        raise RequestError(f"{place}: the key {unknown[0]!r} is unknown; {_FORMATS}.")
    needed = _DEEP_SPEC if set(row) <= set(_DEEP_SPEC) else _SPEC_BENCH
    if missing := [key for key in needed if key not in row]:
        raise RequestError(f"{place}: the key {missing[0]!r} is missing; {_FORMATS}.")
    if needed is _SPEC_BENCH:
        if type(row["question_id"]) not in (int, str):
            raise _wrong(place, "question_id", row["question_id"], "a whole number or a text")
        if not isinstance(row["category"], str) or not row["category"].strip():
            raise _wrong(place, "category", row["category"], "a name")
        category = row["category"]
    if category.strip() == OVERALL:
        raise RequestError(f"{place}: the category is {OVERALL!r}, as tables call all together; give it another name.")
    turns = row["turns"]
    if not isinstance(turns, list) or not turns:
        raise _wrong(place, "turns", turns, "a list of at least one text")
    for index, turn in enumerate(turns):
        if not isinstance(turn, str) or not turn.strip():
            raise _wrong(place, f"turns[{index}]", turn, "a text that is not empty")
    return Question(place, category, tuple(turns))


def _wrong(place: str, key: str, value: Any, wanted: str) -> RequestError:
    return RequestError(f'{place}: "{key}" is {reprlib.repr(value)}; it must be {wanted}.')


_BETWEEN = "\n\n"  # an answer and the next turn, in raw text


@dataclass(frozen=True)
class Conversation:
    """How a plan reads conversations. `templated`: as messages through its chat template, else a turn's text and its
    answer's one after another, with a blank line before the next turn."""

    tokenizer: Tokenizer
    geometry: Geometry
    templated: bool

    def encode(self, turns: Sequence[str], answers: Sequence[str]) -> list[int]:
        """Token ids up to where the answer to the last of `turns` begins; `answers` are those before.

        Raises `RequestError` where they do not fit the context, or the template refuses them.
        """
        if not self.templated:
            text = "".join(f"{turn}{answer}{_BETWEEN}" for turn, answer in zip(turns, answers, strict=False))
            return encode_prompt(text + turns[-1], self.tokenizer, self.geometry, add_special_tokens=True)
        messages = []
        for index, turn in enumerate(turns):
            messages.append({"role": "user", "content": turn})
            if index < len(answers):
                messages.append({"role": "assistant", "content": answers[index]})
        return chat_prompt(messages, self.tokenizer, self.geometry)

    def check_room(self, questions: Sequence[Question], new: int) -> list[list[int]]:
        """The tokens of every question's turns, each with the answers before it left empty.

        Raises `RequestError` for a question whose turns do not fit the context beside `new` tokens for every answer.
        """
        room_for_prompts(self.geometry.context, new)
        sizes = []
        for question in questions:
            turns = question.turns
            try:
                own = [len(self.encode(turns[: 1 + index], [""] * index)) for index in range(len(turns))]
            except RequestError as error:
                raise RequestError(f"{question.place}: {error}") from None
            if own[-1] + new * len(turns) > self.geometry.context:
                raise RequestError(
                    f"{question.place}: the question has {own[-1]} tokens in {len(turns)} turns, which do not fit into "
                    f"the plan's context of {self.geometry.context} beside answers of --new {new} tokens each; lower "
                    "--new, leave the line out, or build the plan with a larger capacity.context."
                )
            sizes.append(own)
        return sizes
