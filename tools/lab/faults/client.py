"""A client of plain HTTP, which can leave, read slowly and send what is none."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from typing import Any

from outrider.tools.lab.faults.answers import Answer

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
    """Status and text of a path."""
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
