"""Every engine in a process of its own, one generation at a time, in turn."""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain, zip_longest
from statistics import median
from time import perf_counter
from typing import Any

from compiler.weights import check_folder
from plans.console import progress_bar, stderr
from plans.errors import OutriderError, RequestError
from plans.plan import read_manifest
from runtime.tokenizer import Tokenizer
from tools.bench.prompts import choose_prompts
from tools.peers.conversion import convert_for_genai
from tools.peers.engine import ENGINES, GENAI, OURS, TRANSFORMERS, Settings
from tools.peers.figures import Generation, Mode, report
from tools.peers.plan import build_plan, check_plan
from tools.peers.process import Worker, WorkerError, rest

_PACKAGES = {TRANSFORMERS: "transformers", GENAI: "onnxruntime_genai"}

Missing = dict[str, str | None]
"""`engine`, `mode` (None: the whole engine) and `reason`."""


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All modes of all engines on every prompt, `reps` times, after one generation of each that is not counted."""
    for folder in (options.checkpoint, options.draft):
        if folder is not None:
            check_folder(folder)
    plan = options.plan or build_plan(options.checkpoint, options.draft, options.work)
    check_plan(plan, options.checkpoint)
    manifest = read_manifest(plan)
    threads = options.threads or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
    longest = manifest.target.context - options.new - 1
    if longest < 1:
        raise RequestError(f"--new is {options.new}, but the plan's context is {manifest.target.context}; lower it.")
    chosen = choose_prompts(plan, options.prompts, options.task)[: options.count]
    tokenizer = Tokenizer.load(plan / "tokenizer")
    prompts = [tokenizer.encode(prompt.text)[-longest:] for prompt in chosen]
    missing: list[Missing] = []
    with ExitStack() as stack:
        settings = Settings(
            checkpoint=str(options.checkpoint.resolve()),
            plan=str(plan.resolve()),
            draft=None if options.draft is None else str(options.draft.resolve()),
            threads=threads or 1,
        )
        workers = _start(settings, options, stack, missing)
        turns = _warmed_up(workers, prompts[0], options.new, missing)
        idle_share = _run(turns, prompts, options)
        modes = sorted((mode for mode, _ in turns), key=lambda mode: ENGINES.index(mode.engine))
        _compare(modes, workers[0], prompts)
        return {
            "checkpoint": str(options.checkpoint),
            "draft": None if options.draft is None else str(options.draft),
            "plan": str(plan),
            "identity": manifest.identity,
            "versions": {worker.engine: worker.version for worker in workers},
            "dtype": "float32",
            "threads": settings.threads,
            "prompts": len(prompts),
            "prompt_tokens": median(len(ids) for ids in prompts),
            "new_tokens": options.new,
            "reps": options.reps,
            "idle_share": idle_share,
            "missing": missing,
            **report(modes, [prompt.task for prompt in chosen]),
        }


def _start(settings: Settings, options: argparse.Namespace, stack: ExitStack, missing: list[Missing]) -> list[Worker]:
    """Our worker, and those of the peers that can be loaded."""
    workers = [_load(OURS, settings, stack)]
    for engine, package in _PACKAGES.items():
        if importlib.util.find_spec(package) is None:
            missing.append({"engine": engine, "mode": None, "reason": f"not installed; run `pip install {engine}`"})
            continue
        try:
            worker = _load(engine, _converted(settings, options) if engine == GENAI else settings, stack)
        except OutriderError as error:
            missing.append({"engine": engine, "mode": None, "reason": str(error)})
            continue
        missing += [{"engine": engine, "mode": mode, "reason": reason} for mode, reason in worker.missing.items()]
        workers.append(worker)
    return workers


def _load(engine: str, settings: Settings, stack: ExitStack) -> Worker:
    with stderr.status(f"loading {engine}"):
        return stack.enter_context(Worker(engine, settings))


def _converted(settings: Settings, options: argparse.Namespace) -> Settings:
    """With the folders that onnxruntime-genai reads; a draft model that it cannot have is a mode less."""
    settings = replace(settings, converted=str(convert_for_genai(options.checkpoint, options.work).resolve()))
    if options.draft is None:
        return settings
    try:
        return replace(settings, converted_draft=str(convert_for_genai(options.draft, options.work).resolve()))
    except OutriderError as error:
        return replace(settings, draft_fault=str(error))


def _warmed_up(
    workers: Sequence[Worker], ids: list[int], new: int, missing: list[Missing]
) -> list[tuple[Mode, Worker]]:
    """The modes that can run, our plain decoding first, the engines in turn."""
    named = [[(Mode(worker.engine, mode), worker) for mode in worker.modes] for worker in workers]
    found = []
    for mode, worker in (pair for pair in chain.from_iterable(zip_longest(*named)) if pair is not None):
        try:
            with stderr.status(f"warming up {mode.engine}, {mode.name}"):
                worker.generate(mode.name, ids, new)
        except WorkerError as error:
            if mode.engine == OURS:
                raise
            missing.append({"engine": mode.engine, "mode": mode.name, "reason": str(error)})
        else:
            found.append((mode, worker))
    return found


def _run(turns: Sequence[tuple[Mode, Worker]], prompts: list[list[int]], options: argparse.Namespace) -> float:
    """Fill the modes' `runs`. Returns the largest share of a core that the idle processes had in one of them."""
    workers = list(dict.fromkeys(worker for _, worker in turns))
    total, largest = options.reps * len(prompts), 0.0
    with progress_bar("measuring") as progress:
        for done in range(total):
            repetition, index = divmod(done, len(prompts))
            progress(done, total, f"run {repetition + 1}, prompt {index + 1}")
            for mode, worker in reversed(turns) if repetition % 2 else turns:
                idle = [other for other in workers if other is not worker]
                rest(workers)
                before, started = sum(other.cpu_ms() for other in idle), perf_counter()
                try:
                    mode.runs.append(Generation(index, worker.generate(mode.name, prompts[index], options.new)))
                except WorkerError as error:
                    raise WorkerError(f"{mode.engine} {mode.name}, prompt {index + 1}: {error}") from None
                wall_ms = 1000 * (perf_counter() - started)
                largest = max(largest, (sum(other.cpu_ms() for other in idle) - before) / wall_ms)
    return largest


def _compare(modes: Sequence[Mode], ours: Worker, prompts: list[list[int]]) -> None:
    """Fill the modes' `differences`, of the first repetition in which a prompt's tokens differ."""
    plain = modes[0].runs
    for mode in modes[1:]:
        for run, other in zip(mode.runs, plain, strict=True):
            if run.prompt in mode.differences or run.generated.ids == other.generated.ids:
                continue
            parting = ours.part(prompts[run.prompt], other.generated.ids, run.generated.ids)
            if parting is not None:
                mode.differences[run.prompt] = parting
