"""Ids, token budgets, statistics of drafts and observers of the server."""

from __future__ import annotations

import asyncio
import logging
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.responses import PlainTextResponse
from starlette.types import Message

from outrider import Runtime
from outrider.plans.errors import BusyError, ClosedError, OutriderError, UnavailableError
from outrider.runtime.server.answers import longest_path, speculation
from outrider.runtime.server.errors import ApiError, as_api_error
from outrider.runtime.server.observer import Endings, Observer
from outrider.runtime.server.record import id_of
from outrider.runtime.server.request_log import log_request
from outrider.runtime.server.token_budgets import Reservation, TokenBudgets, _duration
from outrider.runtime.server.tracing import Tracing
from outrider.runtime.stats import Stats


@pytest.mark.parametrize("given", ["a", "6f1e-4a", "trace/7:9+a=b@c.d", "x" * 128])
def test_a_sane_id_is_used(given: str) -> None:
    assert id_of([(b"host", b"x"), (b"x-request-id", given.encode())]) == given


@pytest.mark.parametrize("given", [b"", b"-a", b"a b", b"a\x1b[2J", b"\xff", b"x" * 129, b"a\n", b'"', b"a,b"])
def test_any_other_is_replaced(given: bytes) -> None:
    found = {id_of([(b"x-request-id", given)]), id_of([(b"x-request-id", b"one"), (b"x-request-id", b"two")])}
    assert [(each[:4], len(each)) for each in found] == [("req_", 36)] * 2


@pytest.mark.parametrize(
    ("error", "status", "code", "again"),
    [
        (BusyError, 429, "too_many_requests", "1"),
        (UnavailableError, 503, "unavailable", "5"),
        (ClosedError, 503, "shutting_down", "5"),
    ],
)
def test_clients_are_told_when_to_try_again(error: type[OutriderError], status: int, code: str, again: str) -> None:
    found = as_api_error(error("busy"))
    assert (found.status, found.code, found.headers) == (status, code, {"Retry-After": again})


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_bucket_fills_up_within_a_minute_and_no_further() -> None:
    clock = Clock()
    budgets = TokenBudgets(600, clock)
    budgets.reserve("key 0", 100, 500)
    assert budgets.headers("key 1")["x-ratelimit-remaining-tokens"] == "600"  # of another client
    clock.now += 6.05
    assert budgets.headers("key 0")["x-ratelimit-remaining-tokens"] == "60"
    clock.now += 3600
    assert list(budgets.headers("key 0").values()) == ["600", "600", "0ms"]


def test_unused_tokens_are_given_back_once() -> None:
    budgets = TokenBudgets(600, Clock())
    reservation = budgets.reserve("key 0", 10, 290)
    reservation.settle(30)
    reservation.settle(0)
    assert budgets.headers("key 0")["x-ratelimit-remaining-tokens"] == "570"
    other = budgets.reserve("key 0", 1, 1)
    other.settle(50)  # more than it asked for, which cannot be
    assert budgets.headers("key 0")["x-ratelimit-remaining-tokens"] == "568"


def test_a_refusal_says_how_long_to_wait_and_that_is_enough() -> None:
    clock = Clock()
    budgets = TokenBudgets(100, clock)
    budgets.reserve("key 0", 50, 40)
    with pytest.raises(ApiError, match=r"take 21 tokens \(prompt: 20, new: at most 1\); of its 100 .* 10 left") as no:
        budgets.reserve("key 0", 20, 1)
    assert (no.value.status, no.value.kind, no.value.code) == (429, "tokens", "rate_limit_exceeded")
    assert no.value.headers["Retry-After"] == "7"  # 11 tokens at 5 in 3 s
    clock.now += 7
    budgets.reserve("key 0", 20, 1)
    with pytest.raises(ApiError, match=r"may take 101 tokens .* a key has 100 a minute; ask for fewer by") as never:
        budgets.reserve("key 0", 1, 100)
    assert (never.value.headers["x-should-retry"], never.value.headers.get("Retry-After")) == ("false", None)


