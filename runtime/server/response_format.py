"""`response_format`: the form that a chat's answer is to have."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from outrider.plans.errors import RequestError
from outrider.runtime.server.body import Body
from outrider.runtime.server.refusals import shown
from outrider.runtime.text.structured_outputs import StructuredOutputs, guided


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
