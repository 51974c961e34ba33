"""Modes by turns in one session: what every comparison of drafters with plain decoding runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

from outrider import Session, Stats
from outrider.runtime.options.options import Options
from outrider.tools.bench.rows import OPENING, Divergence, Mode, Run, first_tokens
from outrider.tools.verify.agreement import find_parting

Ask = Callable[[str, int], Sequence[Run]]
"""Run the drafter of a name behind the prompt, or through the question, of an index: a run for each generation."""

Begin = Callable[[Mode, int, str], None]
"""A run of a mode behind the prompt of an index begins; the text says which one."""


def alternate(modes: Sequence[Mode], count: int, reps: int, ask: Ask, begin: Begin) -> None:
    """Run every mode on each of `count` prompts `reps` times, after one run of each that warms up: in turn, and the
    other way round in every second repetition, so that none has the same one before it always."""
    for mode in modes:
        begin(mode, 0, f"warming up {mode.variant}")
        ask(mode.variant.name, 0)
    for repetition in range(reps):
        for index in range(count):
            for mode in modes[:: -1 if repetition % 2 else 1]:
                begin(mode, index, f"repetition {repetition}, prompt {index}, {mode.variant}")
                mode.runs += ask(mode.variant.name, index)


def compare(session: Session, modes: Sequence[Mode], prompts: Sequence[list[int]], settings: Options) -> None:
    """Look where runs left what plain decoding, the first of `modes`, gave first behind the same prompt (token ids)."""
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
) -> list[Divergence]:
    """Of the runs whose tokens are not those `expected` behind their prompt."""
    found = []
    for run in runs:
        ids = prompts[run.prompt]
        parted = find_parting(session, ids, settings, expected[run.prompt], run.generation.token_ids)
        if parted is not None:
            found.append(Divergence(run.prompt, len(ids), *parted))
    return found


def generate(session: Session, prompt: int, ids: list[int], drafter: str, settings: Options) -> Run:
    """Generate behind `ids`, the whole sequence: KV of what the session holds of them already is kept."""
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
