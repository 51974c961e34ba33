"""Messages of a conversation as OpenAI's clients send them, and as chat templates know them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from plans.errors import RequestError
from runtime.server.body import FIRST_FAULT, Body
from runtime.server.refusals import shown


class Part(Body):
    type: Literal["text"] = Field(description='"text", as other parts are not served')
    text: str = Field(description="a text")


class CalledFunction(Body):
    name: str = Field(description="a function's name")
    arguments: str = Field(description="JSON of an object, as text")


class ToolCall(Body):
    id: str = Field(description="a text")
    type: Literal["function"] = Field("function", description='"function"')
    function: CalledFunction = Field(description='an object such as {"name": "f", "arguments": "{}"}')


_ROLES = Literal["system", "developer", "user", "assistant", "tool"]


_UNUSED = ("annotations", "audio", "function_call")


class Message(Body):
    """A message; its parts are texts. `refusal` is what an answer had, which clients send back with it.

    So they do with keys that OpenAI's client knows and this server's answers do not have, which are null.
    """

    role: _ROLES = Field(description='"system", "developer", "user", "assistant" or "tool"')
    content: str | Annotated[list[Part], FIRST_FAULT] | None = Field(
        None, description='a text, or a list of parts such as {"type": "text", "text": "..."}'
    )
    name: str | None = Field(None, description="a text")
    refusal: str | None = Field(None, description="a text")
    tool_calls: Annotated[list[ToolCall], FIRST_FAULT] | None = Field(
        None, description='a list of calls such as {"id": "...", "type": "function", "function": {...}}'
    )
    tool_call_id: str | None = Field(None, description="the id of the call that it answers")

    @model_validator(mode="before")
    @classmethod
    def _without_unused(cls, given: object) -> object:
        if not isinstance(given, dict):
            return given
        return {key: value for key, value in given.items() if key not in _UNUSED or value is not None}

    def check(self, place: int) -> None:
        where = f"messages[{place}]"
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            found = "null" if "content" in self.model_fields_set else "missing"
            raise RequestError(f"{where}.content is {found}; pass a text, or a list of parts.")
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
            if _object_of(call.function.arguments) is None:
                found = shown(call.function.arguments)
                raise RequestError(
                    f"{where}.tool_calls[{number}].function.arguments is {found}; pass JSON of an object, as text."
                )

    def plain(self) -> dict[str, object]:
        """The message as chat templates know it: arguments of calls are objects."""
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        plain: dict[str, object] = {"role": "system" if self.role == "developer" else self.role, "content": text}
        if self.tool_calls:
            plain["tool_calls"] = [
                {
                    "id": call.id,
                    "type": call.type,
                    "function": {"name": call.function.name, "arguments": _object_of(call.function.arguments)},
                }
                for call in self.tool_calls
            ]
        if self.role == "tool":
            plain |= {"tool_call_id": self.tool_call_id} | ({} if self.name is None else {"name": self.name})
        return plain


def _object_of(text: str) -> dict[str, Any] | None:
    """The object that `text` is JSON of; None where it is of none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