def test_no_order_of_threads_gives_a_client_more_than_its_bucket() -> None:
    budgets, taken = TokenBudgets(1000, Clock()), list[Reservation]()

    def take(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(200):
            try:
                taken.append(budgets.reserve("key 0", draw.randint(0, 20), 1))
            except ApiError:
                if draw.random() < 0.3 and taken:
                    taken.pop().settle(0)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(take, range(8)))
    left = int(budgets.headers("key 0")["x-ratelimit-remaining-tokens"])
    assert left == 1000 - sum(each.tokens for each in taken) >= 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.0101, "11ms"), (1, "1s"), (1.51, "1.6s"), (59.96, "1m0s"), (90.5, "1m30.5s"), (3600, "60m0s")],
)
def test_durations_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert _duration(seconds) == text


def stats(*by_accepted: int, drafted: int) -> Stats:
    """Statistics of rounds by how much they accepted."""
    accepted = sum(tokens * rounds for tokens, rounds in enumerate(by_accepted))
    return Stats(drafted=drafted, accepted=accepted, rounds=9, rounds_by_accepted=list(by_accepted))


def test_rounds_of_all_choices_are_added_up() -> None:
    assert speculation([stats(3, 0, 1, drafted=12), stats(1, 1, drafted=6), Stats(rounds=4)], 4) == {
        "mean_acceptance_length": 1 + 3 / 6,
        "draft_acceptance_rate": 3 / 18,
        "acceptance_histogram": [4, 1, 1, 0, 0],
        "num_spec_steps": 6,
        "num_accepted_draft_tokens": 3,
        "num_draft_tokens": 18,
        "num_spec_tokens": 4,
    }


@pytest.mark.parametrize(
    ("rounds", "longest", "expected"),
    [
        (stats(0, 0, 0, 2, drafted=8), 1, ([0, 0, 0, 2], 4.0)),  # partial KV's rounds confirm more than a draft
        (stats(5, drafted=10), 2, ([5, 0, 0], 1.0)),
        (Stats(rounds=7, new_tokens=7), 2, None),
        (stats(0, 0, 0, 2, drafted=8), 0, None),  # of a request without a drafter
    ],
)
def test_histograms(rounds: Stats, longest: int, expected: object) -> None:
    found = speculation([rounds], longest)
    assert (found and (found["acceptance_histogram"], found["mean_acceptance_length"])) == expected


@pytest.mark.parametrize(
    ("asked", "longest"),
    [("chain", 4), ("bushy", 3), ("mixed", 6), ("none", 0), (None, 6)],
)
def test_the_longest_draft_is_that_of_the_drafter_asked_for(toy: Runtime, asked: str | None, longest: int) -> None:
    assert longest_path(toy.manifest.drafters, asked) == longest


async def nothing() -> Message:
    return {"type": "http.disconnect"}


async def unread(_: Message) -> None:
    pass


@pytest.mark.parametrize("root", ["", "/v1", "/a/b/"])
def test_a_request_under_a_prefix_is_traced_and_its_probes_are_not_logged(
    root: str, caplog: pytest.LogCaptureFixture
) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing = Tracing(provider)
    application = Observer(PlainTextResponse("said"), Endings([tracing.end, log_request]), tracing.begin)

    async def ask(method: str, path: str) -> None:
        where = {"path": root.rstrip("/") + path, "root_path": root, "query_string": b"", "scheme": "http"}
        await application({"type": "http", "method": method, "headers": [], **where}, nothing, unread)

    with caplog.at_level(logging.DEBUG, "outrider.requests"):
        asyncio.run(ask("POST", "/v1/completions"))
        asyncio.run(ask("GET", "/health/ready"))
        asyncio.run(ask("GET", "/metrics"))
    (span,) = exporter.get_finished_spans()
    said = dict(span.attributes or {})
    assert (said["http.route"], said["url.path"]) == ("/v1/completions", root.rstrip("/") + "/v1/completions")
    assert [line.levelno for line in caplog.records] == [logging.INFO, logging.DEBUG, logging.DEBUG]
    assert caplog.records[0].__dict__["fields"]["path"] == "/v1/completions"
