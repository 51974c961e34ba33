"""What is refused before anything of a request is read: wrong keys, large bodies, foreign hosts."""

from __future__ import annotations

import secrets
from contextlib import suppress
from hashlib import sha256
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.runtime.server.config import ServerConfig
from outrider.runtime.server.errors import ApiError, invalid, shutting_down
from outrider.runtime.server.readiness import Readiness
from outrider.runtime.server.record import path_of, record_of, refuse


class Guard:
    """Refuses wrong keys and large bodies, and requests while the server drains, before anything is read.

    Not one of FastAPI's own middlewares: after those, nobody hears that a client has gone.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, readiness: Readiness) -> None:
        self._app, self._config, self._readiness = app, config, readiness
        self._keys = [key.encode() for key in config.api_keys]
        self._owners = ["" if config.share_prefixes else sha256(key).hexdigest()[:16] for key in self._keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http":
            request = Request(scope)
            if (error := self._refuse(request)) is not None:
                app = refuse(request, error)
            elif "transfer-encoding" in request.headers:
                receive = self._counted(receive)
        await app(scope, receive, send)

    def _counted(self, receive: Receive) -> Receive:
        """Receive a body of unknown length. Raises ApiError where it is too large."""
        left = self._config.max_body_bytes

        async def counted() -> Message:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise _too_large(f"more than {self._config.max_body_bytes}", self._config.max_body_bytes)
            return message

        return counted

    def _refuse(self, request: Request) -> ApiError | None:
        most, path = self._config.max_body_bytes, path_of(request.scope)
        host = request.headers.get("host", "")
        ours = path.startswith("/v1/")
        protected = ours or (path == "/metrics" and self._config.protect_metrics)
        if "transfer-encoding" in request.headers and "content-length" in request.headers:
            twice = "The request says its length twice, by Content-Length and Transfer-Encoding; send one of them."
            return invalid(400, "invalid_http", twice, {"Connection": "close"})  # proxies differ in which they go by
        if not self._keys and not path.startswith("/health") and not self._is_host(host):
            how = "ask it by its address, or serve with --allow-host NAME, or with an API key."
            return invalid(403, "host_not_allowed", f"The host {host:.60} is no name of this server; {how}")
        if ours and self._readiness.draining:
            error = shutting_down("the request was not begun")
            error.headers["Connection"] = "close"  # the next one may reach another server
            return error
        if protected and self._keys:
            scheme, _, given_key = request.headers.get("authorization", "").partition(" ")
            given = given_key.strip().encode() if scheme.lower() == "bearer" else b""
            right = [secrets.compare_digest(given, key) for key in self._keys]  # all, so that none takes less time
            if not any(right):
                wrong = "The API key is missing or wrong; send the header Authorization: Bearer KEY."
                return ApiError(401, wrong, "authentication_error", "invalid_api_key")
            record, place = record_of(request), right.index(True)
            record.client, record.owner = f"key {place}", self._owners[place]
        length = request.headers.get("content-length", "")
        if request.method != "POST" or "transfer-encoding" in request.headers:
            return None
        if not length.isdigit():
            missing = "The request does not say its length; send Content-Length, or a body in chunks."
            return invalid(411, "length_required", missing)
        return _too_large(length, most) if int(length) > most else None

    def _is_host(self, given: str) -> bool:
        """Whether a `Host` is an address, or one of the names that lead here."""
        name = ""
        with suppress(ValueError):
            name = urlsplit(f"//{given}").hostname or ""
            return bool(ip_address(name))
        if name.removesuffix(".").rpartition(".")[2] == "localhost":  # loopback by RFC 6761, as all names below it
            return True
        return not {name, "*"}.isdisjoint(map(str.lower, self._config.allow_hosts))


def _too_large(length: str, most: int) -> ApiError:
    large = f"The body has {length} bytes; at most {most} are taken. Send less text, or fewer prompts at a time."
    return invalid(413, "body_too_large", large)
