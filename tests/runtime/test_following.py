"""A request that is followed from replica to replica, by streams that end as a test has it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider import Runtime, SchedulerConfig
from outrider.plans.errors import BusyError, ClosedError, PlanError, RequestError, UnavailableError
from outrider.runtime.generation import FinishReason, Generation, Span
from outrider.runtime.handle import Handle
from outrider.runtime.ray_serve.following import Acknowledgement, Failover, LostError, Message, ReplicaRequest
from outrider.runtime.ray_serve.remote_runtime import RemoteRuntime
from outrider.runtime.ray_serve.replica import Callers, _messages, joined
from outrider.runtime.scheduler_stats import SchedulerStats

Patch = pytest.MonkeyPatch
PROMPT = "def main(x): return"
SAMPLED: dict[str, Any] = {"temperature": 0.9, "seed": 3, "max_new_tokens": 40, "ignore_eos": True, "logprobs": 1}


class Replicas:
    """One runtime after streams; each is lost, or ends otherwise, as its turn in `ends` says.

    An end is the number of spans that come before it, and the error that it is; None: it ends the request there.
    """

    kind: type[Stream] | None = None
    kernels: Mapping[str, str] = {}

    def __init__(self, runtime: Runtime, ends: Sequence[tuple[int, Exception | None]]) -> None:
        self.runtime, self.ends = runtime, list(ends)
        self.sent: list[ReplicaRequest] = []
        self.cancelled = 0

    def __call__(self, sent: ReplicaRequest) -> Stream:
        self.sent.append(sent)
        return (self.kind or Stream)(self, sent, *(self.ends.pop(0) if self.ends else (10**6, None)))


class Stream:
    def __init__(self, replicas: Replicas, sent: ReplicaRequest, after: int, error: Exception | None) -> None:
        self._replicas, self._sent, self._after, self._error = replicas, sent, after, error

    async def __aiter__(self) -> AsyncIterator[Message]:
        if self._after < 0:  # nobody takes it
            if self._error is None:
                await asyncio.sleep(1000)
            else:
                raise self._error
        handle = self._replicas.runtime.submit(self._sent.token_ids, deadline=self._sent.deadline, **self._sent.options)
        yield Acknowledgement(self._replicas.kernels)
        place = 0
        async for span in handle:
            if place == self._after:
                handle.cancel()
                if self._error is not None:
                    raise self._error
                yield [Span([], "", result=replace(await handle, finish_reason=FinishReason.CANCELLED))]
                return
            yield [span]
            place += 1

    def cancel(self) -> None:
        self._replicas.cancelled += 1


@pytest.fixture(scope="module")
def runtime(branch_plan: Path) -> Runtime:
    return Runtime.load(branch_plan, threads=1)


def follow(
    runtime: Runtime,
    ends: Sequence[tuple[int, Exception | None]],
    options: dict[str, Any] = SAMPLED,
    failover: Failover | None = None,
    **how: Any,
) -> tuple[Generation, list[Span], Replicas]:
    """The result of a request whose replicas end like that, its spans, and the replicas."""
    replicas = Replicas(runtime, ends)

    async def run() -> tuple[Generation, list[Span]]:
        remote = RemoteRuntime(runtime._plan, replicas, SchedulerConfig(), failover or Failover(patience=60.0))
        (handle,) = remote.submit_all([(PROMPT, options)], **how)  # type: ignore[list-item]
        spans = [span async for span in handle]
        found = await handle
        assert await asyncio.to_thread(remote.close, timeout=60.0)
        return found, spans

    found, spans = asyncio.run(run())
    return found, spans, replicas


LOST = LostError("the test ends it")
ENDS: dict[str, list[tuple[int, Exception | None]]] = {
    "undisturbed": [],
    "before it is taken": [(-1, LOST), (-1, ClosedError("closing"))],
    "before its first token": [(0, LOST)],
    "in its middle": [(5, LOST)],
    "again and again": [(3, LOST), (0, LOST), (-1, BusyError("full")), (7, LOST), (1, LOST)],
    "cut off there": [(4, None), (2, None)],
    "by a failed pass": [(4, PlanError("A round failed: MemoryError()."))],
}


@pytest.mark.parametrize("drafter", ["none", "head"])
@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
def test_it_continues_where_it_stood(runtime: Runtime, ends: list[tuple[int, Exception | None]], drafter: str) -> None:
    expected = runtime.generate(PROMPT, **SAMPLED)
    found, spans, replicas = follow(runtime, ends, {**SAMPLED, "drafter": drafter})
    assert (found.token_ids, found.text, found.logprobs) == (expected.token_ids, expected.text, expected.logprobs)
    assert found.finish_reason is FinishReason.LENGTH
    assert (found.stats.prompt_tokens, found.stats.new_tokens) == (expected.stats.prompt_tokens, 40)
    assert 0 < found.stats.ttft_ms < found.stats.total_ms
    assert [token for span in spans for token in span.token_ids] == expected.token_ids
    assert "".join(span.text for span in spans) == expected.text
    assert [each for span in spans for each in span.logprobs] == expected.logprobs
    assert len(replicas.sent) == len(ends) + 1
    assert replicas.cancelled == len(replicas.sent)


class CutOff(Stream):
    """What the first replica sends of a request that it cuts off after five tokens; the next one continues."""

    async def __aiter__(self) -> AsyncIterator[Message]:
        first = len(self._replicas.sent) == 1
        options = {**self._sent.options, **({"max_new_tokens": 5} if first else {})}
        async for spans in _messages(self._replicas.runtime.submit(self._sent.token_ids, **options)):
            if first and spans[-1].result is not None:
                spans[-1].result = replace(spans[-1].result, finish_reason=FinishReason.CANCELLED)
            yield spans


@pytest.mark.parametrize("seed", range(4))
def test_what_was_held_back_at_the_cut_comes_once(runtime: Runtime, monkeypatch: Patch, seed: int) -> None:
    """A beginning of a stop string, or of a character."""
    monkeypatch.setattr(Replicas, "kind", CutOff)
    options = {**SAMPLED, "seed": seed, "drafter": "none"}
    until_cut = runtime.generate(PROMPT, **{**options, "max_new_tokens": 5}).text
    options["stop"] = [until_cut[-1] + "\0"]
    found, spans, replicas = follow(runtime, [], options)
    assert len(replicas.sent) == 2
    assert found.text == runtime.generate(PROMPT, **options).text
    assert "".join(span.text for span in spans) == found.text


def test_the_kernels_of_the_first_tokens_are_sent_on(runtime: Runtime, monkeypatch: Patch) -> None:
    monkeypatch.setattr(Replicas, "kernels", {"processor": "A"})
    _, _, replicas = follow(runtime, [(3, LOST)])
    assert [dict(sent.kernels) for sent in replicas.sent] == [{}, {"processor": "A"}]


FULL = (-1, BusyError("all are full"))


@pytest.mark.parametrize(
    ("ends", "failover", "error", "said"),
    [
        ([(2, LOST)] * 3, Failover(losses=2), UnavailableError, "lost 3 replicas, the last one as the test ends it"),
        ([(-1, None)], Failover(patience=0.3), UnavailableError, r"No replica has taken the request in 0\.3 s"),
        ([FULL] * 9, Failover(patience=0.3), UnavailableError, r"No replica has taken the request in 0\.3 s"),
        ([(2, RequestError("the rules exclude all"))], None, RequestError, "the rules exclude all"),
    ],
    ids=["lost too often", "not taken", "all full", "a mistake is no loss"],
)
def test_a_request_that_no_replica_finishes(
    runtime: Runtime, ends: Any, failover: Failover | None, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        follow(runtime, ends, failover=failover)


@pytest.mark.parametrize("ends", [[(-1, None)], [(-1, BusyError("full"))] * 9, [(-1, LOST)] * 9], ids=str)
def test_the_deadline_does_not_start_anew(runtime: Runtime, ends: list[tuple[int, Exception | None]]) -> None:
    found, _, replicas = follow(runtime, [(2, LOST), *ends], deadline=2.0, failover=Failover(losses=99))
    assert (found.finish_reason, found.stats.first_span) == (FinishReason.DEADLINE, 1)
    assert 0 < len(found.token_ids) < 40
    assert 0 < found.stats.ttft_ms <= found.stats.total_ms
    deadlines = [sent.deadline for sent in replicas.sent]
    assert all(each is not None for each in deadlines)
    assert deadlines == sorted(deadlines, reverse=True)  # type: ignore[type-var]


def test_tokens_that_depend_on_rounds_stay_where_they_are(everything: Runtime) -> None:
    """By rejection: begun again while nothing was given out, else an error that says so."""
    options = {**SAMPLED, "drafter": "classical"}
    found, _, replicas = follow(everything, [(0, LOST)], options)
    assert len(found.token_ids) == 40
    assert len(replicas.sent) == 2
    with pytest.raises(UnavailableError, match=r"no other can continue .* 'classical', which is accepted by rejection"):
        follow(everything, [(2, LOST)], options)


class Stopped(Stream):
    """A replica that stops after its first span."""

    async def __aiter__(self) -> AsyncIterator[Message]:
        handle = self._replicas.runtime.submit(self._sent.token_ids, **self._sent.options)
        yield Acknowledgement(self._replicas.kernels)
        async for span in handle:
            yield [span]
            break
        await asyncio.sleep(1000)


def test_a_replica_that_stops_is_left_at_the_deadline(runtime: Runtime, monkeypatch: Patch) -> None:
    monkeypatch.setattr(Replicas, "kind", Stopped)
    found, _, _ = follow(runtime, [], deadline=1.0)
    assert found.finish_reason is FinishReason.DEADLINE
    assert 0 < len(found.token_ids) < 40


def test_a_caller_that_cancels_is_heard_at_once(runtime: Runtime, monkeypatch: Patch) -> None:
    async def run(ends: list[tuple[int, Exception | None]], tokens: int) -> Generation:
        replicas = Replicas(runtime, ends)
        remote = RemoteRuntime(runtime._plan, replicas, SchedulerConfig(), Failover(patience=60.0))
        (handle,) = remote.submit_all([(PROMPT, SAMPLED)])  # type: ignore[list-item]
        if tokens:
            async for _ in handle:
                break
        handle.cancel()
        found = await asyncio.wait_for(handle._whole(), 30.0)
        assert replicas.cancelled == len(replicas.sent)
        assert found.finish_reason is FinishReason.CANCELLED
        return found

    assert asyncio.run(run([(-1, None)], 0)).token_ids == []
    monkeypatch.setattr(Replicas, "kind", Stopped)
    assert 0 < len(asyncio.run(run([], 1)).token_ids) < 40


def test_waiting_requests_have_limits_and_are_counted(runtime: Runtime) -> None:
    async def run() -> None:
        config = SchedulerConfig(max_waiting=3, max_waiting_per_client=2)
        remote = RemoteRuntime(runtime._plan, Replicas(runtime, [(-1, None)] * 3), config)
        remote.counts.update({"a": SchedulerStats(waiting=2, refused=1)})
        handles = remote.submit_all([(PROMPT, {}), (PROMPT, {})], client="one")
        with pytest.raises(BusyError, match=r"Too many requests of this client wait: 2 already, and its share .* is 2"):
            remote.submit_all([(PROMPT, {})], client="one")
        handles += remote.submit_all([(PROMPT, {})], client="another")
        with pytest.raises(BusyError, match="The queue is full: 3 requests wait already, and 2 more"):
            remote.submit_all([(PROMPT, {})] * 2)
        with pytest.raises(RequestError, match="4 requests are made at once, and at most 3 can be; make fewer"):
            remote.submit_all([(PROMPT, {})] * 4)
        assert (remote.scheduler_stats.waiting, remote.scheduler_stats.refused) == (5, 4)
        assert not await asyncio.to_thread(remote.close, timeout=0.1)
        with pytest.raises(ClosedError):
            remote.submit_all([(PROMPT, {})])
        assert await asyncio.to_thread(remote.close, drain=False, timeout=60.0)
        assert [(await handle).finish_reason for handle in handles] == [FinishReason.CANCELLED] * 3
        assert remote.scheduler_stats.waiting == 2

    asyncio.run(run())


def test_closing_while_a_request_comes_in_cancels_it_too(runtime: Runtime) -> None:
    async def run() -> Generation:
        remote = RemoteRuntime(runtime._plan, Replicas(runtime, [(-1, None)]), SchedulerConfig())
        loop, closing = remote._loop, threading.Thread(target=remote.close, kwargs={"drain": False, "timeout": 30.0})

        def closed_meanwhile(*call: Any, **how: Any) -> None:
            remote._loop = loop
            closing.start()
            closing.join(0.1)
            loop.call_soon_threadsafe(*call, **how)

        remote._loop = SimpleNamespace(call_soon_threadsafe=closed_meanwhile, create_task=loop.create_task)  # type: ignore[assignment]
        (handle,) = remote.submit_all([(PROMPT, {})])
        return await asyncio.wait_for(handle._whole(), 30.0)

    assert asyncio.run(run()).finish_reason is FinishReason.CANCELLED


def test_a_request_that_a_replica_has_does_not_wait(runtime: Runtime) -> None:

    async def run() -> None:
        remote = RemoteRuntime(runtime._plan, Replicas(runtime, []), SchedulerConfig(2, max_waiting=1))
        handles = remote.submit_all([(PROMPT, {"max_new_tokens": 100, "ignore_eos": True, "drafter": "none"})])
        handles += remote.submit_all([(PROMPT, {})] * 2)
        with pytest.raises(BusyError):
            remote.submit_all([(PROMPT, {})])
        async for _ in handles[0]:
            break
        while remote.scheduler_stats.waiting:
            await asyncio.sleep(0.01)
        handles += remote.submit_all([(PROMPT, {})])
        for handle in handles:
            await handle
        assert remote.scheduler_stats.refused == 1

    asyncio.run(run())


def test_requests_end_with_their_callers() -> None:
    async def run() -> set[int]:
        dead: set[str] = set()
        callers = Callers(lambda name: name not in dead, every=0.01)
        cancelled: set[int] = set()
        handles = [Handle(partial(cancelled.add, place)) for place in range(3)]
        with callers.serving("a", handles[0]), callers.serving("b", handles[1]), callers.serving(None, handles[2]):
            await asyncio.sleep(0.1)
            assert cancelled == set()
            dead.add("a")
            async with asyncio.timeout(60):
                while not cancelled:
                    await asyncio.sleep(0.01)
        return cancelled

    assert asyncio.run(run()) == {0}


def test_spans_that_share_a_message_become_one() -> None:
    result = object()
    spans = [Span([1], "a"), Span([2], "b"), Span([3], "c", tentative=True), Span([3, 4], "d"), Span([], "")]
    spans[-1].result = result  # type: ignore[assignment]
    found = joined([*spans, LOST])
    assert [(span.token_ids, span.text, span.tentative) for span in found] == [
        ([1, 2], "ab", False), ([3], "c", True), ([3, 4], "d", False),
    ]  # fmt: skip
    assert [span.result for span in found] == [None, None, result]
