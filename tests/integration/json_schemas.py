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
    simple = ["integer", "string", "choice", "pattern", "format", "kind", "number"]
    kind = drawn.choice([*simple, "object", "array", "either"] if depth else simple)
    match kind:
        case "integer":
            least = drawn.randint(-500, 500)
            return {"type": "integer", "minimum": least, "maximum": least + drawn.randint(0, 5000)}
        case "string":
            least = drawn.randint(0, 3)
            return {"type": "string", "minLength": least, "maxLength": least + drawn.randint(0, 6)}
        case "choice":
            if drawn.random() < 0.3:
                return {"const": drawn.choice(_VALUES)}
            return {"enum": drawn.sample(_VALUES, drawn.randint(1, 4))}
        case "pattern":
            return {"type": "string", "pattern": drawn.choice(["^[a-f]{2,5}$", "^(im|ex)port[0-9]?$", "^é{1,3}$"])}
        case "format":
            return {"type": "string", "format": drawn.choice(["date", "ipv4", "uuid"])}
        case "kind":
            return {"type": drawn.choice(["boolean", "null", ["boolean", "null"]])}
        case "number":
            return {"enum": drawn.sample([0.5, -1.25, 3e10, 7, 1000001], drawn.randint(1, 3))}
        case "array":
            least, items = drawn.randint(0, 2), _any(drawn, depth - 1)
            return {"type": "array", "items": items, "minItems": least, "maxItems": least + drawn.randint(0, 2)}
        case "either":
            return {"anyOf": [_any(drawn, depth - 1), _any(drawn, depth - 1)]}
    return _object(drawn, depth - 1)


def _object(drawn: random.Random, depth: int) -> dict[str, Any]:
    names = drawn.sample(_NAMES, drawn.randint(1, 3))
    required = [name for name in names if drawn.random() < 0.7] or names[:1]
    properties = {name: _any(drawn, depth) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
