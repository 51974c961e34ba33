"""One request: its id, and the record of it that logs, traces, metrics and budgets read when it is over."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from time import perf_counter, time_ns
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Scope

from outrider.runtime.generation import FinishReason, Generation
from outrider.runtime.handle import Handle
from outrider.runtime.server.errors import ApiError
from outrider.runtime.server.generation_request import ChatRequest, CompletionRequest
from outrider.runtime.server.submitting import Submission
from outrider.runtime.server.token_budgets import Reservation


@dataclass
class Record:
    """A request from its head to its end.

    Filled in as it goes: `client` with the key's number, `asked` once the body is read, `preparing` while a thread
    encodes its prompts, `submitted` once it is in the queue, `status` with the answer's head, `ended` with its last
    byte, or when the client has gone. `path` is the one that routes are found by. Times are `perf_counter`'s, in
    seconds. No text of a prompt or an answer is here but in `asked`, which is not logged.
    """

    request_id: str
    method: str
    path: str
    began: float = field(default_factory=perf_counter)
    began_ns: int = field(default_factory=time_ns)  # of the same moment, by the time of day
    owner: str = ""  # requests of one owner share cached prefixes and memories
    client: str | None = None
    asked: ChatRequest | CompletionRequest | None = None
    drafter: str | None = None
    answer_id: str | None = None
    preparing: asyncio.Future[Submission] | None = None  # continues, though the answer's task is cancelled
    submitted: Submission | None = None
    reservation: Reservation | None = None
    headers: dict[str, str] = field(default_factory=dict)  # of any answer
    status: int = 0
    error: ApiError | None = None
    fault: BaseException | None = None  # of the server's own
    ended: float = 0.0
    span: Any = None  # of OpenTelemetry, where requests are traced

    def refuse(self, error: ApiError) -> None:
        """The answer is this error, or ends with it; the first one counts."""
        self.error = self.error or error

    def end(self) -> None:
        """The answer has ended."""
        self.ended = perf_counter()

    @property
    def done(self) -> bool:
        """Whether nothing of the request runs any longer."""
        prepared = self.preparing is None or self.preparing.done()
        return prepared and all(handle.done for handle in self.handles)

    @property
    def handles(self) -> Sequence[Handle]:
        """Those of its choices; none where it was never submitted."""
        return () if self.submitted is None else self.submitted.handles

    @property
    def found(self) -> Sequence[Generation]:
        """The generations of its choices, but for those that an error has ended."""
        return [handle.generation for handle in self.handles if handle.generation is not None]

    @property
    def prompt_tokens(self) -> int:
        """Tokens of its prompts, each counted once."""
        return 0 if self.submitted is None else self.submitted.prompt_tokens

    @property
    def new_tokens(self) -> int:
        return sum(each.stats.new_tokens for each in self.found)

    @property
    def finish_reasons(self) -> list[FinishReason]:
        return [each.finish_reason for each in self.found]

    @property
    def submitted_seconds(self) -> float:
        """From the request's arrival until it was in the queue."""
        return min((handle.submitted for handle in self.handles), default=self.began) - self.began

    def queue_seconds(self, found: Generation) -> float:
        """From the request's arrival to the first work on a choice."""
        return self.submitted_seconds + found.stats.queued_ms / 1000

    def first_token_seconds(self, found: Generation) -> float:
        """From the request's arrival to the first token of a choice."""
        return self.queue_seconds(found) + found.stats.ttft_ms / 1000

    @property
    def seconds(self) -> float:
        return self.ended - self.began


def path_of(scope: Scope) -> str:
    """The path of a request after that at which the application is mounted, if it is."""
    path, root = str(scope["path"]), str(scope.get("root_path", "")).rstrip("/")
    return path.removeprefix(root) if path.startswith(f"{root}/") else path


def record_of(request: Request) -> Record:
    """The record that the observer has begun for a request."""
    found: Record = request.state.record
    return found


def refuse(request: Request, error: ApiError) -> JSONResponse:
    """The answer for an error, which is noted."""
    record_of(request).refuse(error)
    return JSONResponse(error.body, error.status, error.headers)


HEADER = "x-request-id"
_SANE = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._:/+=@-]{0,127}")  # fits a header, a line of a log and a trace as it is


def new_id() -> str:
    return f"req_{secrets.token_hex(16)}"


def id_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The id of a request with these headers, whose names are in lower case."""
    given = [value for name, value in headers if name == HEADER.encode()]
    sane = len(given) == 1 and _SANE.fullmatch(given[0])
    return given[0].decode("ascii") if sane else new_id()
