"""The counts of several replicas together, while some answer and others do not."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from outrider.runtime.ray_serve import ingress
from outrider.runtime.ray_serve.counts import Counts
from outrider.runtime.ray_serve.replica import ReplicaInfo
from outrider.runtime.scheduler_stats import SchedulerStats
from outrider.runtime.server.readiness import Readiness


def counted(tokens: int, running: int = 0) -> SchedulerStats:
    return SchedulerStats(submitted=tokens // 10, new_tokens=tokens, running=running, accepted_by_depth=(tokens,) * 2)


def test_a_replica_that_misses_an_answer_is_counted_once() -> None:
    counts = Counts()
    counts.tell({"a": counted(100, running=2), "b": counted(50, running=1)})
    assert (counts.total.new_tokens, counts.total.running) == (150, 3)
    counts.tell({"b": counted(60, running=1)})
    assert (counts.total.new_tokens, counts.total.running) == (160, 1)
    counts.tell({"a": counted(120, running=3), "b": counted(70)})
    assert (counts.total.new_tokens, counts.total.submitted, counts.total.running) == (190, 19, 3)
    assert counts.total.accepted_by_depth == (190, 190)
    counts.tell({})
    assert (counts.total.new_tokens, counts.total.running) == (190, 0)
    counts.tell({"c": counted(10)})
    assert counts.total.new_tokens == 200


def test_of_replicas_that_are_gone_their_sum_is_kept() -> None:
    counts = Counts()
    for number in range(400):
        counts.tell({f"replica {number}": counted(10, running=1), "last": counted(5)})
    counts.tell({"last": counted(5)})
    assert (counts.total.new_tokens, counts.total.submitted, counts.total.running) == (4005, 400, 0)
    assert len(counts._last) < 320
    for _ in range(400):
        counts.tell({"last": counted(7)})
    assert (counts.total.new_tokens, len(counts._last)) == (4007, 1)


def test_replicas_of_several_kinds_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    kinds = [{"backend": "onnxruntime-cpu", "processor": kind} for kind in ("A", "A", "B")]
    found = [ReplicaInfo(str(place), place, f"host {place}", "n", counted(1), kind) for place, kind in enumerate(kinds)]
    assert ingress._differences(found[:2]) is None
    assert ingress._differences([]) is None
    assert "host 2 has processor 'B' instead of 'A' as host 0 has" in str(ingress._differences(found))


def test_an_ingress_is_ready_while_a_replica_answers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever comes of a question to the replicas, the next one is asked."""
    one = [ReplicaInfo("a", 1, "host", "node", counted(10, running=1))]
    answers: list[list[ReplicaInfo] | Exception] = [
        one,
        TimeoutError(),
        [],
        ValueError("of the test"),
        TimeoutError(),
        one,
    ]
    seen: list[tuple[int, str, int]] = []
    asked = SimpleNamespace(_readiness=Readiness(), served=SimpleNamespace(counts=Counts()))

    def note() -> None:
        status, body = asked._readiness.response
        seen.append((status, body["status"], asked.served.counts.total.running))

    async def replicas() -> list[ReplicaInfo]:
        note()
        if not answers:
            raise asyncio.CancelledError
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    asked.replicas = replicas
    monkeypatch.setattr(ingress, "_EVERY", 0.0)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(ingress.Ingress._count(asked))  # type: ignore[arg-type]
    ready, none = (200, "ready"), (503, "no_replica")
    assert seen == [(*ready, 0), (*ready, 1), (*ready, 1), (*none, 0), (*none, 0), (*none, 0), (*ready, 1)]
    assert "the counts of replicas cannot be had" in caplog.text
