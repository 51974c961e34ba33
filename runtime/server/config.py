"""What a server, or a Serve application, is set up with; read without the server's packages."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import inf
from pathlib import Path
from typing import Any, Literal

from outrider.plans.errors import RequestError
from outrider.runtime.server.api_keys import check_shares

LogFormat = Literal["json", "text"]


@dataclass(frozen=True)
class ServerConfig:
    """`model` is the name that clients ask for, `api_key` the key that they send, or several that count.

    Refused are bodies of more than `max_body_bytes`, and requests for more than `max_choices`: prompts times `n`. Each
    key may take `tokens_per_minute`, prompts and new tokens together. With `log_requests`, the logger
    `outrider.requests` gets a record of each request. Every metric has the `metric_labels`; with
    `protect_metrics`, `/metrics` requires a key.

    Requests of one key do not use what was computed for those of another, whose prompts response times would reveal;
    with `share_prefixes` they do.

    Of browsers' pages those of this machine may ask, and those of `allow_origins` ("*": all). Without a key, a host
    that is asked by a name, and not by an address, is one of `localhost` and `allow_hosts` ("*": any), so that no page
    of another site can have its own name lead here.

    When the application shuts down, requests have `drain_seconds` to end, and `cache_file` gets what the prefix cache
    holds then. Servers that wait for connections before that need a limit of their own.
    """

    model: str
    api_key: str | Sequence[str] | None = None
    max_body_bytes: int = 2**20
    drain_seconds: float = 30.0
    cache_file: Path | None = None
    max_choices: int = 64
    tokens_per_minute: int | None = None
    log_requests: bool = False
    metric_labels: Mapping[str, str] = field(default_factory=dict)
    allow_origins: Sequence[str] = ()
    allow_hosts: Sequence[str] = ()
    protect_metrics: bool = False
    share_prefixes: bool = False

    @classmethod
    def from_options(cls, options: object, **others: Any) -> ServerConfig:
        """Make a config of what the `options` of a command, or of a Serve application, have of it, and of `others`."""
        given = {each.name: getattr(options, each.name) for each in fields(cls) if hasattr(options, each.name)}
        return cls(**given | others)

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "max_choices", "tokens_per_minute"):
            value = getattr(self, name)
            if (value is not None or name != "tokens_per_minute") and (type(value) is not int or value < 1):
                raise RequestError(f"{name} is {value!r}; pass a whole number of at least 1.")
        if type(self.drain_seconds) not in (int, float) or not 0 <= self.drain_seconds < inf:
            raise RequestError(f"drain_seconds is {self.drain_seconds!r}; pass a number of seconds of at least 0.")
        for key in self.api_keys:
            if not key or key != key.strip() or not (key.isascii() and key.isprintable()):
                raise RequestError(
                    "An API key is empty, begins or ends with a blank, or has characters that a header cannot hold; "
                    "make it of ASCII's letters, digits and signs."
                )
        check_shares(self, bool(self.api_keys), "api_key")
        if wrong := [host for host in self.allow_hosts if not re.fullmatch(r"\*|[\w.-]+", host)]:
            raise RequestError(f"allow_hosts holds {wrong[0]!r}; pass a name alone, without scheme and port, or *.")
        if self.protect_metrics and not self.api_keys:
            raise RequestError("protect_metrics is true, and there is no API key; pass api_key too, or leave it out.")

    @property
    def api_keys(self) -> tuple[str, ...]:
        if self.api_key is None:
            return ()
        return (self.api_key,) if isinstance(self.api_key, str) else tuple(self.api_key)


@dataclass(frozen=True)
class Limits:
    """Seconds that a connection has for the head of a request and then for its body, may read nothing of an answer, and
    may idle between two requests; and how many connections may be open."""

    head_seconds: float = 10.0
    body_seconds: float = 60.0
    send_seconds: float = 60.0
    idle_seconds: float = 15.0
    max_connections: int = 1024
