"""Our engine under every condition, compared with plain decoding alone."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from outrider.commands.console import progress_bar
from outrider.plans.errors import OutriderError
from outrider.plans.manifest import Geometry, Manifest
from outrider.plans.plan import open_plan
from outrider.plans.tokenizer import Tokenizer
from outrider.runtime.backends import choose_backend, on_processor
from outrider.tools.exactness.conditions import (
    REFERENCE,
    Condition,
    LeftOut,
    Process,
    processes,
    usable_drafters,
)
from outrider.tools.exactness.requests import TOP_LOGPROBS, Asked, plan_requests, read_texts
from outrider.tools.exactness.worker import run_process
from outrider.tools.identity import git_sha
from outrider.tools.measuring import drafters_named
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
    todo = processes(manifest, chosen, on_processor=on_processor(backend), quick=options.quick)
    job = {
        "plan": str(plan.root.resolve()),
        "backend": backend,
        "exactness": options.exactness,
        "drafters": chosen,
    }
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
    """What every request comes to alone; log-probabilities of all of them tell how near a choice was."""
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
