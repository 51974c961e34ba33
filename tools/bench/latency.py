"""Plain decoding against drafters: alternating runs on the same prompts, medians and paired ratios."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from outrider import Runtime, Session
from outrider.plans import names
from outrider.plans.backends import BACKENDS, DEFAULT
from outrider.plans.errors import RequestError
from outrider.plans.machine import peak_rss_bytes
from outrider.plans.manifest import Manifest
from outrider.plans.plan import read_manifest
from outrider.plans.tokenizer import Tokenizer
from outrider.runtime.backends import choose_backend
from outrider.runtime.backends.base import BoundEngine, LoadedEngine, check_threads
from outrider.runtime.execution.buffers import Buffers
from outrider.runtime.options.options import Options
from outrider.runtime.step_loop_pool import StepLoopPool
from outrider.runtime.text.structured_outputs import StructuredOutputs
from outrider.tools.bench.prompts import Prompts, choose_prompts, cut_prompts, encode_prompts, room_for_prompts
from outrider.tools.bench.rows import rows_of
from outrider.tools.bench.runs import Run, cost_of, generate, load, mode_of
from outrider.tools.bench.shapes import Variant
from outrider.tools.bench.variants import plan_to_measure
from outrider.tools.identity import OtherPrograms
from outrider.tools.measuring import measuring, run_in_turn, turns


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """A row for plain decoding and for every variant, at each length of prompts: all in one process.

    All that can be refused is refused before a plan is built, and that before anything is measured.
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
    forced = options.synthetic_accept
    auto_disable = not options.keep_drafting and forced is None
    form = None if options.form is None else _name_form(options.form)
    runtime, shared = load(options, plan, auto_disable=auto_disable, form=form)
    session = runtime.session() if forced is None else forced_session(runtime, forced)
    settings = options.sampling | Options(
        max_new_tokens=options.new,
        ignore_eos=options.form is None,
        auto_disable=auto_disable,
        structured_outputs=options.form,
        remember=False,  # or every repetition would draft from the answer of the one before
    )

    def run(variant: Variant, prompt: tuple[int, list[int]], _: int) -> Run:
        session.reset()
        return generate(session, *prompt, variant.name, settings)

    rows, others = list[dict[str, Any]](), OtherPrograms()
    items = [list(enumerate(prompts.ids)) for prompts in groups]
    planned = (turn for own in items for turn in turns(variants, own, options.reps, own[:1]))
    with measuring([cost_of(len(ids), options.new) for _, _, (_, ids), _ in planned]) as begin:
        for prompts, own in zip(groups, items, strict=True):
            found = run_in_turn(variants, own, options.reps, run, begin=begin)
            modes = [mode_of(variant, options, runs) for variant, runs in found.items()]
            rows += rows_of(session, modes, prompts, settings, shared)
    peak = peak_rss_bytes()
    return {
        "plan": str(options.plan),
        "other_programs": others.share,
        "rows": [row | {"peak_rss_bytes": peak} for row in rows],
    }


def _name_form(form: StructuredOutputs) -> str:
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


_CERTAIN = np.float32(1e30)  # beside it, nothing else has any weight, at any temperature


def check_can_force(backend: str) -> None:
    """Raise `RequestError` for a backend whose logits are not on the host."""
    if not BACKENDS[backend].on_processor:
        raise RequestError(
            f"--synthetic-accept changes logits on the host, where {backend} has none; pass --backend {DEFAULT}."
        )


def forced_session(runtime: Runtime, length: int) -> Session:
    """A session whose drafts are accepted for `length` tokens, or as far as they reach; no other session is touched.

    Raises as `check_can_force`.
    """
    check_can_force(runtime.backend)
    engines = runtime.loaded.engines
    forced = {**engines, names.TARGET: _ForcedEngine(engines[names.TARGET], length)}
    return Session(StepLoopPool(replace(runtime.loaded, engines=forced)))


@dataclass(frozen=True)
class _ForcedEngine:
    """The target's engine, whose logits say after a draft that `length` of its tokens are right."""

    engine: LoadedEngine
    length: int

    def bind(self, buffers: Buffers, bound: dict[str, str]) -> BoundEngine:
        run = self.engine.bind(buffers, bound)
        columns = (
            names.TOKEN_IDS,
            names.PARENT,
            names.POSITIONS,
            names.ROW_SPLITS,
            names.LOGIT_INDICES,
            names.LOGITS_OUT,
        )
        token_ids, parent, positions, row_splits, logit_indices, logits = (
            buffers.array(names.TARGET, column) for column in columns
        )

        def forced(sizes: list[int]) -> None:
            run(sizes)
            tip, end = int(logit_indices[0]), int(row_splits[1])
            if end == tip + 1:  # no draft follows
                return
            depth = positions[tip:end] - positions[tip]
            node = int(np.argmax(depth == min(self.length, depth.max())))
            children = tip + 1 + np.flatnonzero(parent[tip + 1 : end] == tip + node)
            logits[node, token_ids[children]] = -_CERTAIN
            while node:
                above = int(parent[tip + node]) - tip
                logits[above, token_ids[tip + node]] = _CERTAIN
                node = above

        return forced
