"""Messages of a conversation as OpenAI's clients send them, and as chat templates know them."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from outrider.plans.chat_template import arguments_of
from outrider.plans.errors import RequestError
from outrider.runtime.server.body import FIRST_FAULT, Body
from outrider.runtime.server.refusals import shown


class Part(Body):
    UNREAD: ClassVar[frozenset[str]] = frozenset({"cache_control"})

    type: Literal["text"] = Field(description='"text", as other parts are not served')
    text: str = Field(description="a text")


class CalledFunction(Body):
    UNREAD: ClassVar[frozenset[str]] = frozenset({"parsed_arguments"})

    name: str = Field(description="a function's name")
    arguments: str = Field(description="JSON of an object, as text")


class ToolCall(Body):
    UNREAD: ClassVar[frozenset[str]] = frozenset({"index"})

    id: str = Field(description="a text")
    type: Literal["function"] = Field("function", description='"function"')
    function: CalledFunction = Field(description='an object such as {"name": "f", "arguments": "{}"}')


_ROLES = Literal["system", "developer", "user", "assistant", "tool"]


class Message(Body):
    """A message; its parts are texts. `refusal` is what an answer had, which clients send back with it."""

    UNREAD: ClassVar[frozenset[str]] = frozenset({"annotations", "parsed"})

    role: _ROLES = Field(description='"system", "developer", "user", "assistant" or "tool"')
    content: str | Annotated[list[Part], FIRST_FAULT] | None = Field(
        None, description='a text, or a list of parts such as {"type": "text", "text": "..."}'
    )
    name: str | None = Field(None, description="a text")
    refusal: str | None = Field(None, description="a text")
    reasoning_content: str | None = Field(None, description="a text")
    reasoning: str | None = Field(None, description="a text")
    tool_calls: Annotated[list[ToolCall], FIRST_FAULT] | None = Field(
        None, description='a list of calls such as {"id": "...", "type": "function", "function": {...}}'
    )
    tool_call_id: str | None = Field(None, description="the id of the call that it answers")

    def check(self, place: int) -> None:
        where = f"messages[{place}]"
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise RequestError(f"{where}.content is missing; pass a text, or a list of parts.")
        if self.tool_calls and self.role != "assistant":
            raise RequestError(
                f"{where}.tool_calls are given, and its role is {self.role}; only assistants call tools."
            )
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise RequestError(
                f"{where}.tool_call_id is missing; pass the id of the call that it answers."
                if self.role == "tool"
                else f"{where}.tool_call_id is given, and its role is {self.role}; leave it out."
            )
        for number, call in enumerate(self.tool_calls or ()):
            if arguments_of(call.function.arguments) is None:
                found = shown(call.function.arguments)
                raise RequestError(
                    f"{where}.tool_calls[{number}].function.arguments is {found}; pass JSON of an object, as text."
                )

    def plain(self) -> dict[str, object]:
        """The message as chat templates know it, and `Runtime.generate` takes it. A tool's result is a text there."""
        plain = {"content": ""} | self.model_dump(exclude_none=True, exclude={"refusal"})
        if self.role == "tool" and isinstance(self.content, list):
            plain["content"] = "".join(part.text for part in self.content)
        return plain
