"""Requests of a batch, answered by a runtime: many at once, and each with the bytes that it would have alone."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from queue import SimpleQueue
from typing import Any

from outrider.plans.errors import BusyError, ClosedError, PlanError, RequestError, UnavailableError
from outrider.plans.manifest import rejects
from outrider.runtime.batch.body import asked_of
from outrider.runtime.batch.folder import BatchFolder
from outrider.runtime.batch.requests import BatchRequest
from outrider.runtime.generation import FinishReason
from outrider.runtime.handle import Handle
from outrider.runtime.runtime import Runtime
from outrider.runtime.server.answers import Answer
from outrider.runtime.server.errors import ApiError, as_api_error
from outrider.runtime.server.generation_request import ChatRequest, CompletionRequest
from outrider.runtime.server.stamps import DerivedStamps
from outrider.runtime.server.submitting import Submission, Submitter

MOST_CHOICES = 1024
"""Most choices of one request: prompts times n."""


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """A result line of OpenAI's shape, as a dictionary, and what it took: tokens of its prompts and its choices.

    `number` is the request's place among those that were asked, from 0.
    """

    number: int
    request: BatchRequest
    result: dict[str, Any]
    prompt_tokens: int = 0
    new_tokens: int = 0

    @property
    def line(self) -> bytes:
        return json.dumps(self.result, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


@dataclass(slots=True)
class _RunningRequest:
    number: int
    request: BatchRequest
    asked: CompletionRequest | ChatRequest
    submitted: Submission
    stamps: DerivedStamps
    left: int  # choices that have not ended


class Answering:
    """Answers requests for the model of that name; `created` is the time in answers, in seconds since 1970.

    An answer is a function of the plan, the request with its id, and these: not of the drafter, the cache, the company
    or the clock. So drafters by rejection and lossy partial KV, whose tokens depend on where rounds end, are refused,
    and a request that names no drafter, or no mode of partial KV, gets one that keeps to this.
    """

    def __init__(self, runtime: Runtime, model: str | None, created: int) -> None:
        """For a runtime of `load_for_batches`. Raises RequestError where its scheduler cannot be as it is to be."""
        manifest = runtime.manifest
        runtime.start()  # wrong settings are to fail here, not in every request
        self.runtime, self.model, self._created = runtime, model or manifest.name, created
        self._submitter = Submitter(runtime, self.model, MOST_CHOICES)
        self._rejecting = {drafter.name for drafter in manifest.drafters if rejects([drafter])}
        self._drafter = next((d.name for d in manifest.drafters if d.name not in self._rejecting), "none")
        self._lossy = manifest.partial_kv is not None and manifest.partial_kv.mode == "lossy"
        # While as many run as can, as many wait: no place stays empty until this thread has looked.
        self._width = 2 * (runtime.scheduler_config.max_running or manifest.target.branches)

    def answer(self, requests: Iterable[BatchRequest]) -> Generator[BatchAnswer, None, None]:
        """Answers as they come, not in the order of the requests. Closed before its end, it cancels what runs.

        A request that fails while it runs is repeated alone after all others; if it fails again, that is its result.
        Raises PlanError, naming the request, if the runtime then fails at a request of one token too.
        """
        ended: SimpleQueue[int] = SimpleQueue()
        waiting, under_way, choices = enumerate(requests), dict[int, _RunningRequest](), 0
        failed: list[_RunningRequest] = []
        try:
            while True:
                while choices < self._width and (following := next(waiting, None)) is not None:
                    begun = self._begin(*following)
                    if isinstance(begun, BatchAnswer):
                        yield begun
                        continue
                    under_way[begun.number] = begun
                    choices += begun.left
                    for handle in begun.submitted.handles:
                        handle.when_done(partial(ended.put, begun.number))
                if not under_way:
                    break
                number = ended.get()
                choices -= 1
                under_way[number].left -= 1
                if under_way[number].left:
                    continue
                over = under_way.pop(number)
                if any(_is_fault(handle.error) for handle in over.submitted.handles):
                    failed.append(over)
                else:
                    yield self._end(over)
            for each in failed:
                repeated = self._begin(each.number, each.request)
                if isinstance(repeated, _RunningRequest):
                    under_way[repeated.number] = repeated
                    fault = next(filter(_is_fault, map(_wait_for_error, repeated.submitted.handles)), None)
                    if fault is not None and not self._works():
                        raise PlanError(f"The request {each.request.custom_id!r} cannot be answered: {fault}") from None
                    repeated = self._end(under_way.pop(repeated.number))
                yield repeated
        finally:
            for each in under_way.values():
                for handle in each.submitted.handles:
                    handle.cancel()

    def _works(self) -> bool:
        """Whether the runtime generates a token."""
        return _wait_for_error(self.runtime.submit([0], max_new_tokens=1, drafter="none", remember=False)) is None

    def _begin(self, number: int, request: BatchRequest) -> _RunningRequest | BatchAnswer:
        stamps = DerivedStamps(request.custom_id, self._created)
        try:
            asked = self._settled(asked_of(request.text, self.model), stamps)
            submitted = self._submitter.submit(asked)
        except Exception as error:  # of any class: other requests must not fail with this one
            return self._refused(number, request, stamps, error)
        return _RunningRequest(number, request, asked, submitted, stamps, len(submitted.handles))

    def _settled(
        self, asked: CompletionRequest | ChatRequest, stamps: DerivedStamps
    ) -> CompletionRequest | ChatRequest:
        """The same with what it leaves open. Raises RequestError for what no batch can keep to."""
        if asked.drafter in self._rejecting:
            raise RequestError(
                f"drafter is {asked.drafter!r}, which is accepted by rejection: tokens would depend on what runs "
                "beside the request; ask for another drafter, or none."
            )
        if asked.partial_kv == "lossy":
            raise RequestError(
                'partial_kv is "lossy": tokens would depend on what runs beside the request; pass "lossless" or "off".'
            )
        settled: dict[str, object] = {}
        if asked.seed is None:
            settled["seed"] = stamps.seed
        if asked.drafter is None and self._rejecting:
            settled["drafter"] = self._drafter
        if asked.partial_kv is None and self._lossy:
            settled["partial_kv"] = "off"
        return asked.model_copy(update=settled)

    def _refused(self, number: int, request: BatchRequest, stamps: DerivedStamps, error: Exception) -> BatchAnswer:
        """The result of a failed request. Raises PlanError if the runtime takes no more requests."""
        if isinstance(error, BusyError | ClosedError | UnavailableError):
            raise PlanError(f"The request {request.custom_id!r} cannot be answered: {error}") from None
        found = error if isinstance(error, ApiError) else as_api_error(error)
        return BatchAnswer(number, request, _result(request, stamps, found.status, found.body))

    def _end(self, ended: _RunningRequest) -> BatchAnswer:
        request, asked, submitted, stamps = ended.request, ended.asked, ended.submitted, ended.stamps
        try:
            found = [handle.result() for handle in submitted.handles]
        except Exception as error:
            return self._refused(ended.number, request, stamps, error)
        if any(each.finish_reason is FinishReason.CANCELLED for each in found):
            raise PlanError(f"The request {request.custom_id!r} was cut off: the runtime was closed meanwhile.")
        chat = isinstance(asked, ChatRequest)
        answer = Answer(self.model, self.runtime, chat=chat, stamps=stamps, costs=False)
        answer.describe(submitted, asked.drafter)
        body = answer.whole(found, submitted.prompts, submitted.logprobs)
        tokens = body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]
        return BatchAnswer(ended.number, request, _result(request, stamps, 200, body), *tokens)


def _wait_for_error(handle: Handle) -> Exception | None:
    """The error that ended the request, if one did."""
    with suppress(Exception):
        handle.result()
    return handle.error


def _is_fault(error: Exception | None) -> bool:
    """Whether an error is the runtime's, and not a refusal of the request."""
    return error is not None and not isinstance(error, RequestError)


