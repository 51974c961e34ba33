"""Our engine under every condition, compared with plain decoding alone."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from outrider.commands.console import progress_bar
from outrider.plans.backends import BACKENDS
from outrider.plans.errors import OutriderError
from outrider.plans.manifest import Geometry, Manifest
from outrider.plans.plan import open_plan
from outrider.plans.tokenizer import Tokenizer
from outrider.runtime.backends import choose_backend
from outrider.tools.exactness.conditions import REFERENCE, Condition, LeftOut, Process, processes, usable_drafters
from outrider.tools.exactness.requests import TOP_LOGPROBS, Asked, plan_requests, read_texts
from outrider.tools.exactness.worker import run_process
from outrider.tools.identity import git_sha
from outrider.tools.measuring import Column, drafters_named, make_table
from outrider.tools.parting import Compared, Outcome, compare

_LENGTH, _SHORTEST = 256, 24
_LACKS = "that this processor lacks"


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run every condition of a plan: a row for each. Raises `OutriderError` where the reference fails."""
    plan = open_plan(options.plan)
    manifest = plan.manifest
    backend = choose_backend(manifest.backends, options.backend).backend
    kept, left_out = usable_drafters(manifest)
    chosen = [name for name in drafters_named(options.drafters, kept) if name != "none"]
    asked = plan_requests(
        read_texts(options.plan, options.prompts),
        Tokenizer.load(plan.root / "tokenizer", manifest.text.special_tokens),
        manifest.target.context,
        options.requests,
        options.new,
        options.length or _default_length(manifest.target, options.new),
    )
    asked = [_without_partial_kv(each, manifest) for each in asked]
    todo = processes(manifest, chosen, on_processor=BACKENDS[backend].on_processor, quick=options.quick)
    job = {"plan": str(plan.root.resolve()), "backend": backend, "exactness": options.exactness, "drafters": chosen}
    with TemporaryDirectory() as folder, progress_bar("comparing") as progress:
        job["file"] = str(Path(folder) / "prefix.cache")
        steps = 1 + sum(len(process.conditions) for process in todo)
        progress(0, steps, REFERENCE.conditions[0].name)
        expected = _reference(job, asked)
        rows = list[dict[str, Any]]()
        for process in todo:
            for condition, answer in _answers(job, asked, process):
                if _LACKS in answer.get("error", ""):
                    left_out.append(LeftOut(f"OUTRIDER_ISA={process.isa}", "this processor lacks these instructions"))
                    break
                rows.append(_row(condition, asked, expected, answer))
                progress(1 + len(rows), steps, f"{condition.group}: {condition.name}")
    total = sum(len(outcome.tokens) for outcome in expected)
    return {
        "git_sha": git_sha(),
        "about": f"plan {manifest.name} {manifest.identity[:12]}, {backend}; {len(asked)} requests of at most "
        f"{options.new} tokens, {total} in all, compared with plain decoding, alone, cold, on 1 thread",
        "ours": True,
        "identity": manifest.identity,
        "name": manifest.name,
        "backend": backend,
        "drafters": chosen,
        "requests": len(asked),
        "tokens": total,
        "rows": rows,
        "left_out": [asdict(each) for each in left_out],
        "diverged": sum(bool(row["diverged"] or row["logprobs_diverged"]) for row in rows),
    }


