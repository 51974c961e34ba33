"""`outrider recipe`: the keys of a recipe with types, defaults and meaning, read from the models that check a recipe.

The walk is over the models' JSON schema, by which editors complete and check `model.yaml`, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from outrider.compiler.recipe import Recipe
from outrider.plans.errors import UsageError

TOP = "recipe"
NOTE = (
    "drafters.KIND and backends.KIND are entries of these lists, of that kind. --set names entries by their place: "
    "drafters[0].max_draft=4."
)
_REF = "#/$defs/"

Schema = Mapping[str, Any]


@dataclass(frozen=True)
class Key:
    """One key of a mapping; `type` and `default` are texts for the reader."""

    name: str
    type: str
    default: str
    meaning: str


@dataclass(frozen=True)
class Mapped:
    """A mapping of a recipe. `paths` say where the mapping may stand; `drafters.ngram` is a drafter of that kind."""

    paths: tuple[str, ...]
    meaning: str
    keys: tuple[Key, ...] = field(repr=False)


def recipe_schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of `model.yaml`."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Recipe.model_json_schema()}


def recipe_keys() -> list[Mapped]:
    """Return every mapping of a recipe, the recipe itself first, each after the mapping that holds it."""
    return list(_Walk(recipe_schema()).found.values())


def choose_keys(wanted: str) -> list[Mapped]:
    """Return the mapping at `wanted`, such as `drafters.ngram`, with its inner mappings, or one key's mapping, such as
    `capacity.context`.

    `wanted` may have indices as for `--set`. Raises `UsageError` for an unknown key.
    """
    path = re.sub(r"\[\d*\]", "", wanted)
    everything = recipe_keys()
    if chosen := [m for m in everything if any(f"{p}.".startswith(f"{path}.") for p in m.paths)]:
        return chosen
    for mapping in everything:
        for key in mapping.keys:
            if path in _spelled(mapping, key):
                chosen.append(replace(mapping, keys=(key,)))
                break
    if not chosen:
        known = [s for m in everything for s in (*m.paths, *(s for key in m.keys for s in _spelled(m, key)))]
        close = get_close_matches(path, known, n=1)
        advice = f"did you mean {close[0]}?" if close else "leave it out to see all that there are"
        raise UsageError(f"a recipe has no key {wanted!r}; {advice}")
    return chosen


def print_keys(mappings: list[Mapped], console: Console) -> None:
    for mapping in mappings:
        console.print(Text(f"{', '.join(mapping.paths)}", style="bold"), soft_wrap=False)
        console.print(Text(mapping.meaning), soft_wrap=False)
        table = Table("  key", "type", "default", "meaning", box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for key in mapping.keys:
            table.add_row(*map(Text, (f"  {key.name}", key.type, key.default, key.meaning)))
        table.columns[0].no_wrap = True
        console.print(table, soft_wrap=False)
        console.print()


def _spelled(mapping: Mapped, key: Key) -> Iterator[str]:
    """Yield the spellings of a key's path: with the kind of a drafter or backend, or without it, as in the file."""
    for path in mapping.paths:
        if path == TOP:
            yield key.name
            continue
        yield f"{path}.{key.name}"
        yield re.sub(r"^(drafters|backends)\.[^.]+", r"\1", path) + f".{key.name}"


class _Walk:
    """The mappings of a schema, found depth first."""

    def __init__(self, schema: Schema) -> None:
        self._defs: Mapping[str, Schema] = schema["$defs"]
        self.found: dict[str, Mapped] = {}
        self._add(TOP, TOP, schema)

    def _add(self, name: str, path: str, schema: Schema) -> None:
        if (known := self.found.get(name)) is not None:
            self.found[name] = replace(known, paths=(*known.paths, path))
        else:
            self.found[name] = Mapped(
                (path,), " ".join(schema["description"].split()), ()
            )  # registered before its keys, so that a mapping stands before the mappings in it
            keys = tuple(self._key(n, s, n in schema.get("required", ())) for n, s in schema["properties"].items())
            self.found[name] = replace(self.found[name], keys=keys)
        for key, inner in schema["properties"].items():
            below = key if path == TOP else f"{path}.{key}"
            within = list(_references(inner))
            for reference in within:
                section = self._defs[reference]
                kind = section["properties"].get("kind", {}).get("const")
                self._add(reference, f"{below}.{kind}" if kind and len(within) > 1 else below, section)

    def _key(self, name: str, schema: Schema, required: bool) -> Key:
        if "default" in schema:
            default = _written(schema["default"])
        elif required:
            default = "required"
        else:
            default = "its defaults" if "$ref" in schema else "see meaning"
        return Key(name, _type(schema), default, schema["description"])


def _references(schema: Schema) -> Iterator[str]:
    """Yield the mappings that a value, or a list's values, may be."""
    if "$ref" in schema:
        yield schema["$ref"].removeprefix(_REF)
    for inner in _choices(schema):
        yield from _references(inner)
    if "items" in schema:
        yield from _references(schema["items"])


def _choices(schema: Schema) -> list[Schema]:
    return [inner for word in ("anyOf", "oneOf") for inner in schema.get(word, ())]


def _type(schema: Schema) -> str:
    """Return a type of JSON schema in words."""
    if choices := _choices(schema):
        return " or ".join(dict.fromkeys(_type(s) for s in choices if s.get("type") != "null"))
    if "$ref" in schema:
        return "mapping"
    if "const" in schema:
        return str(schema["const"])
    if "enum" in schema:
        return " | ".join(map(str, schema["enum"]))
    match schema["type"]:
        case "array" if "prefixItems" in schema:
            return f"list of {len(schema['prefixItems'])}: {_type(schema['prefixItems'][0])}"
        case "array":
            return f"list of: {_type(schema['items'])}"
        case "string":
            return str(schema.get("format", "name" if "pattern" in schema else "text"))
        case "boolean":
            return "true | false"
        case "integer" | "number" as kind:
            return f"{'whole ' if kind == 'integer' else ''}number{_limits(schema)}"
        case other:
            raise NotImplementedError(f"a type of JSON schema without words: {other}")


def _limits(schema: Schema) -> str:
    words = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "to", "exclusiveMaximum": "below"}
    return "".join(f" {word} {schema[limit]:.15g}" for limit, word in words.items() if limit in schema)


def _written(value: object) -> str:
    """Return a default as a recipe would write it."""
    match value:
        case None:
            return "not set"
        case bool():
            return str(value).lower()
        case list():
            return f"[{', '.join(map(_written, value))}]"
        case {"kind": kind, **others} if all(other is None for other in others.values()):
            return str(kind)
        case str():
            return value if value.isprintable() and "{" not in value else repr(value)
        case _:
            return str(value)
