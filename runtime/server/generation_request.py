"""Bodies of requests as OpenAI's clients send them, and what they mean to the runtime.

What is accepted is served; what would change the answer and is not served is refused by name, never ignored. Source:
OpenAI's API reference, `/v1/completions` and `/v1/chat/completions`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

from pydantic import Field, create_model

from outrider.plans.errors import RequestError
from outrider.plans.partial_kv import PartialMode
from outrider.runtime.options.options import MAX_LOGPROBS, MAX_SALT, Doors, Option, Options, offered
from outrider.runtime.sampling import new_seed
from outrider.runtime.server.body import FIRST_FAULT, MOST_TOOLS, Body, Message, NamedTool, ResponseFormat, Tool
from outrider.runtime.server.refusals import shown
from outrider.runtime.server.tool_calling import ToolCalling
from outrider.runtime.server.tool_formats import ToolFormat
from outrider.runtime.text.structured_outputs import StructuredOutputs

MOST_CHOICES = 16


class StreamOptions(Body):
    UNREAD: ClassVar[frozenset[str]] = frozenset({"include_obfuscation"})  # padding against who reads lengths

    include_usage: bool = Field(False, description="true or false")


def _field(option: Option) -> tuple[Any, Any]:
    """The field of an option of ours: None where it is left out."""
    return option.kind.annotation | None, Field(None, description=option.kind.what)


if TYPE_CHECKING:

    class _Options(Body):
        """Options of `options.Options` that the server has; here those that it reads by name."""

        drafter: str | None
        partial_kv: PartialMode | None
        structured_outputs: dict[str, Any] | None

else:
    _Options = create_model(
        "_Options", __base__=Body, **{name: _field(option) for name, option in offered(Doors.SERVER).items()}
    )


class _GenerationRequest(_Options):
    """Fields of both kinds of request: those of OpenAI here; the options that the server has, which are named as vLLM
    names them where it has them; and `priority` and `deadline`, which are ours.

    A field's description says what to pass; `refusals.py` puts it into the error for other values.
    """

    UNREAD: ClassVar[frozenset[str]] = frozenset(
        {"prediction", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier"}
    )

    model: str | None = Field(None, description="the name of the model as text; GET /v1/models lists it")
    temperature: float = Field(1.0, ge=0, le=2, description="a number from 0 to 2")
    top_p: float = Field(1.0, gt=0, le=1, description="a number above 0 and at most 1")
    n: int = Field(1, ge=1, le=MOST_CHOICES, description=f"a whole number from 1 to {MOST_CHOICES}")
    seed: int | None = Field(None, description="a whole number")
    stream: bool = Field(False, description="true or false")
    stream_options: StreamOptions | None = Field(None, description='an object such as {"include_usage": true}')
    user: str | None = Field(None, description="a text")
    metadata: dict[str, Any] | None = Field(None, description="an object")
    store: bool | None = Field(None, description="true or false")
    cache_salt: str = Field("", max_length=MAX_SALT // 2, description=f"a text of at most {MAX_SALT // 2} characters")
    priority: int = Field(0, description="a whole number")
    deadline: float | None = Field(None, gt=0, description="a number of seconds above 0")

    def check(self) -> None:
        """Raise RequestError for what is not served, and for options that do not go together."""

    @property
    def form(self) -> StructuredOutputs | None:
        """The form that the text keeps to."""
        return cast("StructuredOutputs | None", self.structured_outputs)

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def options(self, limit: int | None, logprobs: int | None, owner: str = "") -> list[Options]:
        """Options of every choice: one seed, a stream of draws each. Without a seed, one is drawn. What is known of
        earlier requests is that of the same `owner` and `cache_salt`."""
        options = {name: getattr(self, name) for name in offered(Doors.SERVER)} | {
            "seed": new_seed() if self.seed is None else self.seed % 2**64,
            "cache_salt": f"{owner}/{self.cache_salt}" if owner else self.cache_salt,
            "structured_outputs": self.form,
            "max_new_tokens": limit,
            "logprobs": logprobs,
        }
        given = {name: value for name, value in options.items() if value is not None}
        return [cast(Options, given | {"stream_id": place}) for place in range(self.n)]


class CompletionRequest(_GenerationRequest):
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


class ChatRequest(_GenerationRequest):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], FIRST_FAULT] = Field(
        min_length=1, description='a list of at least one message such as {"role": "user", "content": "..."}'
    )
    max_tokens: int | None = Field(None, ge=1, description="a whole number of at least 1")
    max_completion_tokens: int | None = Field(None, ge=1, description="a whole number of at least 1")
    logprobs: bool | None = Field(None, description="true or false")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description=f"a whole number from 0 to {MAX_LOGPROBS}"
    )
    response_format: ResponseFormat | None = Field(None, description='an object such as {"type": "json_object"}')
    tools: Annotated[list[Tool], FIRST_FAULT] | None = Field(
        None, max_length=MOST_TOOLS, description=f"a list of at most {MOST_TOOLS} functions"
    )
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = Field(
        None, description='"none", "auto", "required", or an object such as {"type": "function", "function": {...}}'
    )
    parallel_tool_calls: bool | None = Field(None, description="true or false")
    modalities: list[Literal["text"]] | None = Field(None, description='["text"]')
    reasoning_effort: str | None = Field(None, description="a text")  # for templates that read it
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description='an object such as {"enable_thinking": false}'
    )  # which the prompt's making checks

    def check(self) -> None:
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError(
                f"top_logprobs is {self.top_logprobs}, and logprobs is not true; "
                "add logprobs: true, or leave top_logprobs out."
            )
        for place, message in enumerate(self.messages):
            message.check(place)
        if "tools" in (self.chat_template_kwargs or {}):
            raise RequestError("chat_template_kwargs has tools; pass tools by themselves, so that they can be called.")
        if self.response_format is not None:
            self.response_format.check()
        self._check_tools()
        forms = {
            "structured_outputs": self.structured_outputs is not None,
            "response_format": self.response_format is not None and self.response_format.type != "text",
            "tools": self.calls_tools,
        }
        given = [name for name, there in forms.items() if there]
        if len(given) > 1 and given != ["response_format", "tools"]:  # with which a text that calls none has that form
            raise RequestError(f"{given[0]} and {given[1]} both say what form the answer has; leave one of them out.")

    def _check_tools(self) -> None:
        names = [tool.function.name for tool in self.tools or ()]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise RequestError(f"tools has two functions {twice!r}; give each a name of its own.")
        for place, tool in enumerate(self.tools or ()):
            kind = (tool.function.parameters or {}).get("type", "object")
            if kind != "object":
                raise RequestError(
                    f'tools[{place}].function.parameters.type is {shown(kind)}; pass "object", as arguments have names.'
                )
        if self.tool_choice in (None, "none"):
            return
        if not names:
            raise RequestError("tool_choice is given, and there are no tools; pass tools, or leave it out.")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise RequestError(
                f"tool_choice names the function {self.tool_choice.function.name!r}; tools has {', '.join(names)}."
            )

    @property
    def calls_tools(self) -> bool:
        """Whether the answer may call a tool."""
        return bool(self.tools) and self.tool_choice != "none"

    def calling(self, form: ToolFormat) -> ToolCalling:
        """What the answer may call, by a model that writes calls in this format."""
        functions = {tool.function.name: tool.function.schema_of_arguments for tool in self.tools or ()}
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            return ToolCalling(form, {name: functions[name]}, must=True, several=False)
        several, must = self.parallel_tool_calls is not False, self.tool_choice == "required"
        asked = None if self.response_format is None else self.response_format.schema_of_text
        if asked is not None and not must and not form.trigger:
            raise RequestError(
                "response_format and tools are both given, and in the format of the plan's chat template nothing "
                'distinguishes a call from an object; leave one of them out, or pass tool_choice "required".'
            )
        return ToolCalling(form, functions, must=must, several=several, text=None if must else asked)

    @property
    def form(self) -> StructuredOutputs | None:
        return super().form if self.response_format is None else self.response_format.form or super().form

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
