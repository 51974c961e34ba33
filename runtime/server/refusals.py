"""Why a body is refused, as a sentence: which key, what it holds, and what to pass.

Pydantic finds what is wrong; its locations and messages are made for programmers who know the model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel

_LONGEST = 60  # characters of a value that are shown


def refusal(errors: Sequence[Mapping[str, Any]], body: object, model: type[BaseModel]) -> str:
    """The sentence for what Pydantic, or FastAPI, found in `body`, which was to be a `model`."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return (
            f"The body is not JSON: {first['ctx']['error']}, at character {first['loc'][-1] + 1}. Send a JSON object."
        )
    if isinstance(body, bytes):
        return "The body is not declared as JSON; send it with the header Content-Type: application/json."
    if body is None:
        return "The body is empty; send a JSON object."
    if not isinstance(body, Mapping):
        return f"The body is {shown(body)}; send a JSON object."
    located = [(_located(each["loc"][1:], each["type"], body), each["type"]) for each in errors]
    # The alternatives of a key have an error each: the one that came furthest was meant.
    (path, value), kind = max(located, key=lambda each: len(each[0][0]))
    key = _spelled(path)
    if kind == "extra_forbidden":
        return f"{key} is no known key; leave it out."
    expected = _description(model, path) or "another value"
    return f"{key} is missing; pass {expected}." if kind == "missing" else f"{key} is {shown(value)}; pass {expected}."


def shown(value: object) -> str:
    """A value of JSON as it was sent, or what it is where it is long."""
    if isinstance(value, list | Mapping) and value:
        return f"a list of {len(value)}" if isinstance(value, list) else "an object"
    text = value[: _LONGEST + 1] if isinstance(value, str) else value
    spelled = json.dumps(text, ensure_ascii=False)
    return spelled if len(spelled) <= _LONGEST + 2 else f"{spelled[:_LONGEST]}..."


def _located(loc: Sequence[str | int], kind: str, body: object) -> tuple[list[str | int], object]:
    """Find the place of an error in `body`, and its value. Names of alternatives, which `loc` has too, are left out."""
    path: list[str | int] = []
    value: Any = body
    for part in loc:
        inside = isinstance(value, Mapping) and part in value
        if inside or (isinstance(value, list) and isinstance(part, int) and part < len(value)):
            value = value[part]
            path.append(part)
    if kind == "missing" or (kind == "extra_forbidden" and path[-1:] != [loc[-1]]):
        path.append(loc[-1])
    return path, value


def _spelled(path: Sequence[str | int]) -> str:
    """`messages[0].content`; of a long key its beginning."""
    names = (part if isinstance(part, int) or len(part) <= _LONGEST else f"{part[:_LONGEST]}..." for part in path)
    return "".join(f"[{name}]" if isinstance(name, int) else f".{name}" for name in names).removeprefix(".")


def _description(model: type[BaseModel], path: Sequence[str | int]) -> str | None:
    """Describe the values that the field at `path` takes; of an element of a list, those of the list."""
    models, found = [model], None
    for part in path:
        if isinstance(part, str):
            field = next((each.model_fields[part] for each in models if part in each.model_fields), None)
            if field is None:
                return found
            models, found = list(_models(field.annotation)), field.description
    return found


def _models(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)
