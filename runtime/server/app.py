"""Routes of the server. Each request is one or several of `Runtime.submit`, cancelled when its client goes away."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from ipaddress import ip_address
from math import inf
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.plans.errors import OutriderError, RequestError
from outrider.runtime.generation import FinishReason, Generation, Span
from outrider.runtime.handle import Handle
from outrider.runtime.server.answers import Answer
from outrider.runtime.server.api_keys import check_shares
from outrider.runtime.server.errors import ApiError, as_api_error, client_gone, invalid, shutting_down
from outrider.runtime.server.generation_request import ChatRequest, CompletionRequest
from outrider.runtime.server.metrics import Metrics
from outrider.runtime.server.observer import Endings, Observer
from outrider.runtime.server.readiness import Phase, Readiness
from outrider.runtime.server.record import Record, path_of, record_of
from outrider.runtime.server.refusals import refusal
from outrider.runtime.server.request_log import log_fault, log_request
from outrider.runtime.server.served import ServedRuntime, drain
from outrider.runtime.server.submitting import Submission, Submitter
from outrider.runtime.server.token_budgets import TokenBudgets

if TYPE_CHECKING:
    from outrider.runtime.server.tracing import Tracing

_COMPLETIONS = "/v1/completions"
_THIS_MACHINE = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"  # origins of pages
_DONE = "data: [DONE]\n\n"
_LOG = logging.getLogger("outrider")
_T = TypeVar("_T")
_PREPARING_OF_A_KEY = 2  # of one key, so that large grammars of one leave room for the others'
_PREPARING = 4  # requests whose prompts are encoded at once: a large one takes a core, and memory
_GONE = 0.25  # seconds between looks whether a client is still there that waits for the whole answer


_OPTIONS = (
    "max_body_bytes", "drain_seconds", "max_choices", "allow_origins", "allow_hosts", "protect_metrics",
    "share_prefixes", "tokens_per_minute",
)  # fmt: skip
"""What a server and a Serve application are given alike."""


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
    def from_options(cls, options: object, **fields: Any) -> ServerConfig:
        """Make a config of the `options` of a command, or of a Serve application, and of other `fields`."""
        return cls(**{name: getattr(options, name) for name in _OPTIONS} | fields)

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


def make_app(
    runtime: ServedRuntime, config: ServerConfig, *, readiness: Readiness | None = None, tracing: Tracing | None = None
) -> FastAPI:
    """The application, for any ASGI server. When it shuts down, requests are finished for some seconds, then cancelled.

    `runtime` serves already: call `readiness.warm_up` before, if it is to be warm. `readiness` is for servers that
    drain before they shut the application down. With `tracing`, requests have spans, the last of which are sent
    when it shuts down.
    """
    metrics, context = Metrics(runtime, config.model, config.metric_labels), runtime.manifest.target.context
    readiness = readiness or Readiness()
    # The context's length under the names that clients read: vLLM's, and that of OpenRouter.
    about = {"id": config.model, "object": "model", "created": int(time()), "owned_by": "outrider"}
    about |= {"max_model_len": context, "context_length": context}
    traced = [] if tracing is None else [tracing.end]
    endings = Endings([_settle, metrics.observe, *traced, log_request if config.log_requests else log_fault])

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        readiness.reach(Phase.DRAINING)
        await run_in_threadpool(drain, runtime, config.drain_seconds)
        await endings.close()
        if tracing is not None:
            await run_in_threadpool(tracing.flush)
        if config.cache_file is not None:
            try:
                await run_in_threadpool(runtime.save_prefix_cache, config.cache_file)
            except (OSError, OutriderError) as error:
                _LOG.error("the prefix cache cannot be saved: %s", error)

    app = FastAPI(title="Outrider", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    reading = partial(app.api_route, methods=["GET", "HEAD"])
    submitter = Submitter(runtime, config.model, config.max_choices)
    serving = _Serving(submitter, None if config.tokens_per_minute is None else TokenBudgets(config.tokens_per_minute))

    @app.exception_handler(ApiError)
    @app.exception_handler(OutriderError)
    async def ours(request: Request, error: ApiError | OutriderError) -> JSONResponse:
        return _refused(request, error if isinstance(error, ApiError) else as_api_error(error))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        return _refused(request, _named(request, error))

    @app.exception_handler(RequestValidationError)
    async def wrong_body(request: Request, error: RequestValidationError) -> JSONResponse:
        model = CompletionRequest if path_of(request.scope) == _COMPLETIONS else ChatRequest
        return _refused(request, invalid(400, None, refusal(error.errors(), error.body, model)))

    app.add_middleware(_Guard, config=config, readiness=readiness)
    app.add_middleware(
        CORSMiddleware,  # outside of the guard: a browser asks without a key whether it may ask
        allow_origins=config.allow_origins,
        allow_origin_regex=_THIS_MACHINE,
        allow_methods=["GET", "HEAD", "POST"],
        allow_headers=["*"],
        expose_headers=["*"],
    )
    app.add_middleware(Observer, endings=endings, begun=None if tracing is None else tracing.begin)  # outside of all

    @reading("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok"}

    @reading("/health/live")
    async def live() -> dict[str, Any]:
        return {"status": "live"}

    @reading("/health/ready")
    async def ready() -> JSONResponse:
        status, body = readiness.response
        return JSONResponse(body, status)

    @reading("/metrics")
    async def measured() -> Response:
        text = await run_in_threadpool(generate_latest, metrics)  # counts may be elsewhere
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    @reading("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [about]}

    @reading("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        submitter.check_model(name)
        return about

    @app.post(_COMPLETIONS)
    async def completions(asked: CompletionRequest, request: Request) -> Response:
        return await serving.answer(request, Answer(config.model, runtime, chat=False), asked)

    @app.post("/v1/chat/completions")
    async def chat(asked: ChatRequest, request: Request) -> Response:
        return await serving.answer(request, Answer(config.model, runtime, chat=True), asked)

    return app


def _settle(record: Record) -> None:
    """Give back what a request has not used of its key's budget."""
    if record.reservation is not None:
        record.reservation.settle(record.prompt_tokens + record.new_tokens)


