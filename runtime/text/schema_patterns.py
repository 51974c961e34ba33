"""Patterns of a JSON schema's properties that no further property can have.

llguidance allows a comma after the last declared property while the schema has patterns, even if every name that a
pattern allows is declared: after that comma no text is valid. Such a pattern is removed here, and its schema is added
to the declared properties that match it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher, LLTokenizer

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_MOST = 10_000  # names that are looked at in a whole schema, and tried with patterns: some 25 us each
_BYTES = LLTokenizer("byte")

_Schema = dict[str, Any]


@lru_cache(maxsize=64)
def without_covered_patterns(schema: str) -> Mapping[str, Any]:
    """Return the schema, JSON of an object, without patterns that its declared properties cover.

    A schema that is nested too deeply, and what is left of one that takes too long, stay as they are.
    """
    root: _Schema = json.loads(schema)
    try:
        return dict(_Rewriting(root).rewritten(root, ()))
    except RecursionError:  # which is refused by name later
        return root


class _Rewriting:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root, self._left = root, _MOST

    def rewritten(self, schema: Any, around: tuple[Any, ...]) -> Any:
        """`around` are schemas of the same object that it is a part of."""
        if not isinstance(schema, Mapping):
            return schema
        found: _Schema = dict(schema)
        for key in _MAPS:
            if isinstance(given := found.get(key), Mapping):
                found[key] = {name: self.rewritten(each, ()) for name, each in given.items()}
        for key in _LISTS:
            if isinstance(given := found.get(key), list):
                whole = () if key == "prefixItems" else (*around, schema)
                found[key] = [self.rewritten(each, whole) for each in given]
        for key in _SINGLE:
            if isinstance(given := found.get(key), list):
                found[key] = [self.rewritten(each, ()) for each in given]
            elif key in found:
                found[key] = self.rewritten(given, ())
        patterns = found.get("patternProperties")
        if isinstance(patterns, Mapping) and isinstance(found.get("properties", {}), Mapping):
            seen: set[int] = set()
            names = dict.fromkeys(name for each in (*around, schema) for name in self._names(each, seen))
            self._leave_out(found, patterns, list(names))
        return found

    def _leave_out(self, found: _Schema, patterns: Mapping[str, Any], names: list[str]) -> None:
        for pattern, says in patterns.items():
            self._left -= len(names)
            covered = _covered(pattern, names) if self._left > 0 else ()
            if not covered:
                continue
            left = {key: each for key, each in found["patternProperties"].items() if key != pattern}
            own = found["properties"] = dict(found.get("properties", {}))
            for name in covered:
                own[name] = {"allOf": [own[name], says]} if name in own else says
            found["patternProperties"] = left
        if not found["patternProperties"]:
            del found["patternProperties"]

    def _names(self, schema: Any, seen: set[int]) -> Iterator[str]:
        """Names of properties that a schema declares, those of what it refers to and of all its parts included, each
        looked at once."""
        if not isinstance(schema, Mapping) or id(schema) in seen or self._left <= 0:
            return
        seen.add(id(schema))
        self._left -= 1
        if isinstance(given := schema.get("properties"), Mapping):
            self._left -= len(given)
            yield from given
        reference = schema.get("$ref")
        parts = [_at(reference, self._root)] if isinstance(reference, str) else []
        for key in ("allOf", "anyOf", "oneOf"):
            parts += given if isinstance(given := schema.get(key), list) else []
        for part in parts:
            yield from self._names(part, seen)


def _at(reference: str, root: Mapping[str, Any]) -> Any:
    """What a reference into the same schema leads to."""
    found: Any = root
    for part in reference.removeprefix("#").split("/")[1:] if reference.startswith("#") else ():
        key = part.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, Mapping) else None
    return found if reference.startswith("#") else None


def _covered(pattern: str, names: Sequence[str]) -> list[str]:
    """Return the names that have the pattern where nothing else has it; none where other names have it too."""
    any_name = _matcher({"patternProperties": {pattern: _NULL}})
    having = [name for name in names if _takes(any_name.deep_copy(), "{" + _spelled(name) + ":")]
    if not having or any_name.is_error():
        return []
    rest = _matcher(
        {"properties": dict.fromkeys(having, _NULL), "required": having, "patternProperties": {pattern: _NULL}}
    )
    whole = "{" + "".join(f"{_spelled(name)}:null," for name in having)
    if not _takes(rest, whole):  # llguidance allows nothing after the last of them
        return having
    rest.compute_bitmask()
    return having if rest.is_error() else []


_NULL = {"type": "null"}


def _spelled(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)


def _matcher(schema: _Schema) -> LLMatcher:
    ours = {"type": "object", "additionalProperties": False, "x-guidance": {"whitespace_flexible": False}}
    return LLMatcher(_BYTES, LLMatcher.grammar_from_json_schema(json.dumps(schema | ours)), log_level=0)


def _takes(matcher: LLMatcher, text: str) -> bool:
    data = list(text.encode("utf-8", "surrogatepass"))
    return not matcher.is_error() and matcher.try_consume_tokens(data) == len(data)
