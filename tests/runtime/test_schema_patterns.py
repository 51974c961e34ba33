"""Objects whose patterns their declared properties cover: every text can be ended, and is of the schema."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer

from outrider.runtime.text.structured_outputs import guided

BYTES = LLTokenizer("byte")
NULL, SMALL = {"type": "null"}, {"type": "integer", "minimum": 0, "maximum": 9}
AB = {"properties": {"a": NULL, "b": {"type": ["null", "integer"], "maximum": 9}}, "required": ["a", "b"]}
CLOSED = {"type": "object", "additionalProperties": False}


def one(pattern: str, says: dict[str, Any] = NULL, **own: Any) -> dict[str, Any]:
    return {**CLOSED, **AB, "patternProperties": {pattern: says}, **own}


SCHEMAS: list[dict[str, Any]] = [
    one("^b$"),
    one("^[ab]$", {"type": ["null", "integer"]}),
    one("^b$", SMALL, required=["a"]),
    one("^b"),
    one("b"),
    {**CLOSED, **AB, "patternProperties": {"^a$": NULL, "^b$": SMALL}},
    {**CLOSED, "properties": {'é"': NULL}, "patternProperties": {'^é"$': NULL}},
    {"type": "array", "items": one("^a$"), "minItems": 1, "maxItems": 2},
    {"allOf": [AB, {**CLOSED, "patternProperties": {"^[ab]$": {}}}]},
    {"$defs": {"ab": AB}, "allOf": [{"$ref": "#/$defs/ab"}, {**CLOSED, "patternProperties": {"^a$|^b$": {}}}]},
    {"anyOf": [one("^b$"), one("^a$", required=["a"])]},
]


def walk(schema: dict[str, Any], drawn: random.Random) -> str:
    """A text of the schema, with a comma wherever one may come."""
    grammar = LLMatcher.grammar_from_json_schema(
        json.dumps(guided({**schema, "x-guidance": {"whitespace_flexible": False}}))
    )
    matcher, text = LLMatcher(BYTES, grammar, log_level=0), bytearray()
    while not (matcher.is_accepting() or len(text) > 400):
        mask = matcher.compute_bitmask()
        assert not matcher.is_error(), bytes(text)
        allowed = [byte for byte in range(256) if mask[byte // 8] >> byte % 8 & 1]
        inside = text.count(b'"') % 2
        likely = '"b' if inside else ',"' if len(text) < 60 else '}"'
        wanted = [ord(each) for each in likely if ord(each) in allowed][:1]
        wanted = wanted or [byte for byte in allowed if chr(byte).isascii() and chr(byte).isalnum()] or allowed
        byte = drawn.choice(wanted)
        assert matcher.try_consume_tokens([byte]) == 1
        text.append(byte)
    return text.decode()


@pytest.mark.parametrize("schema", SCHEMAS, ids=json.dumps)
def test_every_text_can_be_ended(schema: dict[str, Any]) -> None:
    for seed in range(6):
        Draft202012Validator(schema).validate(json.loads(walk(schema, random.Random(seed))))


def test_what_has_no_such_pattern_stays() -> None:
    for schema in (one("^c"), one("("), {"enum": [one("^b$")]}, {"properties": {"patternProperties": NULL}}):
        assert guided(schema).items() >= schema.items()
    again = {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}, {"properties": {"\ud800": NULL}}]}
    assert guided({"$defs": {"a": again}, "$ref": "#/$defs/a", "patternProperties": {"^c": NULL}})["$ref"]
    wide = {str(each): {"$ref": "#/$defs/a", "patternProperties": {"^x": NULL}} for each in range(2000)}
    guided(
        {"$defs": {"a": {"properties": dict.fromkeys(wide, NULL)}}, "properties": wide}
    )  # which would take minutes without a budget of the whole
    many = {"properties": {str(each): NULL for each in range(5000)}}
    assert guided({**many, "patternProperties": {f"^{each}$": NULL for each in range(100)}})["patternProperties"]
    deep: dict[str, Any] = {"patternProperties": {}}
    for _ in range(2000):
        deep = {"items": deep}
    assert guided(deep)["items"] is deep["items"]
