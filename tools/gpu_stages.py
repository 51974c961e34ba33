"""A report in small stages, which a later call goes on with: what is open, what still fits, what is kept.

A stage measures, and what it finds is kept under its `key` of the report; or it makes files that others need. A machine
may be lent for minutes, and taken back in the middle of a stage.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from time import perf_counter
from typing import Any

from plans.errors import OutriderError

Report = dict[str, Any]


def _nothing() -> None:
    return None


@dataclass(frozen=True)
class Stage:
    """`seconds` are about what it takes. `take` gets the report so far; a list that it returns is added to that of
    `key`. Without a key it makes files: `made` says whether they are there, `drop` removes them when no open stage
    `needs` them any more. `failed` turns an error that its user can mend into rows.
    """

    name: str
    seconds: float
    take: Callable[[Report], Any]
    key: str | None = None
    needs: tuple[str, ...] = ()
    made: Callable[[], bool] | None = None
    drop: Callable[[], None] = _nothing
    failed: Callable[[str], Any] | None = None


def open_stages(stages: Sequence[Stage], report: Report) -> list[Stage]:
    """Return the stages that are still to run, in order: those that measure and are not in the report, before them
    those that make what they need."""
    ended = report["stages"]
    measuring = {stage.name for stage in stages if stage.key is not None and stage.name not in ended}
    wanted, by_name = set(measuring), {stage.name: stage for stage in stages}
    for stage in reversed(stages):
        if stage.name in wanted and not (stage.made is not None and stage.made()):
            wanted.update(stage.needs)
    assert wanted <= by_name.keys()

    def is_open(stage: Stage) -> bool:
        if stage.made is None:
            return stage.name in measuring
        failed = "error" in ended.get(stage.name, {})
        return stage.name in wanted and not failed and not stage.made()

    return [stage for stage in stages if is_open(stage)]


def seconds_needed(stage: Stage, report: Report) -> float:
    """Return what a stage takes by its estimate, or more than it had when it was begun and never ended."""
    had: float = report["begun"].get(stage.name, 0)
    return max(stage.seconds, had + 1)


def run_stages(
    stages: Sequence[Stage],
    report: Report,
    budget: float | None,
    save: Callable[[], None],
    say: Callable[[str], object],
    clock: Callable[[], float] = perf_counter,
) -> list[Stage]:
    """Run open stages, each that fits into what is left of `budget` seconds; return those that are open then.

    `save` keeps the report before and after every stage. A stage that fails is told among the report's `errors`, and
    ended.
    """
    began, left_out = clock(), set[str]()
    for stage in stages:
        if all(stage is not each for each in open_stages(stages, report)):
            continue
        left = inf if budget is None else budget - (clock() - began)
        if seconds_needed(stage, report) > left or left_out & set(stage.needs):
            left_out.add(stage.name)
            continue
        say(f"{stage.name} ...")
        if budget is not None:
            report["begun"][stage.name] = left
            save()
        _run(stage, report, clock)
        report["begun"].pop(stage.name, None)
        for maker in stages:
            if maker.made is not None and maker.made() and not _is_needed(maker, stages, report):
                maker.drop()
        save()
        gc.collect()  # what a session held on the device
    return open_stages(stages, report)


def _run(stage: Stage, report: Report, clock: Callable[[], float]) -> None:
    began, ended = clock(), report["stages"]
    try:
        for maker in stage.needs:
            if "error" in ended.get(maker, {}):
                raise OutriderError(ended[maker]["error"])
        found = stage.take(report)
        ended[stage.name] = {}
    except Exception as error:
        told = str(error) if isinstance(error, OutriderError) else f"{type(error).__name__}: {error}"
        ended[stage.name] = {"error": told}
        found = stage.failed(told) if stage.failed is not None and isinstance(error, OutriderError) else None
        if found is None and not (stage.made is not None and isinstance(error, OutriderError)):
            report["errors"].append(f"{stage.name}: {told}")
    ended[stage.name]["seconds"] = clock() - began
    if stage.key is not None and found is not None:
        report[stage.key] = report[stage.key] + found if isinstance(found, list) else found


def _is_needed(maker: Stage, stages: Sequence[Stage], report: Report) -> bool:
    """Whether an open stage needs what `maker` has made, itself or by what it needs."""
    ended = report["stages"]
    return any(
        maker.name in stage.needs
        and (
            (stage.made is None and stage.name not in ended)
            or (stage.made is not None and not stage.made() and _is_needed(stage, stages, report))
        )
        for stage in stages
    )
