"""Tools that a request offers, and which of them it wants called."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from outrider.runtime.server.body import Body
from outrider.runtime.text.structured_outputs import guided

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