def _result(request: BatchRequest, stamps: DerivedStamps, status: int, body: dict[str, Any]) -> dict[str, Any]:
    """A line of OpenAI's output files."""
    return {
        "id": f"batch_req_{stamps.token()}",
        "custom_id": request.custom_id,
        "response": {"status_code": status, "request_id": f"req_{stamps.token()}", "body": body},
        "error": None,
    }


@dataclass(frozen=True)
class FinishedRequests:
    """Finished requests, their new tokens, and when work on them began (`time.time()`)."""

    requests: int
    new_tokens: int
    began: float


def run_blocks(
    answering: Answering, folder: BatchFolder, blocks: Mapping[int, Sequence[BatchRequest]]
) -> Generator[BatchAnswer, None, None]:
    """Answer blocks by their numbers, and write each to the folder once it is whole; yields answers as they come.

    Raises OSError where the folder cannot be written, and what `Answering.answer` raises.
    """
    requests = list(chain.from_iterable(blocks.values()))
    block_of = [number for number, block in blocks.items() for _ in block]
    first = {number: start for start, number in reversed(list(enumerate(block_of)))}
    lines = dict[int, bytes]()
    left = {number: len(block) for number, block in blocks.items()}
    for answered in answering.answer(requests):
        block = block_of[answered.number]
        lines[answered.number] = answered.line
        left[block] -= 1
        if not left[block]:
            start = first[block]
            folder.write(block, [lines.pop(place) for place in range(start, start + len(blocks[block]))])
        yield answered
