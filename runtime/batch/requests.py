"""Requests of a batch: one JSON object each, under an id of its own, and the orders that they come in."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_DIGITS = re.compile(r"([0-9]+)")
_DEEPEST = 256  # far from where Python stops, which depends on how deep the caller is in calls
_TOO_DEEP = f"it is nested too deeply: more than {_DEEPEST} levels"
_BEGINNING = 4096  # characters by which requests are put beside those that begin alike


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A request as it was given: `text` is JSON of an object."""

    custom_id: str
    text: str


def parse(text: str) -> Any:
    """JSON without NaN and infinities, at most 256 levels deep at any depth of calls. Raises ValueError."""
    try:
        found = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if text.count("[") + text.count("{") > _DEEPEST and _levels_exceed(found, _DEEPEST):
        raise ValueError(_TOO_DEEP)
    return found


def _levels_exceed(value: Any, most: int) -> bool:
    """Whether lists and objects stand in one another more than `most` deep."""
    level = [value]
    for _ in range(most + 1):
        level = [each for each in level if isinstance(each, dict | list)]
        if not level:
            return False
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    return True


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def why_not_an_id(value: object) -> str | None:
    """What is wrong with a request's `custom_id`; None where nothing is."""
    if value is None:
        return "has no custom_id"
    if not isinstance(value, str) or not value:
        return "has a custom_id that is no text of at least one character"
    try:
        value.encode()
    except UnicodeEncodeError:
        return "has a custom_id with half a character"
    return None


def id_order(custom_id: str) -> tuple[object, ...]:
    """The key by which results are ordered: numbers inside ids compare as numbers, so request-2 before request-10."""
    parts: list[object] = [*_DIGITS.split(custom_id)]
    for place in range(1, len(parts), 2):
        digits = str(parts[place]).lstrip("0")
        parts[place] = (len(digits), digits)
    return tuple(parts), custom_id  # the id apart: of a1 it would stand where a has a number


def working_order(requests: Iterable[BatchRequest]) -> list[BatchRequest]:
    """The requests in the order in which they are computed: those whose prompts begin alike stand together."""
    return sorted(requests, key=lambda request: (_beginning(request.text), id_order(request.custom_id)))


def _beginning(text: str) -> str:
    """The beginning of a request's prompt, as far as its text has it: tools, then messages or a prompt."""
    row = parse(text)
    body = row.get("body", row)
    if not isinstance(body, Mapping):
        return ""
    return "\n".join(json.dumps(body.get(key)) for key in ("tools", "messages", "prompt"))[:_BEGINNING]


def digest(requests: Sequence[BatchRequest]) -> str:
    """A sha256 of the requests in their order."""
    found = hashlib.sha256()
    for request in requests:
        found.update(f"{len(request.text)}\n".encode())
        found.update(request.text.encode("utf-8", "surrogatepass"))
    return found.hexdigest()
