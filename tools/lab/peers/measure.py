"""Every engine in a process of its own, one generation at a time, in turn."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain, zip_longest
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from outrider.commands.console import stderr
from outrider.compiler.opening import stores_integers
from outrider.compiler.weights import check_folder
from outrider.plans.errors import OutriderError, UsageError
from outrider.plans.extras import install
from outrider.plans.machine import available_cores
from outrider.plans.plan import read_manifest
from outrider.plans.tokenizer import Tokenizer
from outrider.runtime.backends.base import check_threads
from outrider.tools.bench.prompts import choose_prompts, encode_prompts
from outrider.tools.bench.runs import cost_of
from outrider.tools.lab.peers.conversion import CONVERTED, convert
from outrider.tools.lab.peers.engine import (
    ENGINES,
    GENAI,
    LLAMA_CPP,
    OPENVINO,
    OURS,
    PRECISIONS,
    TRANSFORMERS,
    Precision,
    Settings,
)
from outrider.tools.lab.peers.figures import Generation, Mode, first_tokens, report
from outrider.tools.lab.peers.plan import build_plan, check_plan
from outrider.tools.lab.peers.process import LostEngineError, Worker, WorkerError, rest
from outrider.tools.measuring import measuring, run_in_turn, turns

_PACKAGES = {
    TRANSFORMERS: ("transformers",),
    GENAI: ("onnxruntime_genai",),
    OPENVINO: ("openvino_genai", "gguf"),
    LLAMA_CPP: ("llama_cpp", "gguf"),
}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Compare in every precision for itself: `precisions` has a report of each. The prompts are the same in all."""
    check_threads(options.threads)
    for folder in (options.checkpoint, options.draft):
        if folder is not None:
            check_folder(folder)
            if stores_integers(folder):
                raise UsageError(
                    f"{folder} stores weights as integers, and every engine has to quantise the same numbers; give the "
                    "checkpoint in floating point"
                )
    return {
        "checkpoint": str(options.checkpoint),
        "draft": None if options.draft is None else str(options.draft),
        "threads": options.threads or available_cores(),
        "task": options.task,
        "new_tokens": options.new,
        "reps": options.reps,
        "precisions": [_measure(precision, plan, options) for precision, plan in _plans(options).items()],
    }


def _plans(options: argparse.Namespace) -> dict[Precision, Path]:
    """Return our plan in every precision that is asked for: one that was given, or one that is built."""
    given: dict[Precision, Path] = {}
    for plan in options.plan:
        precision = check_plan(plan, options.checkpoint)
        if precision in given:
            raise UsageError(f"--plan names two plans in {precision}, {given[precision]} and {plan}; pass one of them")
        given[precision] = plan
    chosen = given if options.precision is None else options.precision
    asked = [precision for precision in PRECISIONS if precision in (chosen or ("fp32",))]
    for precision, plan in given.items():
        if precision not in asked:
            raise UsageError(f"{plan} is in {precision}, which --precision leaves out; leave out that plan as well")
    return {p: given.get(p) or build_plan(options.checkpoint, options.draft, options.work, p) for p in asked}


def _measure(precision: Precision, plan: Path, options: argparse.Namespace) -> dict[str, Any]:
    """All modes of all engines on every prompt, `reps` times, after one generation of each that is not counted."""
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
            context=max(map(len, prompts.ids)) + options.new,
        )
        ours = _load(OURS, settings, stack)
        workers = [ours, *_peers(settings, options, precision, stack, missing)]
        turns = Turns(workers, missing)
        turns.run(prompts.ids, options.new, options.reps)
        modes = turns.modes
        _compare(modes, ours, prompts.ids, precision)
        return {
            "precision": precision,
            "plan": str(plan),
            "identity": manifest.identity,
            "versions": {worker.engine: worker.version for worker in workers},
            "prompts": len(prompts.ids),
            "prompts_sha256": prompts.sha256,
            "prompt_tokens": median(len(ids) for ids in prompts.ids),
            "idle_share": turns.idle_share,
            "missing": missing,
            **report(modes, prompts.tasks),
        }


def _peers(
    settings: Settings, options: argparse.Namespace, precision: Precision, stack: ExitStack, missing: list[Missing]
) -> list[Worker]:
    """Start workers of the peers that can be loaded."""
    workers = []
    for engine, packages in _PACKAGES.items():
        try:
            _check_engine(engine, packages, precision)
            worker = _load(engine, _converted(engine, settings, options, precision), stack)
        except OutriderError as error:
            missing.append({"engine": engine, "mode": None, "reason": str(error)})
            continue
        missing += [{"engine": engine, "mode": mode, "reason": reason} for mode, reason in worker.missing.items()]
        workers.append(worker)
    return workers


def _check_engine(engine: str, packages: Sequence[str], precision: Precision) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise OutriderError(f"{package} is not installed; {install('lab')}")
    if engine == TRANSFORMERS and precision != "fp32":
        raise OutriderError(f"has no weights in {precision} on a CPU by itself")


