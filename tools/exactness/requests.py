"""The requests: prompts, each continued under several samplings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import Any

from outrider.compiler.held_out import read_tasks
from outrider.plans.errors import RequestError
from outrider.plans.tokenizer import Tokenizer
from outrider.tools.bench.prompts import choose_prompts

_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "count": {"type": "integer"}},
    "required": ["name", "count"],
}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature 0.7": {"temperature": 0.7},
    "temperature 1, top-p": {"temperature": 1.0, "top_p": 0.95, "stream_id": 3},
    "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": 0.3},
    "a schema": {"temperature": 0.8, "structured_outputs": {"json": _SCHEMA}},
    "temperature 1.5, top-k": {"temperature": 1.5, "top_k": 40, "min_p": 0.02, "top_n_sigma": 3.0},
    "penalties, temperature 0.6": {"temperature": 0.6, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
    "stop, bad words": {"temperature": 0.9, "stop": ["\n\n", "return"], "min_tokens": 5, "bad_words": ["self", "x"]},
}
"""How tokens are chosen: options of `generate`, by what a reader calls them. Seeds are added by request."""

SERVER_SAMPLINGS: dict[str, dict[str, Any]] = {
    "temperature 0": {"temperature": 0.0},
    "temperature 0.7": {"temperature": 0.7},
    "temperature 1": {"temperature": 1.0, "top_p": 1.0},
    "temperature 0, penalty": {"temperature": 0.0, "frequency_penalty": 0.5},
    "temperature 1.3, top-p": {"temperature": 1.3, "top_p": 0.9},
}
"""Those that any server of OpenAI's API knows, as fields of a body."""

TOP_LOGPROBS = 5
_FIRST_SEED = 1000


@dataclass(frozen=True)
class Asked:
    """A request: its name for the reader, its prompt (token ids, or a text for a server), and its options.

    `sampling` is the index of its options of sampling in their table, and `place` that of its prompt.
    """

    name: str
    prompt: Any
    options: dict[str, Any]
    sampling: int = 0
    place: int = 0

    @property
    def turn(self) -> int:
        """Index, modulo their number, of the drafter that serves this request in a mixed condition.

        Each sampling meets every drafter, as the next prompt moves on by one.
        """
        return self.sampling + self.place

    def in_half(self, group: int) -> bool:
        """Whether the request is in one of two halves: alternate groups of `group` samplings, swapped from prompt to
        prompt. Other group sizes give halves that are independent of it, and of `turn`."""
        return bool((self.sampling // group + self.place) % 2)


def plan_requests(
    prompts: Sequence[str], tokenizer: Tokenizer, context: int, count: int, new: int, length: int
) -> list[Asked]:
    """Return `count` requests for our engine: every one of `SAMPLINGS` after a prompt, then after the next one.

    Prompts are the last `length` tokens of the texts, or what the context leaves room for. Raises `RequestError` where
    there is no room.
    """
    most = min(length, context - new - 1)  # a condition puts one more token after a prompt's beginning
    if most < 2:
        raise RequestError(f"--new is {new}, which leaves no room in the plan's context of {context}; lower it.")
    encoded = [tokenizer.encode(text)[-most:] for text in prompts]
    usable = [ids for ids in encoded if len(ids) >= 2]
    if not usable:
        raise RequestError("No prompt has two tokens; pass others with --prompts FILE.")
    pairs = product(range(-(-count // len(SAMPLINGS))), SAMPLINGS.items())
    return [
        Asked(
            f"prompt {place % len(usable)}, {sampling}",
            usable[place % len(usable)],
            {"max_new_tokens": new, "seed": _FIRST_SEED + index, **options},
            sampling=index % len(SAMPLINGS),
            place=place,
        )
        for index, (place, (sampling, options)) in enumerate(islice(pairs, count))
    ]


def server_requests(prompts: Sequence[str], count: int, new: int, characters: int) -> list[Asked]:
    """Return `count` requests for a server, each with a prompt of its own: the last `characters` of a text.

    So none finds another's prompt in a prefix cache, unless a condition wants that. Raises `RequestError` where there
    are fewer prompts.
    """
    texts = list(dict.fromkeys(text[-characters:] for text in prompts))
    if count > len(texts):
        raise RequestError(
            f"--requests is {count}, and there are {len(texts)} different prompts; lower it, or pass more with "
            "--prompts FILE."
        )
    samplings = list(SERVER_SAMPLINGS.items())
    return [
        Asked(
            f"prompt {index}, {samplings[index % len(samplings)][0]}",
            texts[index],
            {"max_tokens": new, "seed": _FIRST_SEED + index, **samplings[index % len(samplings)][1]},
        )
        for index in range(count)
    ]


def read_texts(plan: Path | None, path: Path | None) -> list[str]:
    """Return the prompts of `path`, or the held-out ones of the recipe of `plan`, one of every task first."""
    if plan is not None:
        return [prompt.text for prompt in choose_prompts(plan, path)]
    if path is None:
        raise RequestError("There are no prompts; pass a PLAN, whose recipe names some, or --prompts FILE.")
    return [prompt.text for prompt in read_tasks(path)]
