"""Bodies of requests as OpenAI's clients send them, and what they mean to the runtime.

What is accepted is served; what would change the answer and is not served is refused by name, never ignored. Source:
OpenAI's API reference, `/v1/completions` and `/v1/chat/completions`.
"""

from __future__ import annotations

import secrets
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from plans.errors import RequestError
from runtime.request import MAX_LOGPROBS, Options

MOST_PROMPTS = 64
MOST_CHOICES = 16
_NO_PENALTY = "penalties are not served; leave it at 0"


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False


class _Asked(BaseModel):
    """What both kinds of request have. `top_k`, `drafter`, `ignore_eos`, `priority` and `deadline` are ours."""

    model_config = ConfigDict(extra="forbid")

    model: str
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None

    top_k: int = 0
    drafter: str | None = None
    ignore_eos: bool = False
    priority: int = 0
    deadline: float | None = Field(None, gt=0)

    @field_validator("presence_penalty", "frequency_penalty")
    @classmethod
    def _no_penalty(cls, value: float) -> float:
        if value:
            raise ValueError(_NO_PENALTY)
        return value

    @field_validator("logit_bias")
    @classmethod
    def _no_bias(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        if value:
            raise ValueError("biases are not served; leave it out")
        return value

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def options(self, limit: int | None, logprobs: int | None) -> list[Options]:
        """Options of every choice: one seed, a stream of draws each. Without a seed, one is drawn."""
        seed = secrets.randbits(63) if self.seed is None else self.seed % 2**64
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        options = Options(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=seed,
            stop=stop,
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
        )
        if limit is not None:
            options["max_new_tokens"] = limit
        if self.drafter is not None:
            options["drafter"] = self.drafter
        return [Options(**{**options, "stream_id": place}) for place in range(self.n)]


class CompletionAsked(_Asked):
    """`POST /v1/completions`."""

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool = False
    best_of: int | None = None
    suffix: str | None = None

    def check(self) -> None:
        """Raise RequestError for what is not served."""
        if self.echo:
            raise RequestError("echo is not served; the prompt is known to who sent it.")
        if self.best_of not in (None, self.n):
            raise RequestError("best_of is not served; ask for n choices.")
        if self.suffix:
            raise RequestError("suffix is not served; a completion ends where it ends.")

    @property
    def prompts(self) -> list[str | list[int]]:
        given: Any = self.prompt
        found = [given] if isinstance(given, str) or not given or isinstance(given[0], int) else list(given)
        if not 1 <= len(found) <= MOST_PROMPTS or not all(found):
            raise RequestError(f"prompt holds {len(found)} prompts; pass 1 to {MOST_PROMPTS}, none of them empty.")
        return found


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A message; its parts are texts."""

    model_config = ConfigDict(extra="forbid")
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]
    name: str | None = None

    def plain(self) -> dict[str, object]:
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class ResponseFormat(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["text"]


class ChatAsked(_Asked):
    """`POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    response_format: ResponseFormat | None = None

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