def _load(engine: str, settings: Settings, stack: ExitStack) -> Worker:
    with stderr.status(f"loading {engine}"):
        return stack.enter_context(Worker(engine, settings))


def _converted(engine: str, settings: Settings, options: argparse.Namespace, precision: Precision) -> Settings:
    """With what the engine reads, where that is no checkpoint; a draft model that it cannot have is a mode less."""
    if engine not in CONVERTED:
        return settings
    target = convert(engine, options.checkpoint, options.work, precision)
    settings = replace(settings, converted=str(target.resolve()))
    if options.draft is None:
        return settings
    try:
        draft = convert(engine, options.draft, options.work, precision, options.checkpoint)
    except OutriderError as error:
        return replace(settings, draft_fault=str(error))
    return replace(settings, converted_draft=str(draft.resolve()))


def _compare(modes: Sequence[Mode], ours: Worker, prompts: Sequence[list[int]], precision: Precision) -> None:
    """Fill the modes' `differences`, of the first repetition in which a prompt's tokens differ. Repetitions of our
    plain decoding are compared with the first one. Of others' quantised weights, which are not ours, no tokens are
    expected."""
    expected = first_tokens(modes[0])
    for mode in modes:
        if precision != "fp32" and mode.engine != OURS:
            continue
        for run in mode.runs:
            ids, plain = prompts[run.prompt], expected[run.prompt]
            if run.prompt in mode.differences or run.generated.ids == plain:
                continue
            if (parting := ours.part(run.prompt, ids, plain, run.generated.ids)) is not None:
                mode.differences[run.prompt] = parting


Missing = dict[str, str | None]
"""`engine`, `mode` (None: the whole engine) and `reason`."""


class Turns:
    """All modes of `workers`, the engines in turn; first comes the first worker's first mode, our plain decoding.

    What fails is added to `missing` with the reason, and none of its runs count: every mode that is left has run as
    often as the others. Without our plain decoding there is nothing to compare with: its `WorkerError` is raised.
    """

    def __init__(self, workers: Sequence[Worker], missing: list[Missing]) -> None:
        named = [[Mode(worker.engine, mode) for mode in worker.modes] for worker in workers]
        self._modes = [mode for mode in chain.from_iterable(zip_longest(*named)) if mode is not None]
        self._workers = {worker.engine: worker for worker in workers}
        self._plain, self._missing = self._modes[0], missing
        self.idle_share = 0.0
        """The largest share of a core that the idle processes had during a generation."""

    @property
    def modes(self) -> list[Mode]:
        """Modes that have not failed, by engine, our plain decoding first."""
        return sorted(self._modes, key=lambda mode: ENGINES.index(mode.engine))

    def run(self, prompts: Sequence[list[int]], new: int, reps: int) -> None:
        """Every mode on every prompt, `reps` times, after one run that does not count."""

        def run(mode: Mode, prompt: tuple[int, list[int]], repetition: int) -> Generation:
            return self._generate(mode, *prompt, new, counts=repetition > 0)

        items = list(enumerate(prompts))
        planned = turns(self._modes, items, reps, items[:1])
        with measuring([cost_of(len(ids), new) for _, _, (_, ids), _ in planned]) as begin:
            found = run_in_turn(self._modes, items, reps, run, begin=begin, leave=self._leave)
        for mode, runs in found.items():
            mode.runs = runs

    def _generate(self, mode: Mode, index: int, ids: list[int], new: int, *, counts: bool) -> Generation:
        """A generation, once all processes rest. Raises `WorkerError`."""
        worker = self._workers[mode.engine]
        idle = [other for other in self._workers.values() if other is not worker]
        rest([worker, *idle])
        before, started = sum(other.cpu_ms() for other in idle), perf_counter()
        generated = worker.generate(mode.name, ids, new)
        wall_ms = 1000 * (perf_counter() - started)
        if counts:
            self.idle_share = max(self.idle_share, (sum(other.cpu_ms() for other in idle) - before) / wall_ms)
        return Generation(index, generated)

    def _leave(self, mode: Mode, prompt: tuple[int, list[int]], error: OutriderError) -> list[Mode]:
        """The mode, or all those of an engine whose process is lost, which may be another one. Raises for our plain
        decoding."""
        lost = error.engine if isinstance(error, LostEngineError) else None
        gone = [each for each in self._modes if (each is mode if lost is None else each.engine == lost)]
        engine, reason = lost or mode.engine, str(error) if lost else f"prompt {prompt[0]}: {error}"
        if self._plain in gone:
            raise WorkerError(f"{engine}, {self._plain.name}: {reason}")
        self._missing.append({"engine": engine, "mode": None if lost else mode.name, "reason": reason})
        self._modes = [each for each in self._modes if each not in gone]
        if not any(each.engine == engine for each in self._modes):
            self._workers.pop(engine).close()
        return gone