def _refused(request: Request, error: ApiError) -> JSONResponse:
    """The answer for an error, which is noted."""
    record_of(request).refuse(error)
    return JSONResponse(error.body, error.status, error.headers)


class _Guard:
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
                app = _refused(request, error)
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


def _named(request: Request, error: HTTPException) -> ApiError:
    """The error of ours for one of the frameworks, which name it in two words."""
    cause, status = error.__cause__, error.status_code
    if isinstance(cause, ApiError):  # while its body came
        return cause
    if isinstance(cause, ClientDisconnect):  # before its body was whole
        return client_gone()
    method, path, code, said = request.method, path_of(request.scope), None, str(error.detail)
    if status == 404:
        code = "not_found"
        said = f"There is nothing at {path}; this server has /v1/completions, /v1/chat/completions and /v1/models."
    elif status == 405:
        others = sorted((error.headers or {}).get("Allow", "another method").split(", "))
        code, said = "method_not_allowed", f"{path} cannot be asked by {method}; use {' or '.join(others)}."
    elif status == 400:
        why = {UnicodeDecodeError: "it is no UTF-8 text", RecursionError: "it is nested too deeply"}
        reason = why.get(type(cause), "it has a number of too many digits")
        said = f"The body cannot be read as JSON: {reason}. Send a JSON object."
    return invalid(status, code, said, error.headers)


def _cut_off(found: Sequence[Generation]) -> ApiError | None:
    """The error for a client whose answer was cut off by the end of the server."""
    if all(each.finish_reason is not FinishReason.CANCELLED for each in found):
        return None
    return shutting_down(f"the answer was cut off after {sum(each.stats.new_tokens for each in found)} tokens")


