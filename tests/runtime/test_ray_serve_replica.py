"""A replica in this process, without Ray."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.plans.errors import ClosedError, PlanError
from outrider.plans.plan import open_plan
from outrider.runtime.ray_serve.prefixes import KERNELS
from outrider.runtime.ray_serve.replica import Replica
from outrider.runtime.ray_serve.replica_request import Acknowledgement, ReplicaRequest
from outrider.runtime.ray_serve.router import _may_go_on
from outrider.runtime.ray_serve.settings import Settings


def test_a_replica_is_warm_and_ends_where_its_plan_is_written_over(branch_plan: Path, tmp_path: Path) -> None:
    plan = shutil.copytree(branch_plan, tmp_path / "plan")
    replica = Replica(Settings(plan=plan, replicas=2), open_plan(plan, verify=False).manifest.identity)
    assert replica._runtime.scheduler_stats.finished == 1
    replica.check_health()
    for path in plan.rglob("*"):
        if path.is_file():
            with open(path, "r+b") as file:
                head = file.read(1)
                file.seek(0)
                file.write(head)
    with pytest.raises(PlanError, match="was written to while the plan is in use"):
        replica.check_health()


def test_a_replica_goes_on_with_tokens_of_its_own_kind_alone(branch_plan: Path) -> None:
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
    told: Any = SimpleNamespace(routing_stats=replica.record_routing_stats())
    assert told.routing_stats[KERNELS] == kernels
    assert not _may_go_on(told, other)
    assert all(_may_go_on(told, each) for each in (sent, sent.again(first, None, kernels), None))
    assert _may_go_on(SimpleNamespace(routing_stats={}), other)  # type: ignore[arg-type]
