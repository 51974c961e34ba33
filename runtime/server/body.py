"""Models that bodies of requests are made of: messages, tools, response formats, and their base."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, model_validator

from outrider.plans.chat_template import arguments_of
from outrider.plans.errors import RequestError
from outrider.runtime.server.refusals import shown
from outrider.runtime.text.structured_outputs import StructuredOutputs, guided


class FirstFault(FailFast):
    """Ends a list's check at its first fault: a body may have a hundred thousand. Hashed by Python, in a union."""

    def __hash__(self) -> int:
        return hash(self.fail_fast)


FIRST_FAULT = FirstFault()


class Body(BaseModel):
    """A JSON object with exactly the declared types, and no undeclared keys.

    A key that is null is one that was left out, as clients write those that they do not use. `UNREAD` are keys that
    clients send and that change no answer, such as what OpenAI's own client adds to the messages that it has read.
    """

    UNREAD: ClassVar[frozenset[str]] = frozenset()

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _as_read(cls, given: object) -> object:
        """Leave what is read, and of keys that are not known one: one is enough to be refused. Half a character in it,
        which Pydantic does not take, becomes its escape."""
        if not isinstance(given, dict):
            return given
        fields = cls.model_fields
        known = {
            key: value
            for key, value in given.items()
            if key in fields and (value is not None or fields[key].is_required())
        }
        unknown = (key for key, value in given.items() if not (value is None or key in fields or key in cls.UNREAD))
        if (key := next(unknown, None)) is None:
            return known
        return known | {key.encode("utf-8", "backslashreplace").decode("utf-8"): given[key]}


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


MOST_TOOLS = 128


class Function(Body):
    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$", description="1 to 64 of a-z, A-Z, 0-9, _ and -")
    description: str | None = Field(None, description="a text")
    parameters: dict[str, Any] | None = Field(None, description="a JSON schema, an object")
    strict: bool | None = Field(None, description="true or false")

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        """The schema that a call's arguments keep to; without `strict`, what is not known in it is passed over."""
        return guided({"type": "object", **(self.parameters or {})}, lenient=not self.strict)


class Tool(Body):
    type: Literal["function"] = Field(description='"function", as other tools are not served')
    function: Function = Field(description='an object such as {"name": "f", "parameters": {...}}')

    def plain(self) -> dict[str, object]:
        """The tool as chat templates know it."""
        function = {"name": self.function.name, "description": self.function.description or ""}
        return {"type": "function", "function": function | {"parameters": self.function.parameters or _NOTHING}}


_NOTHING = {"type": "object", "properties": {}}


class NamedFunction(Body):
    name: str = Field(description="a function's name")


class NamedTool(Body):
    type: Literal["function"] = Field(description='"function"')
    function: NamedFunction = Field(description='an object such as {"name": "f"}')


class ResponseFormat(Body):
    """`strict` of a JSON schema: what is not known in it is refused, else passed over."""

    type: Literal["text", "json_object", "json_schema"] = Field(description='"text", "json_object" or "json_schema"')
    json_schema: dict[str, Any] | None = Field(
        None, description='an object such as {"name": "answer", "schema": {...}, "strict": true}'
    )

    def check(self) -> None:
        if (self.type == "json_schema") != (self.json_schema is not None):
            how = "missing" if self.json_schema is None else f"given, and the type is {self.type}"
            raise RequestError(
                f"response_format.json_schema is {how}; pass it with the type json_schema, and with no other."
            )
        if self.json_schema is None:
            return
        given = self.json_schema
        for key, kinds, expected in (
            ("name", str, "a text"),
            ("description", str | None, "a text"),
            ("schema", dict | None, "a JSON schema, an object"),
            ("strict", bool | None, "true or false"),
        ):
            if not isinstance(given.get(key), kinds):
                raise RequestError(f"response_format.json_schema.{key} is {shown(given.get(key))}; pass {expected}.")
        if unknown := given.keys() - {"name", "description", "schema", "strict"}:
            raise RequestError(f"response_format.json_schema.{min(unknown)[:60]} is no known key; leave it out.")

    @property
    def schema_of_text(self) -> dict[str, Any] | None:
        """The JSON schema of the text, as llguidance reads it; None for any text."""
        if self.json_schema is None:
            return None if self.type == "text" else guided({"type": "object"})
        return guided(self.json_schema.get("schema") or {}, lenient=not self.json_schema.get("strict"))

    @property
    def form(self) -> StructuredOutputs | None:
        """The form that it asks for."""
        schema = self.schema_of_text
        return None if schema is None else {"json": schema}
