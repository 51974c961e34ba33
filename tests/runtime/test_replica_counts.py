"""The counts of several replicas together, while some answer and others do not."""

from __future__ import annotations

from runtime.ray_serve.counts import Counts
from runtime.scheduler_stats import SchedulerStats


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
