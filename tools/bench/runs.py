"""Generations of a plan's drafters beside plain decoding, and where their tokens part."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from outrider import Generation, Runtime, Session, Stats
from outrider.runtime.options.options import Options
from outrider.tools.bench.shapes import PLAIN, Variant
from outrider.tools.identity import identity_columns, plan_columns
from outrider.tools.parting import Parting, find_parting

OPENING = 2  # rounds that stage times leave out: one ends the prompt, in the next a drafter reads it


@dataclass(frozen=True)
class Run:
    """One generation. `wall_ms` and `steady` are of its rounds after the opening, by the wall clock and by stage.
    `gaps_ms` has the time since the previous token for each token after the first span, a span's time divided evenly;
    `waits_ms` has the undivided time of each such span: how long a user waits for it."""

    generation: Generation
    wall_ms: float
    steady: Stats
    gaps_ms: tuple[float, ...]
    prompt: int = 0
    waits_ms: tuple[float, ...] = ()

    @property
    def stats(self) -> Stats:
        return self.generation.stats

    @property
    def rounds(self) -> int:
        return max(self.stats.rounds - OPENING, 0)

    @property
    def rate(self) -> float | None:
        """Tokens a second after the first span; None where there are none."""
        return self.stats.decode_tokens_per_second or None


@dataclass
class Mode:
    """All runs of one variant, in the order in which plain decoding ran beside them.

    `synthetic`: the tokens of a draft that were accepted by force. `promised`: whether the tokens are to be those of
    plain decoding; forced ones are not, nor at a temperature those that are accepted by rejection.
    """

    variant: Variant
    runs: list[Run] = field(default_factory=list)
    divergences: list[Parting] = field(default_factory=list)
    synthetic: int | None = None
    promised: bool = True


def first_tokens(plain: Sequence[Run]) -> dict[int, list[int]]:
    """By index of prompt, what plain decoding generated first: what every run after that prompt is compared with."""
    found: dict[int, list[int]] = {}
    for run in plain:
        found.setdefault(run.prompt, run.generation.token_ids)
    return found


def load(options: argparse.Namespace, plan: Path, **columns: Any) -> tuple[Runtime, dict[str, Any]]:
    """Load the plan; what all rows of a measurement share, `columns` among it."""
    started = perf_counter()
    runtime = Runtime.load(plan, backend=options.backend, threads=options.threads)
    load_ms = (perf_counter() - started) * 1000
    shared = identity_columns(runtime, options) | columns | plan_columns(plan, runtime.manifest)
    return runtime, shared | {"load_ms": load_ms}


def mode_of(variant: Variant, options: argparse.Namespace, runs: Sequence[Run] = ()) -> Mode:
    """The mode of these runs; whether its tokens are promised goes by `--sampling` and `--synthetic-accept`."""
    forced = options.synthetic_accept if variant.name != PLAIN else None
    by_chance = variant.acceptance == "rejection" and options.sampling["temperature"] > 0
    return Mode(variant, list(runs), synthetic=forced, promised=forced is None and not by_chance)


def cost_of(prompt_tokens: int, new_tokens: int) -> float:
    """What a generation costs beside others, in generated tokens: those of a prompt are computed many at once."""
    return new_tokens + prompt_tokens / 10


def compare(session: Session, modes: Sequence[Mode], prompts: Sequence[list[int]], settings: Options) -> None:
    """Look where runs left what plain decoding, the first of `modes`, gave first after the same prompt (token ids)."""
    expected = first_tokens(modes[0].runs)
    for mode in modes:
        if mode.promised:
            mode.divergences = divergences(session, prompts, settings, expected, mode.runs)


def divergences(
    session: Session,
    prompts: Sequence[list[int]],
    settings: Options,
    expected: dict[int, list[int]],
    runs: Sequence[Run],
) -> list[Parting]:
    """Of the runs whose tokens are not those `expected` after their prompt."""
    parted = (
        find_parting(session, run.prompt, prompts[run.prompt], settings, expected[run.prompt], run.generation.token_ids)
        for run in runs
    )
    return [each for each in parted if each is not None]


def generate(session: Session, prompt: int, ids: list[int], drafter: str, settings: Options) -> Run:
    """Generate after `ids`, the whole sequence: KV of what the session holds of them already is kept."""
    stream = session.stream(ids, whole=True, **(settings | Options(drafter=drafter)))
    gaps, waits = list[float](), list[float]()
    clock, started = session.stage_clock(), perf_counter()
    before = started
    for rounds, span in enumerate(stream, start=1):
        now = perf_counter()
        if rounds > 1 and span.token_ids:
            waits.append(1000 * (now - before))
            gaps += [waits[-1] / len(span.token_ids)] * len(span.token_ids)
        if rounds == OPENING:
            clock, started = session.stage_clock(), perf_counter()
        before = perf_counter()
    wall_ms = (perf_counter() - started) * 1000
    steady = Stats()
    clock.fill(steady)
    return Run(stream.result, wall_ms, steady, tuple(gaps), prompt, tuple(waits))
