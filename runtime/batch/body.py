"""What a request of a batch asks for: OpenAI's batch line, or its body's fields beside the id."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from outrider.plans.errors import RequestError
from outrider.runtime.batch.requests import parse
from outrider.runtime.options.options import Doors, offered
from outrider.runtime.server.errors import ApiError, invalid
from outrider.runtime.server.generation_request import ChatRequest, CompletionRequest
from outrider.runtime.server.refusals import refusal, shown

_KINDS: dict[str, type[ChatRequest] | type[CompletionRequest]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
}
_OF_A_LINE = ("custom_id", "method", "url", "body")
_PROMPTS = {"prompt": "/v1/completions", "messages": "/v1/chat/completions"}
_OBJECTS = (
    *("messages", "tools", "response_format", "chat_template_kwargs"),
    *(name for name, option in offered(Doors.SERVER).items() if option.kind.c == "json"),
)
"""Fields that may be JSON as a text: columns of a table have one type."""


def check_columns(columns: Iterable[str], source: str) -> None:
    """Raise RequestError for a table whose columns are neither those of OpenAI's lines nor fields of a body."""
    given = set(columns)
    if "body" in given:
        unknown = sorted(given - set(_OF_A_LINE))
        if unknown:
            raise RequestError(
                f"{source} has a column {unknown[0]!r} beside body; its columns are {', '.join(_OF_A_LINE)}."
            )
        return
    kinds = [_KINDS[url] for column, url in _PROMPTS.items() if column in given]
    if not kinds:
        raise RequestError(f"{source} has none of the columns body, prompt and messages; add one of them.")
    known = {"custom_id", *(field for kind in kinds for field in (*kind.model_fields, *kind.UNREAD))}
    if unknown := sorted(given - known):
        raise RequestError(f"{source} has a column {unknown[0]!r}, which no request has; leave it out.")


def asked_of(text: str, model: str) -> CompletionRequest | ChatRequest:
    """What a request asks for; one that names no model asks for `model`. Raises ApiError, status 400.

    `stream` is refused, as a batch has no streams, and so is `deadline`: the answer would depend on the clock.
    """
    row = parse(text)
    body, kind = _of_line(row) if "body" in row else _of_fields(row, model)
    try:
        asked = kind.model_validate(body)
    except ValidationError as error:
        located = [{**each, "loc": ("body", *each["loc"])} for each in error.errors(include_url=False)]
        raise _wrong(refusal(located, body, kind)) from None
    if asked.stream:
        raise _wrong("stream is true, and a batch has no streams; leave it out.")
    if asked.deadline is not None:
        raise _wrong("deadline is given, and an answer of a batch does not depend on the clock; leave it out.")
    return asked


def _of_line(row: Mapping[str, Any]) -> tuple[Any, type[ChatRequest] | type[CompletionRequest]]:
    if unknown := next((key for key in row if key not in _OF_A_LINE), None):
        raise _wrong(f"{unknown} is no key of a batch line, which has {', '.join(_OF_A_LINE)}; leave it out.")
    if row.get("method") != "POST":
        raise _wrong(f'method is {shown(row.get("method"))}; pass "POST".')
    url = row.get("url")
    if not isinstance(url, str) or url not in _KINDS:
        raise _wrong(f"url is {shown(url)}; pass one of {', '.join(_KINDS)}.")
    return _unpacked(row["body"], "body"), _KINDS[url]


def _of_fields(row: Mapping[str, Any], model: str) -> tuple[Any, type[ChatRequest] | type[CompletionRequest]]:
    given = [column for column in _PROMPTS if column in row]
    if len(given) != 1:
        found = "prompt and messages are both given; leave one of them out" if given else "body is missing; pass one"
        raise _wrong(f"{found}, or prompt or messages alone.")
    body = {"model": model} | {key: value for key, value in row.items() if key != "custom_id"}
    for column in _OBJECTS:
        if column in body:
            body[column] = _unpacked(body[column], column)
    return body, _KINDS[_PROMPTS[given[0]]]


def _unpacked(value: Any, key: str) -> Any:
    """A value of a table, which may be JSON as a text."""
    if not isinstance(value, str):
        return value
    try:
        return parse(value)
    except ValueError as error:
        raise _wrong(f"{key} is a text that is no JSON: {error}.") from None


def _wrong(message: str) -> ApiError:
    return invalid(400, None, message)
