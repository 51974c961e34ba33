"""Routes of the server. Each request is one or several of `Runtime.submit`; whoever goes away cancels his own."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
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

from plans.errors import BusyError, OutriderError, RequestError
from runtime.generation import Generation, Span
from runtime.handle import Handle
from runtime.request import Options
from runtime.runtime import Runtime
from runtime.server.answers import Answer, error_body
from runtime.server.asked import ChatAsked, CompletionAsked
from runtime.server.metrics import Metrics

_LOG = logging.getLogger("outrider")
_GONE = 0.25  # seconds between looks whether a client is still there that waits for the whole answer


@dataclass(frozen=True)
class ServerConfig:
    """`model` is the name that clients ask for. Bodies of more than `max_body_bytes` are refused.

    When the application shuts down, requests have `drain_seconds` to end, and `cache_file` gets what the prefix cache
    holds then. Servers that wait for connections before that need a limit of their own.
    """

    model: str
    api_key: str | None = None
    max_body_bytes: int = 2**20
    drain_seconds: float = 30.0
    cache_file: Path | None = None


class ApiError(Exception):
    """What a client gets in place of an answer."""

    def __init__(self, status: int, message: str, kind: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.body = status, error_body(message, kind, code)


def make_app(runtime: Runtime, config: ServerConfig) -> FastAPI:
    """The application. When it shuts down, requests are finished for some seconds, then cancelled."""
    created, metrics = int(time()), Metrics(runtime)

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
    serving = _Serving(runtime, config, metrics)

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> JSONResponse:
        return JSONResponse(error.body, error.status)

    @app.exception_handler(OutriderError)
    async def outrider_error(_: Request, error: OutriderError) -> JSONResponse:
        told = _told(error)
        return JSONResponse(told.body, told.status)

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse(error_body(str(error.detail), "invalid_request_error"), error.status_code)

    @app.exception_handler(RequestValidationError)
    async def wrong_body(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:]) or "the body"
        return JSONResponse(error_body(f"{where}: {first['msg']}", "invalid_request_error"), 400)

    app.add_middleware(_Guard, config=config)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok"}

    @app.get("/metrics")
    async def measured() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(config.model, created)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        serving.check_model(name)
        return _model(config.model, created)

    @app.post("/v1/completions")
    async def completions(asked: CompletionAsked, request: Request) -> Response:
        serving.check_model(asked.model)
        asked.check()
        options = asked.options(asked.max_tokens, asked.logprobs)
        answer = Answer("cmpl", "text_completion", "text_completion", config.model, runtime, chat=False)
        wanted = [(prompt, own) for prompt in asked.prompts for own in options]
        return await serving.answer(request, answer, wanted, asked)

    @app.post("/v1/chat/completions")
    async def chat(asked: ChatAsked, request: Request) -> Response:
        serving.check_model(asked.model)
        prompt = await run_in_threadpool(_chat_prompt, runtime, asked)
        limit = max(1, runtime.manifest.target.context - len(prompt)) if asked.limit is None else asked.limit
        options = asked.options(limit, (asked.top_logprobs or 0) if asked.logprobs else None)
        answer = Answer("chatcmpl", "chat.completion", "chat.completion.chunk", config.model, runtime, chat=True)
        return await serving.answer(request, answer, [(prompt, own) for own in options], asked)

    return app


class _Guard:
    """Refuses wrong keys and large bodies, before anything is read.

    Not one of FastAPI's own middlewares: behind those, nobody hears that a client has gone.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app, self._config = app, config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = self._refuse(Request(scope)) if scope["type"] == "http" else None
        await (refused or self._app)(scope, receive, send)

    def _refuse(self, request: Request) -> Response | None:
        key, most = self._config.api_key, self._config.max_body_bytes
        if request.url.path.startswith("/v1/") and key is not None:
            given = request.headers.get("authorization", "").removeprefix("Bearer ")
            if not secrets.compare_digest(given.encode(), key.encode()):
                wrong = error_body("The API key is missing or wrong.", "authentication_error", "invalid_api_key")
                return JSONResponse(wrong, 401)
        length = request.headers.get("content-length", "")
        if request.method == "POST" and (not length.isdigit() or "transfer-encoding" in request.headers):
            return JSONResponse(error_body("The request does not say its length.", "invalid_request_error"), 411)
        if request.method == "POST" and int(length) > most:
            large = f"The body has {length} bytes; at most {most} are taken."
            return JSONResponse(error_body(large, "invalid_request_error"), 413)
        return None


