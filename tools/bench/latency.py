"""Plain decoding against drafters: alternating runs on the same prompts, medians and paired ratios."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

from compiler.agreement import find_parting
from plans.console import progress_bar
from plans.machine import peak_rss_bytes
from runtime import Runtime, Session, Stats
from runtime.request import Options
from tools.bench.identity import identity_columns, plan_columns
from tools.bench.prompts import choose_prompts, cut_prompts
from tools.bench.rows import OPENING, Divergence, Mode, Run, summary, variant_columns
from tools.bench.sampling import as_options
from tools.bench.shapes import PLAIN, Variant
from tools.bench.synthetic import forced_session
from tools.bench.tasks import by_task
from tools.bench.variants import plan_to_measure


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """A row for plain decoding and for every variant, at each length of prompts: all in one process."""
    with plan_to_measure(options) as (plan, variants):
        return _measure(options, plan, variants)


def _measure(options: argparse.Namespace, plan: Path, variants: Sequence[Variant]) -> dict[str, Any]:
    started = perf_counter()
    runtime = Runtime.load(plan, target=options.target, threads=options.threads)
    load_ms = (perf_counter() - started) * 1000
    forced = options.synthetic_accept
    auto_disable = not options.keep_drafting and forced is None
    session = runtime.session() if forced is None else forced_session(runtime, forced)
    settings = as_options(options.sampling) | Options(
        max_new_tokens=options.new, ignore_eos=True, auto_disable=auto_disable
    )
    groups, tasks = _prompts(options, runtime)
    total = len(variants) * sum(1 + options.reps * len(prompts) for prompts in groups)
    rows = []
    with progress_bar("measuring") as progress:
        steps = count()

        def begin(text: str) -> None:
            progress(next(steps), total, text)

        for prompts in groups:
            modes = [Mode(v, synthetic=forced if v.name != PLAIN else None) for v in variants]
            _alternate(session, modes, prompts, settings, options.reps, begin)
            plain = modes[0].runs
            rows += [
                variant_columns(mode) | summary(mode, plain) | {"by_task": by_task(mode.runs, plain, tasks)}
                for mode in modes
            ]
    shared = identity_columns(runtime, options) | {"auto_disable": auto_disable}
    costs = plan_columns(plan, runtime.manifest) | {"load_ms": load_ms, "peak_rss_bytes": peak_rss_bytes()}
    return {"plan": str(options.plan), "rows": [shared | row | costs for row in rows]}


def _prompts(options: argparse.Namespace, runtime: Runtime) -> tuple[list[list[list[int]]], list[str | None]]:
    """Token ids of the prompts: those there are, or as many of each length asked for. The task of each; a prompt that
    is cut to a length may have parts of several, and has none."""
    room = runtime.manifest.target.context - options.new
    chosen = choose_prompts(options.plan, options.prompts, options.task)
    prompts = [runtime.tokenizer.encode(prompt.text) for prompt in chosen]
    if options.prompt_len is None:
        return [prompts[: options.count]], [prompt.task for prompt in chosen]
    cut = [cut_prompts(prompts, length, room)[: options.count] for length in options.prompt_len]
    return cut, [None] * options.count


def _alternate(
    session: Session,
    modes: Sequence[Mode],
    prompts: Sequence[list[int]],
    settings: Options,
    reps: int,
    begin: Callable[[str], None],
) -> None:
    """Run every mode on every prompt `reps` times, after one run of each that warms up: in turn, and the other way
    round in every second repetition, so that none has the same one before it always."""
    for mode in modes:
        begin(f"warming up {mode.variant}")
        _run(session, 0, prompts[0], mode.variant.name, settings)
    for repetition in range(reps):
        for index, ids in enumerate(prompts):
            for mode in modes[:: -1 if repetition % 2 else 1]:
                begin(f"run {repetition + 1}, prompt {index + 1}, {mode.variant}")
                mode.runs.append(_run(session, index, ids, mode.variant.name, settings))
    for mode in modes[1:]:
        if mode.synthetic is None:
            mode.divergences = _divergences(session, prompts, settings, modes[0].runs, mode.runs)


def _run(session: Session, prompt: int, ids: list[int], drafter: str, settings: Options) -> Run:
    session.reset()
    stream = session.stream(ids, **(settings | Options(drafter=drafter)))
    gaps: list[float] = []
    clock, started = session.stage_clock(), perf_counter()
    before = started
    for rounds, span in enumerate(stream, start=1):
        now = perf_counter()
        if rounds > 1 and span.token_ids:
            gaps += [1000 * (now - before) / len(span.token_ids)] * len(span.token_ids)
        if rounds == OPENING:
            clock, started = session.stage_clock(), perf_counter()
        before = perf_counter()
    wall_ms = (perf_counter() - started) * 1000
    steady = Stats()
    clock.fill(steady)
    return Run(stream.result, wall_ms, steady, tuple(gaps), prompt)


def _divergences(
    session: Session, prompts: Sequence[list[int]], settings: Options, plain: Sequence[Run], runs: Sequence[Run]
) -> list[Divergence]:
    found = []
    for run, other in zip(runs, plain, strict=True):
        ids = prompts[run.prompt]
        parted = find_parting(session, ids, settings, other.generation.token_ids, run.generation.token_ids)
        if parted is not None:
            found.append(Divergence(run.prompt, *parted))
    return found
