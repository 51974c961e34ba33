"""Requests of every kind, and the answer that each must have: that of plain decoding, computed once before.

The oracle generates one sequence after another, without drafts, scheduler, prefix cache and server.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from outrider import Runtime
from outrider.plans.errors import OutriderError, RequestError
from outrider.plans.manifest import rejects
from outrider.runtime.handle import Handle
from outrider.runtime.options.options import Options
from outrider.runtime.prefix_cache.cache import PrefixCache
from outrider.runtime.server.answers import Answer as Written
from outrider.runtime.server.generation_request import ChatRequest, CompletionRequest
from outrider.runtime.server.submitting import Submitter
from outrider.tools.bench.prompts import choose_prompts
from outrider.tools.lab.faults.client import Answer
from outrider.tools.lab.faults.server import MODEL

_TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": ["x", "yy"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
            "required": ["a", "n"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
_SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
_KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.7, "ignore_eos": True},
    {"temperature": 1.0, "top_p": 0.9, "logprobs": 2},
    {"temperature": 0.9, "n": 3, "ignore_eos": True},
    {"temperature": 0.6, "repetition_penalty": 1.3, "presence_penalty": 0.5, "ignore_eos": True},
    {"temperature": 1.0, "structured_outputs": {"regex": "[a-z ]{4,30}=[0-9]{1,6};"}},
    {"temperature": 0.0, "logprobs": 0, "ignore_eos": True},
    {"temperature": 0.8, "stop": ["e", "\n"], "ignore_eos": True},
)
"""Of completions."""
_CHATS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "ignore_eos": True, "n": 2},
    {"temperature": 1.0, "response_format": {"type": "json_schema", "json_schema": {"name": "o", "schema": _SCHEMA}}},
)
_CALLS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0, "tools": [_TOOL], "tool_choice": "required"},
    {"temperature": 0.8, "tools": [_TOOL]},
)
"""Where the plan's chat template knows tools."""


@dataclass(frozen=True)
class Question:
    """A body, and the answer that plain decoding gives."""

    body: dict[str, Any]
    expected: Answer


class Oracle:
    """Plain decoding of one plan."""

    def __init__(self, plan: Path, threads: int = 0) -> None:
        self.runtime = Runtime.load(plan, threads=threads)
        self._submitter = Submitter(_Alone(self.runtime), MODEL, max_choices=64)

    def answer(self, body: dict[str, Any]) -> Answer:
        """What a server must answer. Raises OutriderError for a body that none can."""
        chat = "messages" in body
        kind: TypeAdapter[ChatRequest | CompletionRequest] = TypeAdapter(ChatRequest if chat else CompletionRequest)
        submitted = self._submitter.submit(kind.validate_python({**body, "drafter": "none"}))
        written = Written(MODEL, self.runtime, chat=chat)
        written.describe(submitted, None)
        answer = Answer(200, done=True)
        found = [handle.result() for handle in submitted.handles]
        answer.take(written.whole(found, submitted.prompts, submitted.logprobs))
        return answer


class _Alone:
    """Serves a request by generating it at once."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime, self.manifest, self.tokenizer = runtime, runtime.manifest, runtime.tokenizer
        self.grammars, self.scheduler_stats = runtime.grammars, runtime.scheduler_stats
        self.prefix_cache: PrefixCache | None = None

    def submit_all(self, asked: Sequence[tuple[str | Sequence[int], Options]], **_: object) -> list[Handle]:
        handles = []
        for prompt, options in asked:
            handle = Handle(lambda: None)
            handle.end(self._runtime.generate(prompt, **options))
            handles.append(handle)
        return handles

    def save_prefix_cache(self, path: object) -> int:
        raise RequestError(f"There is no prefix cache to save to {path}.")

    def close(self, *, drain: bool = True, timeout: float | None = None) -> bool:
        return self._runtime.close(drain=drain, timeout=timeout)


def make_questions(
    plan: Path, count: int, seed: int, new: int, prompts: Path | None = None, threads: int = 0
) -> list[Question]:
    """`count` questions of every kind that the plan serves, with at most `new` tokens a choice, and their answers.

    Prompts begin like held-out ones, so that caches find them and n-grams draft.
    """
    oracle, draw = Oracle(plan, threads), random.Random(seed)
    manifest, tokenizer = oracle.runtime.manifest, oracle.runtime.tokenizer
    texts = [tokenizer.encode(prompt.text) for prompt in choose_prompts(plan, prompts)[:16]]
    room = max(1, manifest.target.context - new)
    drafters = [None, "none", *(drafter.name for drafter in manifest.drafters if not rejects([drafter]))]
    kinds = [*_KINDS, *(_CHATS if _chats(oracle.runtime) else ()), *(_CALLS if _knows_tools(oracle.runtime) else ())]
    found = []
    for place in range(count):
        kind, text = kinds[place % len(kinds)], draw.choice(texts)
        body: dict[str, Any] = {"model": MODEL, "seed": draw.randrange(2**31), "max_tokens": draw.randint(2, new)}
        body |= {"temperature": 0.0, **kind}
        if drafter := draw.choice(drafters):
            body["drafter"] = drafter
        ids = text[: draw.randint(1, min(len(text), room))]
        if kind in _CHATS or kind in _CALLS:
            said = tokenizer.decode(ids[: room // 4])
            body["messages"] = [{"role": "user", "content": said}]
            body["max_tokens"] = new
        else:
            body["prompt"] = [ids, ids[: len(ids) // 2 + 1]] if place % 11 == 10 else ids
        found.append(Question(body, oracle.answer(body)))
    return found


def _chats(runtime: Runtime) -> bool:
    try:
        runtime.tokenizer.check_chat()
    except OutriderError:
        return False
    return True


def _knows_tools(runtime: Runtime) -> bool:
    return _chats(runtime) and "tools" in runtime.tokenizer.check_chat(tools=True).names
