"""Notifications: one for all news before it, none behind `remove`, and none that stops the others."""

from __future__ import annotations

import threading
from time import monotonic, sleep

import pytest

from outrider.runtime.embed.notifier import Notifier

SECONDS = 30.0


def test_news_before_a_call_are_told_once() -> None:
    notifier, entered, leave, calls = Notifier(), threading.Event(), threading.Event(), [0]

    def slow() -> None:
        calls[0] += 1
        entered.set()
        leave.wait(SECONDS)

    done = threading.Event()
    notifier.add("slow", slow)
    notifier.add("last", done.set)
    notifier.tell("slow")
    assert entered.wait(SECONDS)
    for _ in range(5):
        notifier.tell("slow")  # news behind the beginning of a call: one more call
    notifier.tell("last")
    leave.set()
    assert done.wait(SECONDS)
    assert calls == [2]


def test_remove_waits_for_a_call_that_runs() -> None:
    notifier, entered, left = Notifier(), threading.Event(), threading.Event()

    def slow() -> None:
        entered.set()
        sleep(0.1)
        left.set()

    notifier.add("slow", slow)
    notifier.tell("slow")
    assert entered.wait(SECONDS)
    notifier.tell("slow")
    notifier.remove("slow")
    assert left.is_set()
    left.clear()
    notifier.tell("slow")
    assert not left.wait(0.2)


def test_a_function_may_remove_its_own_key() -> None:
    notifier, removed = Notifier(), threading.Event()

    def remove() -> None:
        notifier.remove("own")
        removed.set()

    notifier.add("own", remove)
    notifier.tell("own")
    assert removed.wait(SECONDS)


def test_a_function_that_fails_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    notifier, told = Notifier(), threading.Event()
    notifier.add("fails", lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    notifier.add("other", told.set)
    notifier.tell("fails")
    notifier.tell("other")
    assert told.wait(SECONDS)
    assert "a notification failed" in caplog.text


def test_a_long_wait_of_one_is_no_wait_of_who_tells() -> None:
    notifier, leave = Notifier(), threading.Event()
    notifier.add("slow", lambda: leave.wait(SECONDS) and None)
    began = monotonic()
    for _ in range(1000):
        notifier.tell("slow")
    assert monotonic() - began < SECONDS / 3
    leave.set()
    notifier.remove("slow")