def _chat_prompt(runtime: Runtime, asked: ChatAsked) -> list[int]:
    text = runtime.tokenizer.apply_chat_template([message.plain() for message in asked.messages])
    return runtime.tokenizer.encode(text, add_special_tokens=False)


def _model(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "outrider"}


def _told(error: OutriderError) -> ApiError:
    if isinstance(error, BusyError):
        return ApiError(429, str(error), "rate_limit_error", "too_many_requests")
    if isinstance(error, RequestError):
        code = "context_length_exceeded" if "the plan's context is" in str(error) else None
        return ApiError(400, str(error), "invalid_request_error", code)
    return ApiError(500, str(error), "server_error")


class _Serving:
    """Submits what is asked, and gives it back whole or in pieces."""

    def __init__(self, runtime: Runtime, config: ServerConfig, metrics: Metrics) -> None:
        self._runtime, self._config, self._metrics = runtime, config, metrics

    def check_model(self, name: str) -> None:
        if name != self._config.model:
            message = f"There is no model {name!r}; this server has {self._config.model!r}."
            raise ApiError(404, message, "invalid_request_error", "model_not_found")

    async def answer(
        self,
        request: Request,
        answer: Answer,
        wanted: list[tuple[str | list[int], Options]],
        asked: CompletionAsked | ChatAsked,
    ) -> Response:
        began = perf_counter()
        handles = await run_in_threadpool(self._submit, wanted, asked)
        logprobs = asked.logprobs is not None and asked.logprobs is not False
        prompts = len(wanted) // asked.n
        if asked.stream:
            events = self._events(answer, handles, prompts, logprobs, asked.include_usage, began)
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        found = await self._whole(request, handles, began)
        return JSONResponse(answer.whole(found, prompts, logprobs))

    def _submit(
        self, wanted: list[tuple[str | list[int], Options]], asked: CompletionAsked | ChatAsked
    ) -> list[Handle]:
        handles: list[Handle] = []
        try:
            for prompt, options in wanted:
                handles.append(
                    self._runtime.submit(prompt, priority=asked.priority, deadline=asked.deadline, **options)
                )
        except BaseException:
            for handle in handles:
                handle.cancel()
            raise
        return handles

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
        for each in found:
            self._metrics.ttft.observe((each.stats.queued_ms + each.stats.ttft_ms) / 1000)
        self._metrics.duration.observe(perf_counter() - began)
        return list(found)

    async def _events(
        self, answer: Answer, handles: list[Handle], prompts: int, logprobs: bool, with_usage: bool, began: float
    ) -> AsyncIterator[str]:
        """Server-sent events of all choices as they come. Left unfinished, it cancels them."""
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
                    yield _event(answer.ending(index, await handles[index]))
                    continue
                if index not in begun:
                    begun.add(index)
                    self._metrics.ttft.observe(perf_counter() - began)
                yield _event(answer.piece(index, span, offsets[index], logprobs))
                offsets[index] += len(span.text)
            if with_usage:
                yield _event(answer.usage([await handle for handle in handles], prompts))
            yield "data: [DONE]\n\n"
            self._metrics.duration.observe(perf_counter() - began)
        except OutriderError as error:  # the answer has begun: the error is its last event
            yield _event(_told(error).body)
        finally:
            for handle in handles:
                handle.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
