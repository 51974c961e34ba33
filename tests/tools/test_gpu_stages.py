"""A report that goes on where it was left: stages as plain functions, time as a number."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from plans.errors import PlanError
from tools.gpu_stages import Report, Stage, open_stages, run_stages, seconds_needed


class Machine:
    """Stages that measure two models, each with a plan that a checkpoint is needed for; every stage takes as long as it
    says. Files are names in `there`."""

    def __init__(self) -> None:
        self.now, self.ran, self.saved = 0.0, list[str](), list[Report]()
        self.there, self.errors = set[str](), dict[str, Exception]()
        self.report: Report = {"rows": [], "speed": 0, "errors": [], "stages": {}, "begun": {}}
        self.stages = [
            self.stage("copies", 10, "speed", found=4000),
            *(
                stage
                for model in ("small", "large")
                for stage in (
                    self.making(f"checkpoint {model}", 30),
                    self.making(f"plan {model}", 20, f"checkpoint {model}"),
                    *(
                        self.stage(f"{model} {graphs}", 25, "rows", f"plan {model}", found=[f"{model} {graphs}"])
                        for graphs in ("yes", "no")
                    ),
                )
            ),
        ]

    def stage(self, name: str, seconds: float, key: str | None, *needs: str, found: Any = None) -> Stage:
        def take(report: Report) -> Any:
            self.now += seconds
            self.ran.append(name)
            if name in self.errors:
                raise self.errors[name]
            assert self.there >= {need for need in needs if need != "copies"}
            if key is None:
                self.there.add(name)
            return found

        def failed(error: str) -> list[str]:
            return [f"{name}: {error}"]

        return Stage(name, seconds, take, key, needs, failed=failed if key == "rows" else None)

    def making(self, name: str, seconds: float, *needs: str) -> Stage:
        made, drop = (lambda: name in self.there), (lambda: self.there.discard(name))
        return replace(self.stage(name, seconds, None, *needs), made=made, drop=drop)

    def run(self, budget: float | None = None) -> list[str]:
        """Names of what is open afterwards; `ran` has what ran."""
        self.ran = []
        left = run_stages(self.stages, self.report, budget, self.save, lambda line: None, lambda: self.now)
        return [stage.name for stage in left]

    def save(self) -> None:
        self.saved.append(copy.deepcopy(self.report))


ROWS = ["small yes", "small no", "large yes", "large no"]


def test_without_a_budget_all_of_it_runs_and_no_file_is_left() -> None:
    machine = Machine()
    assert machine.run() == []
    assert machine.report["rows"] == ROWS
    assert machine.report["speed"] == 4000
    assert machine.ran == [stage.name for stage in machine.stages]
    assert machine.there == set()
    assert machine.run() == []
    assert machine.ran == []


def test_a_call_ends_before_its_budget_does_and_the_next_goes_on() -> None:
    machine = Machine()
    calls = []
    for _ in range(10):
        began = machine.now
        left = machine.run(70)
        assert machine.now - began <= 70
        calls.append(machine.ran)
        if not left:
            break
    assert machine.report["rows"] == ROWS
    assert [name for ran in calls for name in ran] == [stage.name for stage in machine.stages]
    assert len(calls) == 4


def test_a_file_goes_as_soon_as_no_open_stage_needs_it() -> None:
    machine = Machine()
    machine.run(60)
    assert machine.ran[-1] == "plan small"
    assert machine.there == {"plan small"}, "its checkpoint is no longer needed"
    machine.run(50)
    assert machine.ran == ["small yes", "small no"]
    assert machine.there == set()


def test_on_a_machine_without_the_files_they_are_made_again_but_only_those_that_are_needed() -> None:
    machine = Machine()
    machine.run(85)
    assert machine.report["rows"] == ["small yes"]
    machine.there.clear()
    machine.run(75)
    assert machine.ran == ["checkpoint small", "plan small", "small no"]


def test_a_stage_that_was_begun_and_never_ended_wants_more_than_it_had() -> None:
    machine = Machine()
    machine.run(60)
    machine.run(30)
    before = next(report for report in machine.saved if "small yes" in report["begun"])
    machine.report, taken = copy.deepcopy(before), machine.stages[3]  # as the file was when the machine went
    assert taken.name == "small yes"
    assert seconds_needed(taken, machine.report) == 31
    assert "small yes" in machine.run(30)
    assert machine.ran == ["small no"], "what fits runs; the plan is still there"
    machine.run(35)
    assert machine.ran == ["small yes"]
    assert machine.report["begun"] == {}


def test_what_needs_a_stage_that_does_not_fit_waits_with_it() -> None:
    machine = Machine()
    assert machine.run(25)[0] == "checkpoint small"
    assert machine.ran == ["copies"]


def test_an_error_that_the_user_can_mend_is_a_row_of_every_stage_that_needs_it() -> None:
    machine = Machine()
    machine.errors["plan small"] = PlanError("no library")
    assert machine.run() == []
    assert machine.report["rows"] == ["small yes: no library", "small no: no library", "large yes", "large no"]
    assert machine.report["errors"] == []


@pytest.mark.parametrize("name", ["plan small", "small yes", "copies"])
def test_any_other_error_is_told_and_the_rest_goes_on(name: str) -> None:
    machine = Machine()
    machine.errors[name] = RuntimeError("no memory")
    assert machine.run() == []
    assert machine.report["errors"] == [f"{name}: RuntimeError: no memory"]
    assert machine.report["rows"][-2:] == ["large yes", "large no"]
    assert machine.report["stages"][name]["error"] == "RuntimeError: no memory"


def test_open_stages_come_in_order_with_what_they_need() -> None:
    machine = Machine()
    machine.report["stages"] = {name: {} for name in ("copies", "small yes", "small no", "large no")}
    assert [stage.name for stage in open_stages(machine.stages, machine.report)] == [
        "checkpoint large", "plan large", "large yes",
    ]  # fmt: skip
