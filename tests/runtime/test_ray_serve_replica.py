"""A replica in this process, without Ray."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from plans.errors import PlanError
from plans.plan import open_plan
from runtime.ray_serve.replica import Replica
from runtime.ray_serve.settings import Settings


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