def _default_length(target: Geometry, new: int) -> int:
    """Tokens of a prompt, so that all branches have room in one sequence."""
    return min(_LENGTH, max(_SHORTEST, target.context // target.branches - new))


def _without_partial_kv(asked: Asked, manifest: Manifest) -> Asked:
    """Where the plan's default is partial KV, the requests ask for full KV, until a condition says otherwise."""
    if manifest.partial_kv is None:
        return asked
    return replace(asked, options={**asked.options, "partial_kv": "off"})


def _reference(job: dict[str, Any], asked: Sequence[Asked]) -> list[Outcome]:
    """The outcome of every request alone, with log-probabilities, which show how near a choice was."""
    whole = [replace(each, options={**each.options, "logprobs": TOP_LOGPROBS}) for each in asked]
    ((_, answer),) = _answers(job, whole, REFERENCE)
    if "error" in answer:
        raise OutriderError(f"the requests cannot be made of the plan: {answer['error']}")
    return [Outcome.from_json(each) for each in answer["outcomes"]]


def _answers(
    job: dict[str, Any], asked: Sequence[Asked], process: Process
) -> Iterator[tuple[Condition, dict[str, Any]]]:
    """Every condition of a process with what it came to; where the process ended before it, why that ended."""
    whole = job | {
        "asked": [asdict(each) for each in _half_with_logprobs(asked)],
        "threads": process.threads,
        "conditions": [asdict(condition) for condition in process.conditions],
    }
    answers, answer = run_process(whole, process.isa, process.without), dict[str, Any]()
    for condition in process.conditions:
        answer = next(answers, answer)
        yield condition, answer


def _half_with_logprobs(asked: Sequence[Asked]) -> list[Asked]:
    """Half of the requests ask for log-probabilities: what is asked for must not matter either."""
    return [replace(each, options={"logprobs": 2, **each.options}) if each.in_half(2) else each for each in asked]


def _row(
    condition: Condition, asked: Sequence[Asked], expected: Sequence[Outcome], answer: dict[str, Any]
) -> dict[str, Any]:
    """A row of the table: the condition, and how its outcomes compare. One that failed has all requests diverged."""
    if "error" in answer:
        outcomes = [Outcome(error=answer["error"])] * len(asked)
    else:
        outcomes = [Outcome.from_json(each) for each in answer["outcomes"]]
    compared = compare([each.name for each in asked], expected, outcomes)
    return {"group": condition.group, "condition": condition.name, **shown(compared), "witness": answer.get("witness")}


def shown(compared: Compared) -> dict[str, Any]:
    """The figures of a comparison, as they stand in a row."""
    value = asdict(compared)
    for name, each in (("first", compared.first), ("first_of_logprobs", compared.first_of_logprobs)):
        if each is not None:
            value[name]["text"] = each.text
    return value


def print_table(report: dict[str, Any], console: Console) -> None:
    """Print a report of `measure` or `measure_server`: a row a condition, then the first divergence of each."""
    rows, columns = report["rows"], [_AROUND, Column("condition", "condition", text=True), *_COUNTS]
    if any(row["witness"] for row in rows):
        columns.append(Column("seen", lambda row: _seen(row["witness"]), text=True))
    before = [None, *(row["group"] for row in rows)]
    shown = [
        row | {"around": row["group"] if row["group"] != last else ""} for row, last in zip(rows, before, strict=False)
    ]
    _print(report, make_table(columns, shown, narrow=True), rows, console)


def print_groups(report: dict[str, Any], console: Console) -> None:
    """Print a row for every group of conditions, then the first divergence of each."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in report["rows"]:
        groups.setdefault(row["group"], []).append(row)
    shown, firsts = list[dict[str, Any]](), list[dict[str, Any]]()
    for group, rows in groups.items():
        whole = {name: sum(row[name] for row in rows) for name in ("requests", "diverged", "logprobs_diverged")}
        untold = all(row.get("without_logprobs") for row in rows)
        shown.append({"around": group, "conditions": len(rows), **whole, "without_logprobs": untold})
        firsts += next(([row] for row in rows if row["first"] or row["first_of_logprobs"]), [])
    _print(report, make_table([_AROUND, Column("conditions", "conditions"), *_COUNTS], shown), firsts, console)


_AROUND = Column("around", "around", text=True)
_COUNTS = (
    Column("requests", "requests"),
    Column("diverged", "diverged"),
    Column("logprobs", lambda row: None if row.get("without_logprobs") else row["logprobs_diverged"]),
)


def _print(report: dict[str, Any], table: Table, rows: list[dict[str, Any]], console: Console) -> None:
    """Print the head, the table, the first divergences of `rows`, what was left out, and the verdict."""
    machine = report["machine"]
    head = f"{machine['processor']}, {machine['cores']} cores; commit {report['git_sha']}; {report['about']}"
    console.print(head, soft_wrap=True, markup=False)
    console.print(table)
    for row in rows:
        for name, what in (("first", "other tokens"), ("first_of_logprobs", "other logprobs")):
            if row[name] is not None:
                said = f"{row['group']}, {row['condition']}: first with {what}: {row[name]['text']}"
                console.print(said, soft_wrap=True, markup=False)
    for each in report["left_out"]:
        console.print(f"left out: {each['what']}: {each['reason']}", soft_wrap=True, markup=False)
    console.print(_verdict(report), soft_wrap=True)


def _seen(witness: dict[str, int] | None) -> str:
    """What shows that a condition was what it says: tokens a pass of the target, and tokens not computed again."""
    if witness is None:
        return "-"
    found = [f"{witness['tokens'] / max(1, witness['passes']):.1f} a pass"] if "passes" in witness else []
    shown = ("reused", "resumed") if "passes" in witness else ("accepted", "reused")
    found += [f"{witness[name]} {name}" for name in shown if witness[name]]
    return ", ".join(found) or "-"


def _verdict(report: dict[str, Any]) -> str:
    total, failed = sum(row["requests"] for row in report["rows"]), report.get("failed_at_first")
    more = f"; of the first answers, {failed} of {report['requests']} were errors" if failed else ""
    if not report["diverged"]:
        return f"no divergence in {len(report['rows'])} conditions, {total} requests{more}"
    tokens = sum(row["diverged"] for row in report["rows"])
    logprobs = sum(row["logprobs_diverged"] for row in report["rows"])
    return (
        f"{report['diverged']} of {len(report['rows'])} conditions diverge: {tokens} of {total} requests have other "
        f"tokens or texts, {logprobs} others have other log-probabilities{more}"
    )
