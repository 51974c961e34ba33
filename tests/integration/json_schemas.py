"""Random JSON schemas all of whose texts are short."""

from __future__ import annotations

import random
from typing import Any

_NAMES = ["a", "name", "is_ok", "x y", "größe", "import", 'quo"te']
_VALUES: list[Any] = ["return", "", "日本", True, None, 0, -17, 2.5, [1, "b"], {"k": False}]


def draw_schema(seed: int) -> dict[str, Any]:
    """An object with at least one property, whose other properties are optional."""
    drawn = random.Random(seed)
    schema = _object(drawn, 2)
    if drawn.random() < 0.3:
        schema["$defs"] = {"part": _any(drawn, 1)}
        schema["properties"]["of"] = {"$ref": "#/$defs/part"}
    if drawn.random() < 0.5:
        schema["x-guidance"] = {"whitespace_flexible": False}
    return schema


def _any(drawn: random.Random, depth: int) -> dict[str, Any]:
    simple = [_integer, _string, _choice, _pattern, _format, _kind, _number]
    made = drawn.choice([*simple, _object, _array, _either] if depth else simple)
    return made(drawn, depth - 1)


def _object(drawn: random.Random, depth: int) -> dict[str, Any]:
    names = drawn.sample(_NAMES, drawn.randint(1, 3))
    required = [name for name in names if drawn.random() < 0.7] or names[:1]
    properties = {name: _any(drawn, depth) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _array(drawn: random.Random, depth: int) -> dict[str, Any]:
    least = drawn.randint(0, 2)
    return {"type": "array", "items": _any(drawn, depth), "minItems": least, "maxItems": least + drawn.randint(0, 2)}


def _either(drawn: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_any(drawn, depth), _any(drawn, depth)]}


def _integer(drawn: random.Random, depth: int) -> dict[str, Any]:
    least = drawn.randint(-500, 500)
    return {"type": "integer", "minimum": least, "maximum": least + drawn.randint(0, 5000)}


def _number(drawn: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": drawn.sample([0.5, -1.25, 3e10, 7, 1000001], drawn.randint(1, 3))}


def _string(drawn: random.Random, depth: int) -> dict[str, Any]:
    least = drawn.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + drawn.randint(0, 6)}


def _choice(drawn: random.Random, depth: int) -> dict[str, Any]:
    if drawn.random() < 0.3:
        return {"const": drawn.choice(_VALUES)}
    return {"enum": drawn.sample(_VALUES, drawn.randint(1, 4))}


def _pattern(drawn: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "string", "pattern": drawn.choice(["^[a-f]{2,5}$", "^(im|ex)port[0-9]?$", "^é{1,3}$"])}


def _format(drawn: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "string", "format": drawn.choice(["date", "ipv4", "uuid"])}


def _kind(drawn: random.Random, depth: int) -> dict[str, Any]:
    return {"type": drawn.choice(["boolean", "null", ["boolean", "null"]])}
