"""Routing, replicas and their counts, without a cluster."""

from __future__ import annotations

import asyncio
import random
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray import serve

from outrider.plans.errors import ClosedError, PlanError
from outrider.plans.plan import open_plan
from outrider.runtime.ray_serve import ingress
from outrider.runtime.ray_serve.command import _delete
from outrider.runtime.ray_serve.following import Acknowledgement, ReplicaRequest
from outrider.runtime.ray_serve.remote_runtime import Counts
from outrider.runtime.ray_serve.replica import Replica, ReplicaInfo
from outrider.runtime.ray_serve.router import KERNELS, Balance, PrefixIndex, _may_continue, blocks_of, choose
from outrider.runtime.ray_serve.settings import Settings
from outrider.runtime.scheduler_stats import SchedulerStats
from outrider.runtime.server.readiness import Readiness
from outrider.tools.lab.faults.replaced_plan import write_over
from tests.properties import cheap

TOKENS = st.lists(st.integers(0, 2), max_size=24)
REPLICAS = st.sampled_from("abc")
STEPS = st.lists(st.tuples(st.sampled_from(["insert", "insert", "match", "forget"]), TOKENS, REPLICAS), max_size=30)


def common(one: list[int], other: list[int]) -> int:
    """Tokens that two beginnings share, in whole blocks of two."""
    same = next((i for i, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), min(len(one), len(other)))
    return same - same % 2


@cheap
@given(STEPS, TOKENS)
def test_the_longest_beginning_that_each_replica_was_sent(
    steps: list[tuple[str, list[int], str]], asked: list[int]
) -> None:
    index: PrefixIndex[str] = PrefixIndex(2)
    sent: dict[str, list[list[int]]] = {"a": [], "b": [], "c": []}
    for what, tokens, replica in steps:
        if what == "insert":
            index.insert(tokens, replica)
            sent[replica].append(tokens)
        elif what == "match":
            index.match(tokens)
        else:
            index.forget(replica)
            sent[replica].clear()
    longest = {name: max((common(asked, each) for each in all_of), default=0) for name, all_of in sent.items()}
    assert index.match(asked) == {name: length for name, length in longest.items() if length}
    for name, all_of in sent.items():
        assert index.size(name) == len({tuple(each[:end]) for each in all_of for end in range(2, len(each) + 1, 2)})


def test_the_blocks_looked_up_last_stay() -> None:
    index: PrefixIndex[str] = PrefixIndex(1, 4)
    index.insert([1, 2], "a")
    index.insert([3, 4], "a")
    index.match([1, 2])
    index.insert([5], "a")  # the end of what was not looked up goes first
    assert len(index) == index.size("a") == 4
    assert index.match([1, 2]) == {"a": 2}
    assert index.match([3, 4]) == {"a": 1}


def test_an_index_holds_the_blocks_of_another() -> None:
    one: PrefixIndex[str] = PrefixIndex(2)
    for tokens in ([1, 2, 3, 4, 5, 6], [1, 2, 7, 8], [9, 9]):
        one.insert(tokens, "here")
    other: PrefixIndex[str] = PrefixIndex(2, 3)
    other.hold(one.blocks, "b")
    assert other.match([9, 9]) == {"b": 2}
    assert other.match([1, 2, 7, 8]) == {"b": 4}  # of three blocks, the latest, and none without its beginning
    assert other.match([1, 2, 3, 4]) == {"b": 2}


def test_a_block_has_the_same_hash_in_every_process() -> None:
    program = "from outrider.runtime.ray_serve.router import blocks_of; print(blocks_of(list(range(40)), 16))"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert found.strip() == str(blocks_of(list(range(40)), 16))


def test_a_replica_that_is_overloaded_is_passed_over() -> None:
    draw = random.Random(0)
    held, balance = {"a": 90}, Balance(threshold=8, share=0.25)
    assert choose(100, held, {"a": 8, "b": 0}, {}, balance, draw)[0] == "a"
    assert choose(100, held, {"a": 9, "b": 0}, {}, balance, draw)[0] == "b"


def test_new_conversations_go_where_least_is_held() -> None:
    draw = random.Random(0)
    for _ in range(20):
        assert choose(100, {"a": 20}, {"a": 0, "b": 0}, {"a": 5, "b": 2}, Balance(), draw)[0] == "b"


def test_a_replica_is_warm_and_ends_where_its_plan_is_written_over(branch_plan: Path, tmp_path: Path) -> None:
    plan = shutil.copytree(branch_plan, tmp_path / "plan")
    replica = Replica(Settings(plan=plan, replicas=2), open_plan(plan, verify=False).manifest.identity)
    assert replica._runtime.scheduler_stats.finished == 1
    replica.check_health()
    write_over(plan, plan)
    with pytest.raises(PlanError, match="was written to while the plan is in use"):
        replica.check_health()


