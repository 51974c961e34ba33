"""Routes of the server. Each request is one or several of `Runtime.submit`; whoever goes away cancels his own."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from time import perf_counter, time
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from plans.errors import OutriderError, RequestError
from runtime.generation import FinishReason, Generation, Span
from runtime.handle import Handle
from runtime.server.answers import Answer, error_body
from runtime.server.asked import ChatAsked, CompletionAsked
from runtime.server.errors import ApiError, shutting_down, told
from runtime.server.metrics import Metrics
from runtime.server.refusals import refusal
from runtime.server.served import Served
from runtime.server.submitting import Submitted, Submitter

_COMPLETIONS = "/v1/completions"
_DONE = "data: [DONE]\n\n"
_LOG = logging.getLogger("outrider")
_PREPARING = 4  # requests whose prompts are encoded at once: a large one takes a core, and memory
_GONE = 0.25  # seconds between looks whether a client is still there that waits for the whole answer


@dataclass(frozen=True)
class ServerConfig:
    """`model` is the name that clients ask for, `api_key` the key that they send, or several that count.

    Refused are bodies of more than `max_body_bytes`, and requests for more than `max_choices`: prompts times `n`.

    When the application shuts down, requests have `drain_seconds` to end, and `cache_file` gets what the prefix cache
    holds then. Servers that wait for connections before that need a limit of their own.
    """

    model: str
    api_key: str | Sequence[str] | None = None
    max_body_bytes: int = 2**20
    drain_seconds: float = 30.0
    cache_file: Path | None = None
    max_choices: int = 64

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "max_choices"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise RequestError(f"{name} is {value!r}; pass a whole number of at least 1.")
        if type(self.drain_seconds) not in (int, float) or not 0 <= self.drain_seconds < inf:
            raise RequestError(f"drain_seconds is {self.drain_seconds!r}; pass a number of seconds of at least 0.")
        for key in self.api_keys:
            if not key or key != key.strip() or not (key.isascii() and key.isprintable()):
                raise RequestError(
                    "An API key is empty, begins or ends with a blank, or has characters that a header cannot hold; "
                    "make it of ASCII's letters, digits and signs."
                )

    @property
    def api_keys(self) -> tuple[str, ...]:
        if self.api_key is None:
            return ()
        return (self.api_key,) if isinstance(self.api_key, str) else tuple(self.api_key)


def make_app(runtime: Served, config: ServerConfig) -> FastAPI:
    """The application. When it shuts down, requests are finished for some seconds, then cancelled."""
    metrics, context = Metrics(runtime), runtime.manifest.target.context
    # The context's length under the names that clients read: vLLM's, and that of OpenRouter.
    about = {"id": config.model, "object": "model", "created": int(time()), "owned_by": "outrider"}
    about |= {"max_model_len": context, "context_length": context}

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        if not await run_in_threadpool(runtime.close, timeout=config.drain_seconds):
            await run_in_threadpool(runtime.close, drain=False, timeout=5.0)
        if config.cache_file is not None:
            try:
                await run_in_threadpool(runtime.save_prefix_cache, config.cache_file)
            except (OSError, OutriderError) as error:
                _LOG.error("the prefix cache cannot be saved: %s", error)

    app = FastAPI(title="Outrider", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    submitter = Submitter(runtime, config.model, config.max_choices)
    serving = _Serving(submitter, metrics)

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> JSONResponse:
        return JSONResponse(error.body, error.status)

    @app.exception_handler(OutriderError)
    async def outrider_error(_: Request, error: OutriderError) -> JSONResponse:
        found = told(error)
        return JSONResponse(found.body, found.status)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        body = error_body(_sentence(request, error), "invalid_request_error")
        return JSONResponse(body, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def unexpected(_: Request, error: Exception) -> JSONResponse:
        """For what nobody foresaw, such as a lack of memory. It is raised again behind the answer, and logged."""
        told = f"The server failed: {type(error).__name__}. What it was doing stands in its log."
        return JSONResponse(error_body(told, "server_error"), 500)

    @app.exception_handler(RequestValidationError)
    async def wrong_body(request: Request, error: RequestValidationError) -> JSONResponse:
        model = CompletionAsked if _path(request) == _COMPLETIONS else ChatAsked
        message = refusal(error.errors(), error.body, model)
        return JSONResponse(error_body(message, "invalid_request_error"), 400)

    app.add_middleware(_Guard, config=config)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok"}

    @app.get("/metrics")
    async def measured() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [about]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        submitter.check_model(name)
        return about

    @app.post(_COMPLETIONS)
    async def completions(asked: CompletionAsked, request: Request) -> Response:
        answer = Answer("cmpl", "text_completion", "text_completion", config.model, runtime, chat=False)
        return await serving.answer(request, answer, asked)

    @app.post("/v1/chat/completions")
    async def chat(asked: ChatAsked, request: Request) -> Response:
        answer = Answer("chatcmpl", "chat.completion", "chat.completion.chunk", config.model, runtime, chat=True)
        return await serving.answer(request, answer, asked)

    return app


class _Guard:
    """Refuses wrong keys and large bodies, before anything is read.

    Not one of FastAPI's own middlewares: behind those, nobody hears that a client has gone.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app, self._config = app, config
        self._keys = [key.encode() for key in config.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = self._refuse(Request(scope)) if scope["type"] == "http" else None
        await (refused or self._app)(scope, receive, send)

    def _refuse(self, request: Request) -> Response | None:
        most = self._config.max_body_bytes
        if _path(request).startswith("/v1/") and self._keys:
            given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
            right = [secrets.compare_digest(given, key) for key in self._keys]  # all, so that none takes less time
            request.state.client = f"key {right.index(True)}" if any(right) else None
            if not any(right):
                wrong = error_body("The API key is missing or wrong.", "authentication_error", "invalid_api_key")
                return JSONResponse(wrong, 401)
        length = request.headers.get("content-length", "")
        if request.method == "POST" and (not length.isdigit() or "transfer-encoding" in request.headers):
            return JSONResponse(error_body("The request does not say its length.", "invalid_request_error"), 411)
        if request.method == "POST" and int(length) > most:
            large = f"The body has {length} bytes; at most {most} are taken."
            return JSONResponse(error_body(large, "invalid_request_error"), 413)
        return None


def _path(request: Request) -> str:
    """The path behind that at which the application is mounted, if it is: the one that routes are found by."""
    path, root = str(request.scope["path"]), str(request.scope.get("root_path", "")).rstrip("/")
    return path.removeprefix(root) if path.startswith(f"{root}/") else path


def _sentence(request: Request, error: HTTPException) -> str:
    """A sentence for errors that the frameworks name in two words."""
    method, path = request.method, _path(request)
    if error.status_code == 404:
        return f"There is nothing at {path}; this server has /v1/completions, /v1/chat/completions and /v1/models."
    if error.status_code == 405:
        return f"{path} cannot be asked by {method}; use {(error.headers or {}).get('Allow', 'another method')}."
    if error.status_code == 400:
        why = {UnicodeDecodeError: "it is no UTF-8 text", RecursionError: "it is nested too deeply"}
        reason = why.get(type(error.__cause__), "it has a number of too many digits")
        return f"The body cannot be read as JSON: {reason}. Send a JSON object."
    return str(error.detail)


def _cut_off(found: Sequence[Generation]) -> ApiError | None:
    """The error for a client whose answer was cut off by the end of the server."""
    tokens = sum(each.stats.new_tokens for each in found)
    if any(each.finish_reason is FinishReason.CANCELLED for each in found):
        return shutting_down(f"the answer was cut off after {tokens} tokens")
    return None


class _Serving:
    """Submits what is asked, and gives it back whole or in pieces."""

    def __init__(self, submitter: Submitter, metrics: Metrics) -> None:
        self._submitter, self._metrics = submitter, metrics
        self._preparing = asyncio.Semaphore(_PREPARING)

    async def answer(self, request: Request, answer: Answer, asked: CompletionAsked | ChatAsked) -> Response:
        began = perf_counter()
        async with self._preparing:
            client = getattr(request.state, "client", None)
            submitted = await run_in_threadpool(self._submitter.submit, asked, client)
        answer.calling, answer.drafter = submitted.calling, asked.drafter
        if asked.stream:
            answer.with_usage = asked.include_usage
            events = self._events(answer, submitted, began)
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        found = await self._whole(request, submitted.handles, began)
        return JSONResponse(answer.whole(found, submitted.prompts, submitted.logprobs))

    async def _whole(self, request: Request, handles: list[Handle], began: float) -> list[Generation]:
        waiting = asyncio.gather(*handles)
        try:
            while not (await asyncio.wait([waiting], timeout=_GONE))[0]:
                if await request.is_disconnected():
                    raise ApiError(499, "The client has gone.", "invalid_request_error")
            found = await waiting
        finally:
            for handle in handles:
                handle.cancel()
            waiting.cancel()
            with suppress(asyncio.CancelledError, OutriderError):
                await waiting
        if cut := _cut_off(found):
            raise cut
        for each in found:
            self._metrics.ttft.observe((each.stats.queued_ms + each.stats.ttft_ms) / 1000)
        self._metrics.duration.observe(perf_counter() - began)
        return list(found)

    async def _events(self, answer: Answer, submitted: Submitted, began: float) -> AsyncIterator[str]:
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
        offsets, begun, left = [0] * len(handles), set[int](), len(handles)
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
                if index not in begun:
                    begun.add(index)
                    self._metrics.ttft.observe(perf_counter() - began)
                if piece := answer.piece(index, span, offsets[index], submitted.logprobs):
                    yield _event(piece)
                offsets[index] += len(span.text)
            found = [await handle for handle in handles]
            if answer.with_usage:
                yield _event(answer.usage(found, submitted.prompts))
            if cut := _cut_off(found):
                yield _event(cut.body)
            yield _DONE
            self._metrics.duration.observe(perf_counter() - began)
        except OutriderError as error:  # the answer has begun: the error is its last event
            yield _event(told(error).body)
            yield _DONE
        finally:
            for handle in handles:
                handle.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
