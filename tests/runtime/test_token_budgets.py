"""Token buckets by a clock of the test's own."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from outrider.runtime.server.errors import ApiError
from outrider.runtime.server.token_budgets import Reservation, TokenBudgets, _duration


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_bucket_fills_up_within_a_minute_and_no_further() -> None:
    clock = Clock()
    budgets = TokenBudgets(600, clock)
    budgets.reserve("key 0", 100, 500)
    assert budgets.headers("key 0")["x-ratelimit-remaining-tokens"] == "0"
    assert budgets.headers("key 0")["x-ratelimit-reset-tokens"] == "1m0s"
    assert budgets.headers("key 1")["x-ratelimit-remaining-tokens"] == "600"  # of another client
    clock.now += 6.05
    assert budgets.headers("key 0")["x-ratelimit-remaining-tokens"] == "60"
    clock.now += 3600
    assert budgets.headers("key 0") == {
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "600",
        "x-ratelimit-reset-tokens": "0ms",
    }


def test_what_a_request_does_not_use_is_given_back_once() -> None:
    budgets = TokenBudgets(600, Clock())
    reservation = budgets.reserve("key 0", 10, 290)
    reservation.settle(30)
    reservation.settle(0)
    assert budgets.headers("key 0")["x-ratelimit-remaining-tokens"] == "570"
    other = budgets.reserve("key 0", 1, 1)
    other.settle(50)  # more than it asked for, which cannot be
    assert budgets.headers("key 0")["x-ratelimit-remaining-tokens"] == "568"


def test_a_refusal_says_how_long_to_wait_and_waiting_so_long_is_enough() -> None:
    clock = Clock()
    budgets = TokenBudgets(100, clock)
    budgets.reserve("key 0", 50, 40)
    with pytest.raises(
        ApiError, match=r"may take 21 tokens \(prompt: 20, new: at most 1\); of its 100 .* 10 left"
    ) as no:
        budgets.reserve("key 0", 20, 1)
    assert (no.value.status, no.value.kind, no.value.code) == (429, "tokens", "rate_limit_exceeded")
    assert no.value.headers["Retry-After"] == "7"  # 11 tokens at 5 in 3 s
    assert no.value.headers["x-ratelimit-remaining-tokens"] == "10"
    clock.now += 7
    budgets.reserve("key 0", 20, 1)


def test_a_request_for_more_than_a_minute_has_is_told_not_to_come_again() -> None:
    budgets = TokenBudgets(100, Clock())
    with pytest.raises(
        ApiError, match=r"may take 101 tokens .* a key has 100 a minute; ask for fewer by max_tokens"
    ) as no:
        budgets.reserve("key 0", 1, 100)
    assert no.value.headers["x-should-retry"] == "false"
    assert "Retry-After" not in no.value.headers


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
    [(0, "0ms"), (0.0101, "11ms"), (0.9, "900ms"), (1, "1s"), (1.51, "1.6s"), (59.96, "1m0s"), (60, "1m0s"),
     (90.5, "1m30.5s"), (3600, "60m0s")],
)  # fmt: skip
def test_durations_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert _duration(seconds) == text
