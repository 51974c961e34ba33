"""What a pass of the target costs by its rows: measured on a plan as it is, and written beside its `plan.json`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter

from rich.console import Console

from outrider import Runtime
from outrider.plans import names
from outrider.plans.errors import RequestError
from outrider.plans.pass_prices import PassPrices, Price, write_pass_prices
from outrider.plans.plan import open_plan
from outrider.runtime.pass_prices import conditions_here
from outrider.tools.measuring import Column, make_table

CONTEXT = 512  # tokens after which passes are timed, unless the caller says
_LEAST, _MOST = 5, 25  # runs of each size
_SECONDS = 8.0  # that runs beyond the least may take


def price_plan(
    plan: Path,
    *,
    context: int | None = None,
    threads: int = 0,
    progress: Callable[[int, int, str], None] = lambda *_: None,
) -> tuple[PassPrices, Path]:
    """Time passes of the plan's target after `context` tokens (default: 512, or half of the plan's context), and write
    the table; return it and its file.

    `threads` as of `Runtime.load`. A table that was there is replaced. Raises `PlanError` and `RequestError` for what
    cannot be loaded, timed or written.
    """
    opened = open_plan(plan, verify=False)
    geometry = opened.manifest.target
    after = min(CONTEXT, geometry.context // 2) if context is None else context
    if not opened.manifest.drafters:
        raise RequestError(f"{plan} has no drafter, so that its passes verify nothing; tune a plan that has one.")
    if not 1 <= after <= geometry.context - 2:
        raise RequestError(
            f"context is {after}; pass 1 to {geometry.context - 2} tokens: the plan's context is {geometry.context}."
        )
    total = 2 + _LEAST
    progress(0, total, "loading the plan")
    runtime = Runtime.load(plan, threads=threads, verify=False)
    with runtime.session() as session:
        progress(1, total, f"computing {after} tokens")
        prompt = [1 + (7 * place) % (geometry.vocab_size - 1) for place in range(after)]
        session.generate(prompt, drafter="none", max_new_tokens=1, ignore_eos=True, partial_kv="off")
        room = min(geometry.context, session.limits[names.VIEW]) - after - 1
        rows, states = session.limits[names.LOGITS], session.manifest.target.states
        most = min(rows if states is None else min(rows, states.log), 1 + room)
        spent: dict[int, list[float]] = {rows: [] for rows in sizes(most)}
        began, runs = perf_counter(), 0
        while runs < _LEAST or (runs < _MOST and perf_counter() - began < _SECONDS):
            progress(min(2 + runs, total - 1), total, f"timing passes of 1 to {most} rows")
            for rows, found in spent.items():
                found.append(session.time_round([1] * (rows - 1), None))
            runs += 1
    table = PassPrices(
        **asdict(conditions_here(opened, runtime.backend, threads)),
        context=after,
        prices=tuple(Price(rows=rows, ms=median(found[1:])) for rows, found in spent.items()),  # the first warmed up
    )
    return table, write_pass_prices(table, opened.root)


def sizes(most: int) -> list[int]:
    """Rows to time, up to `most`: every number up to 16, then eight sizes from each power of two to the next."""
    found, rows = [], 1
    while rows < most:
        found.append(rows)
        rows += 1 << max(0, rows.bit_length() - 4)
    return [*found, most]


def print_prices(table: PassPrices, console: Console) -> None:
    console.print(
        f"milliseconds of a pass of the target after {table.context} tokens, by rows: {table.backend}, "
        f"{table.device}, {table.threads} threads"
    )
    columns = (Column("rows", "rows"), Column("ms", "ms", ".3f"), Column("ms a row more", "more", ".3f"))
    steps = [None, *((b.ms - a.ms) / (b.rows - a.rows) for a, b in pairwise(table.prices))]
    rows = ({"rows": each.rows, "ms": each.ms, "more": more} for each, more in zip(table.prices, steps, strict=True))
    console.print(make_table(columns, rows))
