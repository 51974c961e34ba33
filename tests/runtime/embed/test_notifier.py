"""Notifications: one for all news before it, none after `remove`, and none that stops the others."""

from __future__ import annotations

import threading

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
        notifier.tell("slow")  # news after the beginning of a call: one more call
    notifier.tell("last")
    leave.set()
    assert done.wait(SECONDS)
    assert calls == [2]


def test_a_function_that_fails_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    notifier, told = Notifier(), threading.Event()
    notifier.add("fails", lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    notifier.add("other", told.set)
    notifier.tell("fails")
    notifier.tell("other")
    assert told.wait(SECONDS)
    assert "a notification failed" in caplog.text