class _Serving:
    """Submits what is asked, and gives it back whole or in pieces."""

    def __init__(self, submitter: Submitter, budgets: TokenBudgets | None) -> None:
        self._submitter, self._budgets = submitter, budgets
        self._preparing = asyncio.Semaphore(_PREPARING)
        self._of_client: dict[str | None, asyncio.Semaphore] = {}  # of clients with a key, who are known

    async def answer(self, request: Request, answer: Answer, asked: CompletionRequest | ChatRequest) -> Response:
        record = record_of(request)
        if asked.model is None:
            asked.model = self._submitter.model
        record.asked, record.answer_id = asked, answer.id
        submitted = await self._prepared(request, record, asked)
        answer.describe(submitted, asked.drafter)
        record.drafter = answer.drafter_name
        if asked.stream:
            answer.with_usage = asked.include_usage
            events = self._events(record, answer, submitted)
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        found = await self._whole(request, submitted.handles)
        return JSONResponse(answer.whole(found, submitted.prompts, submitted.logprobs))

    async def _prepared(self, request: Request, record: Record, asked: CompletionRequest | ChatRequest) -> Submission:
        """Have a thread submit what is asked, once there is one for the client; no longer than the client is there.

        A thread that has begun continues, as it cannot be ended, and others wait for its end.
        """
        most = _PREPARING if record.client is None else _PREPARING_OF_A_KEY
        own, begun = self._of_client.setdefault(record.client, asyncio.Semaphore(most)), False

        async def prepare() -> Submission:
            nonlocal begun
            async with own, self._preparing:
                begun = True
                return await run_in_threadpool(self._submit, record, asked)

        record.preparing = asyncio.ensure_future(prepare())
        try:
            return await _while_there(request, asyncio.shield(record.preparing))
        except BaseException:
            if not begun:  # and does not, now
                record.preparing.cancel()
            raise

    def _submit(self, record: Record, asked: CompletionRequest | ChatRequest) -> Submission:
        """Submit what is asked, within the budget of the client's key; in a thread."""
        budgets, client = self._budgets, record.client
        admit = None
        if budgets is not None and client is not None:

            def admit(prompt: int, most_new: int) -> None:
                record.reservation = budgets.reserve(client, prompt, most_new)
                record.headers |= budgets.headers(client)

        record.submitted = self._submitter.submit(asked, client, admit, record.owner)
        return record.submitted

    async def _whole(self, request: Request, handles: list[Handle]) -> list[Generation]:
        waiting = asyncio.gather(*handles)
        try:
            found = await _while_there(request, waiting)
        finally:
            for handle in handles:
                handle.cancel()
            waiting.cancel()
            with suppress(asyncio.CancelledError, OutriderError):
                await waiting
        if cut := _cut_off(found):
            raise cut
        return list(found)

    async def _events(self, record: Record, answer: Answer, submitted: Submission) -> AsyncIterator[str]:
        """Server-sent events of all choices as they come. Left unfinished, it cancels them."""
        handles = submitted.handles
        queue: asyncio.Queue[tuple[int, Span | None]] = asyncio.Queue()

        async def follow(index: int, handle: Handle) -> None:
            try:
                async for span in handle:
                    queue.put_nowait((index, span))
            finally:
                queue.put_nowait((index, None))

        tasks = [asyncio.create_task(follow(index, handle)) for index, handle in enumerate(handles)]
        left = len(handles)
        try:
            for index in range(len(handles)):
                if opening := answer.opening(index):
                    yield _event(opening)
            while left:
                index, span = await queue.get()
                if span is None:
                    left -= 1
                    for ending in answer.ending(index, await handles[index]):
                        yield _event(ending)
                    continue
                if piece := answer.piece(index, span, submitted.logprobs):
                    yield _event(piece)
            found = [await handle for handle in handles]
            if answer.with_usage:
                yield _event(answer.usage(found, submitted.prompts))
            if cut := _cut_off(found):
                record.refuse(cut)
                yield _event(cut.body)
            yield _DONE
        except OutriderError as error:  # the answer has begun: the error is its last event
            last = as_api_error(error)
            record.refuse(last)
            yield _event(last.body)
            yield _DONE
        finally:
            for handle in handles:
                handle.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _while_there(request: Request, work: Awaitable[_T]) -> _T:
    """The result of `work`, which is cancelled when the client has gone."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait([task], timeout=_GONE))[0]:
            if await request.is_disconnected() and not task.done():
                raise client_gone()
        return await task
    finally:
        task.cancel()


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
