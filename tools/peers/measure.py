"""Every engine in a process of its own, one generation at a time, in turn."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from statistics import median
from typing import Any

from commands.console import progress_bar, stderr
from compiler.weights import check_folder
from plans.errors import OutriderError
from plans.plan import read_manifest
from plans.tokenizer import Tokenizer
from runtime.runtime import check_threads
from tools.bench.machine import available_cores
from tools.bench.prompts import choose_prompts, encode_prompts
from tools.bench.rows import Divergence
from tools.peers.conversion import convert_for_genai
from tools.peers.end_token import choose_end_token
from tools.peers.engine import GENAI, OURS, TRANSFORMERS, Settings
from tools.peers.figures import Mode, first_tokens, report
from tools.peers.plan import build_plan, check_plan
from tools.peers.process import Worker
from tools.peers.turns import Missing, Turns

_PACKAGES = {TRANSFORMERS: "transformers", GENAI: "onnxruntime_genai"}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All modes of all engines on every prompt, `reps` times, after one generation of each that is not counted.

    Before the others are loaded, ours decodes every prompt plainly: that says which token may be an end token.
    """
    check_threads(options.threads)
    for folder in (options.checkpoint, options.draft):
        if folder is not None:
            check_folder(folder)
    plan = options.plan or build_plan(options.checkpoint, options.draft, options.work)
    check_plan(plan, options.checkpoint)
    manifest = read_manifest(plan)
    geometry = manifest.target
    chosen = choose_prompts(plan, options.prompts, options.task)[: options.count]
    prompts = encode_prompts(chosen, Tokenizer.load(plan / "tokenizer"), geometry.context, options.new)
    missing: list[Missing] = []
    with ExitStack() as stack:
        settings = Settings(
            checkpoint=str(options.checkpoint.resolve()),
            plan=str(plan.resolve()),
            draft=None if options.draft is None else str(options.draft.resolve()),
            threads=options.threads or available_cores(),
        )
        ours = _load(OURS, settings, stack)
        settings = replace(settings, end_token=_end_token(ours, prompts.ids, options.new, geometry.vocab_size))
        workers = [ours, *_peers(settings, options, stack, missing)]
        turns = Turns(workers, missing)
        turns.warm_up(prompts.ids[0], options.new)
        idle_share = turns.run(prompts.ids, options.new, options.reps)
        modes = turns.modes
        _compare(modes, ours, prompts.ids)
        return {
            "checkpoint": str(options.checkpoint),
            "draft": None if options.draft is None else str(options.draft),
            "plan": str(plan),
            "identity": manifest.identity,
            "versions": {worker.engine: worker.version for worker in workers},
            "dtype": "float32",
            "threads": settings.threads,
            "task": options.task,
            "prompts": len(prompts.ids),
            "prompts_sha256": prompts.sha256,
            "prompt_tokens": median(len(ids) for ids in prompts.ids),
            "new_tokens": options.new,
            "reps": options.reps,
            "idle_share": idle_share,
            "missing": missing,
            **report(modes, prompts.tasks),
        }


def _end_token(ours: Worker, prompts: Sequence[list[int]], new: int, vocab_size: int) -> int:
    """What our plain decoding chooses behind none of the prompts."""
    generated = []
    with progress_bar("choosing an end token that ends nothing") as progress:
        for index, ids in enumerate(prompts):
            progress(index, len(prompts))
            generated.append(ours.generate(ours.modes[0], ids, new).ids)
    return choose_end_token(generated, vocab_size)


def _peers(settings: Settings, options: argparse.Namespace, stack: ExitStack, missing: list[Missing]) -> list[Worker]:
    """Start workers of the peers that can be loaded."""
    workers = []
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


def _compare(modes: Sequence[Mode], ours: Worker, prompts: Sequence[list[int]]) -> None:
    """Fill the modes' `differences`, of the first repetition in which a prompt's tokens differ. Repetitions of our
    plain decoding are compared with the first one."""
    expected = first_tokens(modes[0])
    for mode in modes:
        for run in mode.runs:
            ids, plain = prompts[run.prompt], expected[run.prompt]
            if run.prompt in mode.differences or run.generated.ids == plain:
                continue
            parting = ours.part(ids, plain, run.generated.ids)
            if parting is not None:
                mode.differences[run.prompt] = Divergence(run.prompt, len(ids), *parting)
