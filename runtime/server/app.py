"""Routes of the server. Each request is one or several of `Runtime.submit`, cancelled when its client goes away."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from time import time
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from outrider.plans.errors import OutriderError
from outrider.runtime.server.answers import Answer
from outrider.runtime.server.config import ServerConfig
from outrider.runtime.server.errors import ApiError, as_api_error, client_gone, invalid
from outrider.runtime.server.generation_request import ChatRequest, CompletionRequest
from outrider.runtime.server.guard import Guard
from outrider.runtime.server.metrics import Metrics
from outrider.runtime.server.observer import Endings, Observer, Tracer
from outrider.runtime.server.readiness import Phase, Readiness
from outrider.runtime.server.record import Record, path_of, refuse
from outrider.runtime.server.refusals import refusal
from outrider.runtime.server.request_log import log_fault, log_request
from outrider.runtime.server.served import ServedRuntime, drain
from outrider.runtime.server.serving import Serving
from outrider.runtime.server.submitting import Submitter
from outrider.runtime.server.token_budgets import TokenBudgets

_COMPLETIONS = "/v1/completions"
_THIS_MACHINE = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"  # origins of pages
_LOG = logging.getLogger("outrider")


def make_app(
    runtime: ServedRuntime, config: ServerConfig, *, readiness: Readiness | None = None, tracing: Tracer | None = None
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
    serving = Serving(submitter, None if config.tokens_per_minute is None else TokenBudgets(config.tokens_per_minute))

    @app.exception_handler(ApiError)
    @app.exception_handler(OutriderError)
    async def ours(request: Request, error: ApiError | OutriderError) -> JSONResponse:
        return refuse(request, error if isinstance(error, ApiError) else as_api_error(error))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        return refuse(request, _named(request, error))

    @app.exception_handler(RequestValidationError)
    async def wrong_body(request: Request, error: RequestValidationError) -> JSONResponse:
        model = CompletionRequest if path_of(request.scope) == _COMPLETIONS else ChatRequest
        return refuse(request, invalid(400, None, refusal(error.errors(), error.body, model)))

    app.add_middleware(Guard, config=config, readiness=readiness)
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
