"""Grammars that would take the stack of the thread that compiles them are refused, large flat ones are not; and
schemas whose patterns their declared properties cover."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer

from outrider.plans.errors import RequestError
from outrider.runtime.text.grammar_depth import MOST_LEVELS, check_depth
from outrider.runtime.text.grammar_text import to_grammar
from outrider.runtime.text.structured_outputs import guided


def check(form: dict[str, Any]) -> None:
    where, grammar = to_grammar(form)
    check_depth(grammar, where)


def row_of_rules(count: int, name: str = "r") -> str:
    rules = "".join(f"{name}{place}: {name}{place + 1} {name}{place + 1}\n" for place in range(count))
    return f'start: {name}0\n{rules}{name}{count}: "x"\n'


def row_of_definitions(count: int) -> dict[str, Any]:
    inner = {
        f"p{place}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/p{place + 1}"}}}
        for place in range(count)
    }
    return {"$ref": "#/$defs/p0", "$defs": {**inner, f"p{count}": {"type": "integer"}}}


DEEP: dict[str, dict[str, Any]] = {
    "rules": {"grammar": row_of_rules(MOST_LEVELS)},
    "terminals": {"grammar": row_of_rules(MOST_LEVELS, "R")},
    "rules that lead back": {"grammar": row_of_rules(MOST_LEVELS).replace('"x"', '"x" start')},
    "definitions": {"json": row_of_definitions(MOST_LEVELS)},
    "definitions that lead back": {"json": row_of_definitions(MOST_LEVELS) | {"properties": {"a": {"$ref": "#"}}}},
    "definitions elsewhere": {
        "json": {"anyOf": [{"$anchor": f"p{place}", "$ref": f"#p{place + 1}"} for place in range(MOST_LEVELS)]}
    },
    "a schema in a grammar": {"grammar": f"start: %json {json.dumps(row_of_definitions(MOST_LEVELS))}\n"},
    "llama.cpp's": {
        "grammar": row_of_rules(MOST_LEVELS).replace("start", "root").replace(": ", " ::= ").replace("\n", "\n\n")
    },
}
FLAT: dict[str, dict[str, Any]] = {
    "many rules": {"grammar": "start: " + " | ".join(f"r{n}" for n in range(3000)) + "\n"
                   + "".join(f'r{n}: "({n}:" /[(]+/ // r{n + 1}: (((\n' for n in range(3000))},
    "many definitions": {
        "json": {
            "anyOf": [{"$ref": f"#/$defs/p{n}"} for n in range(1000)],
            "$defs": {f"p{n}": {"const": n} for n in range(1000)},
        }
    },
    "a tree": {"json": {"$ref": "#/$defs/node", "$defs": {"node": {"type": "object", "properties": {
        "left": {"$ref": "#/$defs/node"}, "right": {"$ref": "#/$defs/node"}, "~/": {"$ref": "#/$defs/node"}}}}}},
    "an expression": {"grammar": 'start: sum\nsum: product ("+" product)*\nproduct: atom ("*" atom)*\n'
                      'atom: NUMBER | "(" sum ")"\nNUMBER: /[0-9]+/\n'},
    "a regular expression": {"regex": "(" * 900 + "x" + ")" * 900},  # which its own library bounds
}  # fmt: skip


@pytest.mark.parametrize("name", DEEP)
def test_what_is_deep_is_refused(name: str) -> None:
    with pytest.raises(RequestError, match=r"is too deep: .* more than 600 levels. Let fewer parts"):
        check(DEEP[name])


@pytest.mark.parametrize("name", FLAT)
def test_what_is_large_is_not(name: str) -> None:
    check(FLAT[name])


def test_llguidance_takes_the_deepest_that_is_not_refused() -> None:
    """In a process of its own, which the stack would end."""
    program = """
import threading
from pathlib import Path
from llguidance import LLMatcher, LLTokenizer
from outrider.runtime.text.grammar_compiler import compile_grammar
from outrider.runtime.text.grammar_depth import MOST_LEVELS, check_depth
from tests.runtime.test_grammar_depth import row_of_definitions, row_of_rules
from outrider.runtime.text.grammar_text import to_grammar
tokenizer = LLTokenizer("byte")
threading.stack_size(4 << 20)  # half of a thread's
def run():
    for form in ({"grammar": row_of_rules(MOST_LEVELS - 10)}, {"json": row_of_definitions(MOST_LEVELS // 5)}):
        where, grammar = to_grammar(form)
        check_depth(grammar, where)
        assert not compile_grammar(tokenizer, grammar).is_error()
    print("compiled")
thread = threading.Thread(target=run)
thread.start()
thread.join()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert ended.stdout == "compiled\n", ended.stderr


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