def test_a_replica_continues_tokens_of_its_own_kind_alone(branch_plan: Path) -> None:
    identity = open_plan(branch_plan, verify=False).manifest.identity
    replica = Replica(Settings(plan=branch_plan, threads=1), identity)
    sent = ReplicaRequest([5, 6, 7], {"max_new_tokens": 4, "ignore_eos": True}, identity)

    async def answer(sent: ReplicaRequest) -> list[Any]:
        return [message async for message in replica.generate(sent)]

    taken, *spans = asyncio.run(answer(sent))
    assert isinstance(taken, Acknowledgement)
    kernels = dict(taken.kernels)
    assert kernels["backend"] == "onnxruntime-cpu"
    assert "processor" in kernels  # its weights are floats
    first = spans[0][0].token_ids[:1]
    again, *later = asyncio.run(answer(sent.again(first, None, kernels)))
    assert again == taken
    assert first + [i for some in later for span in some for i in span.token_ids] == [
        i for some in spans for span in some for i in span.token_ids
    ]
    other = sent.again(first, None, kernels | {"processor": "another"})
    with pytest.raises(ClosedError, match="other tokens: its machine has processor"):
        asyncio.run(answer(other))
    reported: Any = SimpleNamespace(routing_stats=replica.record_routing_stats())
    assert reported.routing_stats[KERNELS] == kernels
    assert not _may_continue(reported, other)
    assert all(_may_continue(reported, each) for each in (sent, sent.again(first, None, kernels), None))
    assert _may_continue(SimpleNamespace(routing_stats={}), other)  # type: ignore[arg-type]


def counted(tokens: int, running: int = 0) -> SchedulerStats:
    return SchedulerStats(submitted=tokens // 10, new_tokens=tokens, running=running, accepted_by_depth=(tokens,) * 2)


def test_a_replica_that_misses_an_answer_is_counted_once() -> None:
    counts = Counts()
    counts.update({"a": counted(100, running=2), "b": counted(50, running=1)})
    assert (counts.total.new_tokens, counts.total.running) == (150, 3)
    counts.update({"b": counted(60, running=1)})
    assert (counts.total.new_tokens, counts.total.running) == (160, 1)
    counts.update({"a": counted(120, running=3), "b": counted(70)})
    assert (counts.total.new_tokens, counts.total.submitted, counts.total.running) == (190, 19, 3)
    assert counts.total.accepted_by_depth == (190, 190)
    counts.update({})
    assert (counts.total.new_tokens, counts.total.running) == (190, 0)
    counts.update({"c": counted(10)})
    assert counts.total.new_tokens == 200


def test_of_replicas_that_are_gone_their_sum_is_kept() -> None:
    counts = Counts()
    for number in range(400):
        counts.update({f"replica {number}": counted(10, running=1), "last": counted(5)})
    counts.update({"last": counted(5)})
    assert (counts.total.new_tokens, counts.total.submitted, counts.total.running) == (4005, 400, 0)
    assert len(counts._last) < 320
    for _ in range(400):
        counts.update({"last": counted(7)})
    assert (counts.total.new_tokens, len(counts._last)) == (4007, 1)


def test_replicas_of_several_kinds_are_named() -> None:
    kinds = [{"backend": "onnxruntime-cpu", "processor": kind} for kind in ("A", "A", "B")]
    found = [ReplicaInfo(str(place), place, f"host {place}", "n", counted(1), kind) for place, kind in enumerate(kinds)]
    assert ingress._differences(found[:2]) is None
    assert ingress._differences([]) is None
    assert "host 2 has processor 'B' instead of 'A' as host 0 has" in str(ingress._differences(found))


def test_an_ingress_is_ready_while_a_replica_answers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error in the answer to a question does not prevent the next one."""
    one = [ReplicaInfo("a", 1, "host", "node", counted(10, running=1))]
    answers: list[Any] = [one, TimeoutError(), [], ValueError("of the test"), TimeoutError(), one]
    seen: list[tuple[int, str, int]] = []
    asked = SimpleNamespace(_readiness=Readiness(), served=SimpleNamespace(counts=Counts()))

    async def replicas() -> list[ReplicaInfo]:
        status, body = asked._readiness.response
        seen.append((status, body["status"], asked.served.counts.total.running))
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


@pytest.mark.parametrize(
    ("served_before", "present", "ended"),
    [
        (False, {"ours"}, ["all"]),
        (False, set(), ["all"]),  # ended before it was there
        (False, {"ours", "another's"}, ["ours"]),
        (True, {"ours"}, ["ours"]),
        (True, {"another's"}, []),
    ],
)
def test_applications_of_others_stay(
    monkeypatch: pytest.MonkeyPatch, served_before: bool, present: set[str], ended: list[str]
) -> None:
    """Which applications there are is made up: others come to one's Ray Serve only on a cluster of several users."""
    found: list[str] = []
    monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(applications=dict.fromkeys(present)))
    monkeypatch.setattr(serve, "delete", found.append)
    monkeypatch.setattr(serve, "shutdown", lambda: found.append("all"))
    _delete("ours", served_before)
    assert found == ended
