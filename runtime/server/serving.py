"""Requests to answers: what is asked is submitted, and given back whole or in pieces."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from outrider.plans.errors import OutriderError
from outrider.runtime.generation import FinishReason, Generation, Span
from outrider.runtime.handle import Handle
from outrider.runtime.server.answers import Answer
from outrider.runtime.server.errors import ApiError, as_api_error, client_gone, shutting_down
from outrider.runtime.server.generation_request import ChatRequest, CompletionRequest
from outrider.runtime.server.record import Record, record_of
from outrider.runtime.server.submitting import Submission, Submitter
from outrider.runtime.server.token_budgets import TokenBudgets

_DONE = "data: [DONE]\n\n"
_T = TypeVar("_T")
_PREPARING_OF_A_KEY = 2  # of one key, so that large grammars of one leave room for the others'
_PREPARING = 4  # requests whose prompts are encoded at once: a large one takes a core, and memory
_GONE = 0.25  # seconds between looks whether a client is still there that waits for the whole answer


class Serving:
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


def _cut_off(found: Sequence[Generation]) -> ApiError | None:
    """The error for a client whose answer was cut off by the end of the server."""
    if all(each.finish_reason is not FinishReason.CANCELLED for each in found):
        return None
    return shutting_down(f"the answer was cut off after {sum(each.stats.new_tokens for each in found)} tokens")


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
