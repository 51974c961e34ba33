"""Bodies of requests as OpenAI's clients send them, and what they mean to the runtime.

What is accepted is served; what would change the answer and is not served is refused by name, never ignored. Source:
OpenAI's API reference, `/v1/completions` and `/v1/chat/completions`.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, model_validator

from plans.errors import RequestError
from plans.partial_kv import PARTIAL_MODES, PartialMode
from runtime.logits_options import MAX_PENALTY
from runtime.request import MAX_LOGPROBS, MAX_STOPS, Options
from runtime.server.refusals import shown

MOST_CHOICES = 16


class _FirstFault(FailFast):
    """Ends a list's check at its first fault: a body may have a hundred thousand. Hashed by Python, in a union."""

    def __hash__(self) -> int:
        return hash(self.fail_fast)


_FIRST_FAULT = _FirstFault()


class _Body(BaseModel):
    """An object whose values have the very types they are to have, and which has no other keys."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _one_unknown_key(cls, given: object) -> object:
        """Leave one key of those that are not known: one is enough to be refused. Half a character in it, which
        Pydantic does not take, becomes its escape."""
        if not isinstance(given, dict) or given.keys() <= cls.model_fields.keys():
            return given
        unknown = next(key for key in given if key not in cls.model_fields)
        known = {key: value for key, value in given.items() if key in cls.model_fields}
        return known | {unknown.encode("utf-8", "backslashreplace").decode("utf-8"): given[unknown]}


class StreamOptions(_Body):
    include_usage: bool = Field(False, description="true or false")


class _Asked(_Body):
    """Fields of both kinds of request. `top_k`, `min_p`, `repetition_penalty`, `min_tokens`, `bad_words`,
    `allowed_token_ids` and `ignore_eos` are as vLLM has them; `drafter`, how much it drafts, `partial_kv`, `priority`
    and `deadline` are ours.

    A field's description says what to pass; `refusals.py` tells it to a client that passed something else.
    """

    model: str = Field(description="the name of the model as text; GET /v1/models lists it")
    temperature: float = Field(1.0, ge=0, le=2, description="a number from 0 to 2")
    top_p: float = Field(1.0, gt=0, le=1, description="a number above 0 and at most 1")
    n: int = Field(1, ge=1, le=MOST_CHOICES, description=f"a whole number from 1 to {MOST_CHOICES}")
    stop: Any = Field(None, description=f"a text, or a list of at most {MAX_STOPS} texts")  # checked as an option
    seed: int | None = Field(None, description="a whole number")
    stream: bool = Field(False, description="true or false")
    stream_options: StreamOptions | None = Field(None, description='an object such as {"include_usage": true}')
    presence_penalty: float = Field(0.0, ge=-MAX_PENALTY, le=MAX_PENALTY, description="a number from -2 to 2")
    frequency_penalty: float = Field(0.0, ge=-MAX_PENALTY, le=MAX_PENALTY, description="a number from -2 to 2")
    logit_bias: dict[str, Any] | None = Field(None, description="an object of numbers by token id")  # likewise
    user: str | None = Field(None, description="a text")
    metadata: dict[str, Any] | None = Field(None, description="an object")
    store: bool | None = Field(None, description="true or false")

    top_k: int = Field(0, description="a whole number of at least 0")
    min_p: float = Field(0.0, ge=0, le=1, description="a number from 0 to 1")
    repetition_penalty: float = Field(1.0, gt=0, description="a number above 0")
    min_tokens: int = Field(0, ge=0, description="a whole number of at least 0")
    bad_words: list[Any] | None = Field(None, description="a list of texts")  # checked as an option
    allowed_token_ids: list[Any] | None = Field(None, description="a list of token ids")  # likewise
    drafter: str | None = Field(None, description="the name of a drafter, or none")
    draft_tokens: int | None = Field(None, description="a whole number of at least 1")
    draft_depth: int | None = Field(None, description="a whole number of at least 1")
    gamma_min: int | None = Field(None, description="a whole number of at least 1")
    gamma_max: int | None = Field(None, description="a whole number of at least 1")
    partial_kv: PartialMode | None = Field(None, description=f"one of {', '.join(PARTIAL_MODES)}")
    ignore_eos: bool = Field(False, description="true or false")
    priority: int = Field(0, description="a whole number")
    deadline: float | None = Field(None, gt=0, description="a number of seconds above 0")

    def check(self) -> None:
        """Raise RequestError for what is not served, and for options that do not go together."""

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def options(self, limit: int | None, logprobs: int | None) -> list[Options]:
        """Options of every choice: one seed, a stream of draws each. Without a seed, one is drawn."""
        seed = secrets.randbits(63) if self.seed is None else self.seed % 2**64
        options = Options(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=seed,
            stop=() if self.stop is None else self.stop,
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
            min_tokens=self.min_tokens,
            bad_words=self.bad_words or (),
            allowed_token_ids=self.allowed_token_ids,
            draft_tokens=self.draft_tokens,
            draft_depth=self.draft_depth,
            gamma_min=self.gamma_min,
            gamma_max=self.gamma_max,
        )
        if limit is not None:
            options["max_new_tokens"] = limit
        if self.drafter is not None:
            options["drafter"] = self.drafter
        if self.partial_kv is not None:
            options["partial_kv"] = self.partial_kv
        return [Options(**{**options, "stream_id": place}) for place in range(self.n)]


class CompletionAsked(_Asked):
    """`POST /v1/completions`."""

    prompt: Any = Field(description="text, token ids, or a list of either")  # which `prompts` checks
    max_tokens: int = Field(16, ge=1, description="a whole number of at least 1")
    logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description=f"a whole number from 0 to {MAX_LOGPROBS}, or null"
    )
    echo: bool = Field(False, description="true or false")
    best_of: int | None = Field(None, description="a whole number, that of n")
    suffix: str | None = Field(None, description="a text")

    def check(self) -> None:
        if self.echo:
            raise RequestError("echo is not served; the prompt is known to who sent it.")
        if self.best_of not in (None, self.n):
            raise RequestError("best_of is not served; ask for n choices.")
        if self.suffix:
            raise RequestError("suffix is not served; a completion ends where it ends.")

    @property
    def prompts(self) -> list[str | list[int]]:
        """Texts and token ids; whether these are tokens is for the runtime to say. Raises RequestError."""
        given: Any = self.prompt
        several = isinstance(given, list) and not (given and type(given[0]) is int)
        found = given if several else [given]
        if not found:
            raise RequestError("prompt is an empty list; pass text, token ids, or a list of either.")
        for place, each in enumerate(found):
            where = f"prompt[{place}]" if several else "prompt"
            if not isinstance(each, str | list):
                raise RequestError(f"{where} is {shown(each)}; pass text, token ids, or a list of either.")
            if not each:
                raise RequestError(f"{where} is empty; pass a text of at least one character, or token ids.")
        return list(found)


class Part(_Body):
    type: Literal["text"] = Field(description='"text", as other parts are not served')
    text: str = Field(description="a text")


class Message(_Body):
    """A message; its parts are texts."""

    role: Literal["system", "developer", "user", "assistant"] = Field(
        description='"system", "developer", "user" or "assistant"'
    )
    content: str | Annotated[list[Part], _FIRST_FAULT] = Field(
        description='a text, or a list of parts such as {"type": "text", "text": "..."}'
    )
    name: str | None = Field(None, description="a text")

    def plain(self) -> dict[str, object]:
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class ResponseFormat(_Body):
    type: Literal["text"] = Field(description='"text", as other forms are not served')


class ChatAsked(_Asked):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], _FIRST_FAULT] = Field(
        min_length=1, description='a list of at least one message such as {"role": "user", "content": "..."}'
    )
    max_tokens: int | None = Field(None, ge=1, description="a whole number of at least 1")
    max_completion_tokens: int | None = Field(None, ge=1, description="a whole number of at least 1")
    logprobs: bool | None = Field(None, description="true or false")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description=f"a whole number from 0 to {MAX_LOGPROBS}"
    )
    response_format: ResponseFormat | None = Field(None, description='an object such as {"type": "text"}')

    def check(self) -> None:
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError(
                f"top_logprobs is {self.top_logprobs}, and logprobs is not true; "
                "add logprobs: true, or leave top_logprobs out."
            )

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
