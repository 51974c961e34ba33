"""Plain decoding against drafters: alternating runs on the same prompts, medians and paired ratios."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from time import perf_counter
from typing import Any

from outrider import Runtime
from outrider.commands.console import progress_bar
from outrider.plans.machine import peak_rss_bytes
from outrider.plans.manifest import Manifest
from outrider.plans.plan import read_manifest
from outrider.plans.tokenizer import Tokenizer
from outrider.runtime.backends import choose_backend
from outrider.runtime.options.options import Options
from outrider.runtime.runtime import check_threads
from outrider.runtime.text.structured_outputs import StructuredOutputs
from outrider.tools.bench.alternating import alternate, compare, generate
from outrider.tools.bench.identity import identity_columns, plan_columns
from outrider.tools.bench.machine import OtherPrograms
from outrider.tools.bench.prompts import Prompts, choose_prompts, cut_prompts, encode_prompts, room_for_prompts
from outrider.tools.bench.rows import Mode, Run, summary, variant_columns
from outrider.tools.bench.sampling import as_options
from outrider.tools.bench.shapes import PLAIN, Variant
from outrider.tools.bench.synthetic import check_can_force, forced_session
from outrider.tools.bench.tasks import by_task
from outrider.tools.bench.time_left import Step, TimeLeft, guess_work
from outrider.tools.bench.variants import plan_to_measure


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """A row for plain decoding and for every variant, at each length of prompts: all in one process.

    Whatever can be refused is refused before a plan is built, and that before anything is measured.
    """
    check_threads(options.threads)
    manifest = read_manifest(options.plan)
    backend = choose_backend(manifest.backends, options.backend).backend
    if options.synthetic_accept is not None:
        check_can_force(backend)
    groups = _prompts(options, manifest)
    with plan_to_measure(options) as (plan, variants):
        return _measure(options, plan, variants, groups)


def _measure(
    options: argparse.Namespace, plan: Path, variants: Sequence[Variant], groups: Sequence[Prompts]
) -> dict[str, Any]:
    started = perf_counter()
    runtime = Runtime.load(plan, backend=options.backend, threads=options.threads)
    load_ms = (perf_counter() - started) * 1000
    forced = options.synthetic_accept
    auto_disable = not options.keep_drafting and forced is None
    form = None if options.form is None else _name_form(options.form)
    shared = identity_columns(runtime, options) | {"auto_disable": auto_disable, "form": form}
    costs = plan_columns(plan, runtime.manifest) | {"load_ms": load_ms}
    session = runtime.session() if forced is None else forced_session(runtime, forced)
    settings = as_options(options.sampling) | Options(
        max_new_tokens=options.new,
        ignore_eos=options.form is None,
        auto_disable=auto_disable,
        structured_outputs=options.form,
        remember=False,  # or every repetition would draft from the answer of the one before
    )
    rows, others = [], OtherPrograms()
    with progress_bar("measuring") as progress:
        left = TimeLeft(_steps(variants, groups, options))
        for group, prompts in enumerate(groups):
            modes = [mode_of(variant, options) for variant in variants]

            def begin(mode: Mode, prompt: int, text: str, group: int = group) -> None:
                done, total, seconds = left.begin(_step(mode.variant, group, prompt, groups, options))
                progress(done, total, text, seconds)

            def ask(drafter: str, prompt: int, ids: list[list[int]] = prompts.ids) -> list[Run]:
                session.reset()
                return [generate(session, prompt, ids[prompt], drafter, settings)]

            alternate(modes, len(prompts.ids), options.reps, ask, begin)
            compare(session, modes, prompts.ids, settings)
            plain = modes[0].runs
            rows += [
                shared
                | variant_columns(mode)
                | {"prompts_sha256": prompts.sha256}
                | summary(mode, plain)
                | {"by_task": by_task(mode.runs, plain, prompts)}
                for mode in modes
            ]
    costs["peak_rss_bytes"] = peak_rss_bytes()
    return {"plan": str(options.plan), "other_programs": others.share, "rows": [row | costs for row in rows]}


def _name_form(form: StructuredOutputs) -> str:
    """Its kind, and what tells it from others."""
    ((kind, value),) = form.items()
    return f"{kind} {sha256(str(value).encode()).hexdigest()[:12]}"


def _prompts(options: argparse.Namespace, manifest: Manifest) -> list[Prompts]:
    """Those there are, or as many of each length asked for. A prompt that is cut to a length may have parts of several
    tasks, and has none. Raises `RequestError` for one that has no room."""
    context = manifest.target.context
    chosen = choose_prompts(options.plan, options.prompts, options.task)
    tokenizer = Tokenizer.load(options.plan / "tokenizer")
    if options.prompt_len is None:
        return [encode_prompts(chosen[: options.count], tokenizer, context, options.new)]
    room = room_for_prompts(context, options.new)
    whole = [tokenizer.encode(prompt.text) for prompt in chosen]
    cut = [cut_prompts(whole, length, room)[: options.count] for length in options.prompt_len]
    return [Prompts(ids, [None] * len(ids)) for ids in cut]


def mode_of(variant: Variant, options: argparse.Namespace) -> Mode:
    """A mode without runs yet; whether its tokens are promised goes by `--sampling` and `--synthetic-accept`."""
    forced = options.synthetic_accept if variant.name != PLAIN else None
    by_chance = variant.acceptance == "rejection" and options.sampling.temperature > 0
    return Mode(variant, synthetic=forced, promised=forced is None and not by_chance)


def _steps(variants: Sequence[Variant], groups: Sequence[Prompts], options: argparse.Namespace) -> list[Step]:
    """Every generation that `alternate` does."""
    return [
        _step(variant, group, prompt, groups, options)
        for group, prompts in enumerate(groups)
        for variant in variants
        for prompt in [0, *list(range(len(prompts.ids))) * options.reps]
    ]


def _step(variant: Variant, group: int, prompt: int, groups: Sequence[Prompts], options: argparse.Namespace) -> Step:
    return Step(variant.name, (group, prompt), guess_work(len(groups[group].ids[prompt]), options.new))
