"""A client of plain HTTP, which can leave, read slowly and send what is none."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.client import HTTPConnection, HTTPException
from typing import Any

from outrider.tools.parting import Divergence, Outcome, divergence, read_logprobs

PATIENCE = 120.0  # seconds without a byte, after which an answer counts as lost
FAILURES = (OSError, HTTPException, ValueError)  # of a connection, or of a body that was cut off


class LeftError(Exception):
    """The client has left by its own wish."""


class Client:
    """Asks one request after another of a server, over one connection where the server keeps it open."""

    def __init__(self, port: int, patience: float = PATIENCE) -> None:
        self._connection = HTTPConnection("127.0.0.1", port, timeout=patience)

    def ask(self, body: dict[str, Any], leave: Callable[[int], bool] | None = None) -> Answer:
        """The answer, whole or of a stream. `leave` is asked with the number of events read; the client goes where it
        says so, and what has come is the answer.

        Raises one of `FAILURES` for an answer that does not come.
        """
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        answer = Answer()
        try:
            self._connection.request("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"})
            if leave is not None and leave(0):
                raise LeftError
            response = self._connection.getresponse()
            answer.status = response.status
            if response.headers.get_content_type() != "text/event-stream":
                answer.take(json.loads(response.read()))
                answer.done = True
                return answer
            for place, line in enumerate(_events(response)):
                if line == "[DONE]":
                    answer.done = True
                else:
                    answer.take(json.loads(line))
                if leave is not None and leave(place + 1):
                    raise LeftError
        except LeftError:
            self._connection.close()
        except FAILURES:
            self._connection.close()
            raise
        return answer

    def close(self) -> None:
        self._connection.close()


def _events(response: Any) -> Iterator[str]:
    for line in response:
        if text := line.decode().strip():
            yield text.removeprefix("data: ")


def get(port: int, path: str, timeout: float = 20.0) -> tuple[int, str]:
    connection = HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


@contextmanager
def plain(port: int, timeout: float = 20.0, receive_bytes: int | None = None) -> Iterator[socket.socket]:
    """A bare connection; with `receive_bytes` the system keeps that much of what nobody has read."""
    with socket.socket() as made:
        if receive_bytes is not None:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        made.settimeout(timeout)
        made.connect(("127.0.0.1", port))
        yield made


def read_all(made: socket.socket) -> bytes:
    """Read until the server closes. Raises TimeoutError where it does not."""
    found = b""
    try:
        while piece := made.recv(65536):
            found += piece
    except ConnectionResetError:
        pass
    return found


@dataclass
class Answer:
    """Choices by index, the number of tokens, and the error of a body or an event."""

    status: int = 0
    choices: dict[int, Outcome] = field(default_factory=dict)
    tokens: int | None = None
    fingerprint: str | None = None
    created: int | None = None
    error: dict[str, Any] | None = None
    done: bool = False  # whether the end of a stream has come, or the whole body

    def take(self, body: dict[str, Any]) -> None:
        """Add a whole answer, or the next event of a stream."""
        if "error" in body:
            self.error = body["error"]
            return
        self.fingerprint, self.created = body["system_fingerprint"], body["created"]
        if body.get("usage"):
            self.tokens = body["usage"]["completion_tokens"]
        for each in body["choices"]:
            known = self.choices.get(each["index"], Outcome(logprobs=()))
            said = each.get("message") or each.get("delta") or {}
            calls = dict(enumerate(known.calls))
            for place, call in enumerate(said.get("tool_calls") or ()):
                name, arguments = calls.get(at := call.get("index", place), ("", ""))
                more = call["function"]
                calls[at] = name + (more.get("name") or ""), arguments + more["arguments"]
            self.choices[each["index"]] = replace(
                known,
                text=known.text + (each.get("text") or said.get("content") or ""),
                finish=each["finish_reason"] or known.finish,
                calls=tuple(call for _, call in sorted(calls.items())),
                logprobs=(known.logprobs or ()) + read_logprobs(each.get("logprobs") or {}),
            )

    def part(self, expected: Answer, *, counted: bool = True) -> Divergence | None:
        """Where the two part, to the last bit of a log-probability; None where they are the same. Where tokens are not
        `counted`, their number may be unknown."""
        if self.choices.keys() != expected.choices.keys():
            return Divergence(
                "choices", None, str(sorted(expected.choices)), str(sorted(self.choices)), None, "the answer"
            )
        parted = (divergence(f"choice {index}", each, self.choices[index]) for index, each in expected.choices.items())
        if found := next(filter(None, parted), None):
            return found
        if self.tokens == expected.tokens or not (counted or self.tokens is not None):
            return None
        return Divergence("number of tokens", None, str(expected.tokens), str(self.tokens), None, "the answer")

    def begins(self, expected: Answer) -> bool:
        """Whether it is the beginning of what is expected."""
        return all(
            index in expected.choices and each.begins(expected.choices[index]) for index, each in self.choices.items()
        )
