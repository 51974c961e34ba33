"""The base class of all mappings of a recipe, and the kinds of text in them."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]*$", max_length=100)]
"""A name that is also a file name: small letters, digits, and `-_.` after the first character."""


def _printable(written: str) -> str:
    if not written.isprintable():
        raise PydanticCustomError("path", "holds a character that cannot be printed; correct the path")
    return written


WrittenPath = Annotated[str, Field(min_length=1, json_schema_extra={"format": "path"}), AfterValidator(_printable)]
"""A path as the recipe writes it: absolute, under `~`, or relative to the recipe."""


class Section(BaseModel):
    """A mapping of the recipe: no unknown keys, no conversions between types, no changes afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=True)
