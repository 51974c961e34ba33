"""Plain decoding against drafters: alternating runs on the same prompts, medians and paired ratios."""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from compiler.agreement import find_parting
from plans import names
from plans.console import progress_bar
from plans.errors import RequestError
from plans.manifest import Drafter, Manifest
from runtime import Runtime, Session, Stats
from runtime.request import Options
from tools.bench.rows import OPENING, Divergence, Mode, Run, summary
from tools.bench.tasks import by_task, choose_prompts

_PLAIN = "none"
_ROOT = Path(__file__).resolve().parent.parent.parent


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run every mode on every prompt `reps` times, modes alternating, after one warm-up of each."""
    started = perf_counter()
    runtime = Runtime.load(options.plan, target=options.target, threads=options.threads)
    load_ms = (perf_counter() - started) * 1000
    manifest = runtime.manifest
    engine = manifest.targets[runtime.target].engines[names.TARGET]
    kinds = {_PLAIN: None} | {d.name: d.kind for d in manifest.drafters}
    modes = [Mode(name, kinds[name]) for name in choose_drafters(manifest.drafters, options.drafters)]
    chosen = choose_prompts(options.plan, options.prompts, options.task)
    prompts = [runtime.tokenizer.encode(prompt.text) for prompt in chosen]
    if options.prompt_len is not None:
        prompts = cut_prompts(prompts, options.prompt_len, manifest.target.context - options.new)
    prompts = prompts[: options.count]
    tasks = [prompt.task for prompt in chosen][: options.count]
    sampling = Options(temperature=options.temperature, top_k=options.top_k, top_p=options.top_p, seed=options.seed)
    settings = sampling | Options(max_new_tokens=options.new, ignore_eos=True, auto_disable=not options.keep_drafting)
    session = runtime.session()
    for mode in modes:
        _run(session, 0, prompts[0], mode.drafter, settings)
    total = options.reps * len(prompts)
    with progress_bar("measuring") as progress:
        for done in range(total):
            repetition, index = divmod(done, len(prompts))
            progress(done, total, f"run {repetition + 1}, prompt {index + 1}")
            for mode in modes:
                mode.runs.append(_run(session, index, prompts[index], mode.drafter, settings))
    plain = modes[0].runs
    for mode in modes[1:]:
        mode.divergences = _divergences(session, prompts, settings, plain, mode.runs)
    return {
        "plan": str(options.plan),
        "git_sha": _git_sha(),
        "identity": manifest.identity,
        "target": runtime.target,
        "target_version": _version(manifest, runtime.target),
        "dtype": str(next(t.dtype for t in engine.inputs if t.name == names.k_cache(0))),
        "threads": options.threads,
        "load_ms": load_ms,
        "plan_bytes": sum(file.size for file in manifest.files),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        * (1 if sys.platform == "darwin" else 1024),
        "prompts": len(prompts),
        "new_tokens": options.new,
        "reps": options.reps,
        **sampling,
        "auto_disable": not options.keep_drafting,
        "rows": [summary(mode, plain) | {"by_task": by_task(mode.runs, plain, tasks)} for mode in modes],
    }


def cut_prompts(prompts: Sequence[list[int]], length: int, most: int) -> list[list[int]]:
    """Prompts of exactly `length` tokens: the ends of long ones, short ones behind the ones before them.

    Raises `RequestError` where the plan's context has no room for it.
    """
    if not 1 <= length <= most:
        raise RequestError(f"--prompt-len is {length}; pass 1 to {most}, what the context leaves beside --new tokens.")
    found: list[list[int]] = []
    for index in range(len(prompts)):
        tokens: list[int] = []
        for step in range(len(prompts) * (1 + length)):
            tokens = prompts[(index - step) % len(prompts)] + tokens
            if len(tokens) >= length:
                break
        found.append(tokens[-length:])
    return found


def choose_drafters(drafters: Sequence[Drafter], wanted: str | None) -> list[str]:
    """Plain decoding first, then what `wanted` lists by name or by kind; everything without it.

    A name goes before a kind that is spelled alike. Raises `RequestError` for what the plan has not.
    """
    names = [_PLAIN, *(d.name for d in drafters)]
    if wanted is None:
        return names
    chosen = [_PLAIN]
    for word in (part.strip() for part in wanted.split(",")):
        found = [word] if word in names else [d.name for d in drafters if d.kind == word]
        if not found:
            has = ", ".join([*(f"{d.name} ({d.kind})" for d in drafters), _PLAIN])
            raise RequestError(f"--drafters names {word!r}, but the plan has {has}; pass names or kinds of those.")
        chosen += [name for name in found if name not in chosen]
    return chosen


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


def _version(manifest: Manifest, target: str) -> str:
    """What built the target's engines."""
    builders = {engine.builder for engine in manifest.targets[target].engines.values() if engine.builder}
    return ", ".join(sorted(builders)) or f"onnxruntime {manifest.tools.get('onnxruntime', '')}".strip()


def _git_sha() -> str | None:
    """Of the checkout that measures; None outside of one."""
    command = ["git", "-C", str(_ROOT), "rev-parse", "--short=12", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None
