"""A request's id: the client's own `x-request-id` where it is sane, else a new one."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable

HEADER = "x-request-id"
_SANE = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._:/+=@-]{0,127}")  # fits a header, a line of a log and a trace as it is


def new_id() -> str:
    return f"req_{secrets.token_hex(16)}"


def id_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The id of a request with these headers, whose names are in lower case."""
    given = [value for name, value in headers if name == HEADER.encode()]
    sane = len(given) == 1 and _SANE.fullmatch(given[0])
    return given[0].decode("ascii") if sane else new_id()
