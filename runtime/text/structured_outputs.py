"""Structured outputs: what a request says about the form of its text. The names of the forms are vLLM's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict


class StructuredOutputs(TypedDict, total=False):
    """The form that a text keeps to; exactly one key.

    - `json`: a JSON schema, as a mapping or as JSON text. What llguidance does not know in a schema is refused, unless
      the schema has `"x-guidance": {"lenient": true}`; other keys of `x-guidance` say how white space may stand.
    - `json_object`: true; any JSON object.
    - `regex`: a regular expression, as Rust's crate regex writes them, that all of the text matches.
    - `grammar`: a context-free grammar, as Lark or llama.cpp (GBNF) writes them.
    - `choice`: a list of texts, of which the text is one.
    """

    json: Mapping[str, object] | str
    json_object: bool
    regex: str
    grammar: str
    choice: Sequence[str]


FORMS = tuple(StructuredOutputs.__annotations__)


WHITESPACE = r"(?: |\n[ \t]{0,20})"
"""Between the parts of JSON: bounded, so that a text cannot continue with white space for ever."""


def guided(schema: Mapping[str, Any], *, lenient: bool = False) -> dict[str, Any]:
    """Return a JSON schema as llguidance is to have it: it also says how white space may stand, unless it does already,
    and has no pattern that only its declared properties have.

    `lenient`: what llguidance does not know in it is passed over, unless it says otherwise.
    """
    if (text := _with_patterns(schema)) is not None:
        from outrider.runtime.text.schema_patterns import without_covered_patterns  # with llguidance

        schema = without_covered_patterns(text)
    own = schema.get("x-guidance", {})
    if not isinstance(own, Mapping):
        return dict(schema)
    added: dict[str, Any] = {} if "whitespace_flexible" in own else {"whitespace_pattern": WHITESPACE}
    if lenient:
        added["lenient"] = True
    return {**schema, "x-guidance": {**added, **own}}


def _with_patterns(schema: Mapping[str, Any]) -> str | None:
    """The schema as JSON, where it has patterns of properties; None too for what is no JSON, as is said later."""
    try:
        text = json.dumps(schema)
    except (TypeError, ValueError, RecursionError):
        return None
    return text if "patternProperties" in text else None


def lark_text(text: str) -> str:
    """Write `text` as a string literal of a Lark grammar."""
    return json.dumps(text)
