"""The harness of all tools that measure: cases in turn, medians, ratios of pairs, a table, and JSON."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from math import ceil
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Literal, TypeVar

from rich.console import Console
from rich.table import Table

from outrider.commands.arguments import Parser, at_least_0, at_least_1
from outrider.commands.console import guarded, print_json, progress_bar, stdout
from outrider.plans.errors import OutriderError, RequestError

Row = dict[str, Any]
Report = dict[str, Any]
Case = TypeVar("Case", bound=Hashable)
Item = TypeVar("Item")
Result = TypeVar("Result")

# Running


def turns(
    cases: Sequence[Case], items: Sequence[Item], reps: int, warm_up: Sequence[Item]
) -> Iterator[tuple[int, int, Item, Case]]:
    """The runs of `run_in_turn` in their order: repetition (0 warms up), index of the item, item, case."""
    yield from ((0, index, item, case) for index, item in enumerate(warm_up) for case in cases)
    for repetition in range(1, reps + 1):
        for index, item in enumerate(items):
            for case in cases[:: 1 if repetition % 2 else -1]:
                yield repetition, index, item, case


def run_in_turn(
    cases: Sequence[Case],
    items: Sequence[Item],
    reps: int,
    run: Callable[[Case, Item, int], Result],
    *,
    warm_up: Sequence[Item] | None = None,
    begin: Callable[[str], None] | None = None,
    leave: Callable[[Case, Item, OutriderError], Iterable[Case]] | None = None,
) -> dict[Case, list[Result]]:
    """Run every case on each of `items` `reps` times, after runs on `warm_up` (default: the first item) that do not
    count. Cases alternate on an item, in reverse order in every second repetition, so that none always has the same
    one before it.

    `run` gets the repetition too, 0 in the warm-up. Returns the results of each case, by repetition and item: those at
    one index are a pair. `begin` is called with a text before every run; without it there is a progress bar. `leave`
    names the cases that cannot continue after an error, whose results are dropped; a case that is not among them is
    run again.
    """
    warm_up = items[:1] if warm_up is None else warm_up
    if begin is None:
        with measuring([1.0] * (len(cases) * (len(warm_up) + reps * len(items)))) as shown:
            return run_in_turn(cases, items, reps, run, warm_up=warm_up, begin=shown, leave=leave)
    found: dict[Case, list[Result]] = {case: [] for case in cases}
    for repetition, index, item, case in turns(cases, items, reps, warm_up):
        while case in found:
            begin(f"repetition {repetition}, prompt {index}, {case}" if repetition else f"warming up {case}")
            try:
                result = run(case, item, repetition)
            except OutriderError as error:
                if leave is None:
                    raise
                for gone in leave(case, item, error):
                    found.pop(gone, None)
            else:
                found[case] += [result] if repetition else []
                break
    return found


@contextmanager
def measuring(
    costs: Sequence[float], title: str = "measuring", clock: Callable[[], float] = perf_counter
) -> Iterator[Callable[[str], None]]:
    """A progress bar over steps of these `costs`, in any unit: yields what to call as each step begins.

    The time left is that of the steps done, by their costs. `clock` gives seconds.
    """
    done, index, started = [0.0, *accumulate(costs)], 0, clock()
    with progress_bar(title) as show:

        def begin(text: str) -> None:
            nonlocal index
            before = done[min(index, len(costs))]
            left = (clock() - started) * (done[-1] - before) / before if before else None
            show(min(index, len(costs)), len(costs), text, left)
            index += 1

        yield begin


def within(what: str, begin: Callable[[str], None]) -> Callable[[str], None]:
    """`begin`, whose texts start with `what`."""
    return lambda text: begin(f"{what}, {text}")


# Figures


def percentile(ranked: Sequence[float], share: int) -> float | None:
    """The smallest value that at least `share` % do not exceed; None of none."""
    return ranked[max(ceil(len(ranked) * share / 100) - 1, 0)] if ranked else None


def middle(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return median(found) if found else None


def spread(name: str, values: Iterable[float | None], shares: Sequence[int] = (10, 90)) -> dict[str, float | None]:
    """Median of those that are not None, and the percentiles of `shares`: `name`, `name_p10`, `name_p90`."""
    ranked = sorted(value for value in values if value is not None)
    return {name: middle(ranked), **{f"{name}_p{share}": percentile(ranked, share) for share in shares}}


def paired_ratios(above: Iterable[float], below: Iterable[float]) -> list[float]:
    return [one / other for one, other in zip(above, below, strict=True)]


# Output


@dataclass(frozen=True)
class Column:
    """A column of a table: its head, and what it shows of a row: the figure of this key, as in JSON, or what a function
    makes of the row; divided by `per`, in a format, with its unit. None is `-`, a truth `yes` or `no`."""

    head: str
    value: str | Callable[[Row], Any]
    form: str = ""
    unit: str = ""
    per: float | None = None
    text: bool = False

    def cell(self, row: Row) -> str:
        found = row[self.value] if isinstance(self.value, str) else self.value(row)
        if isinstance(found, bool):
            return "yes" if found else "no"
        if self.per is not None and found is not None:
            found /= self.per
        return figure(found, self.form, self.unit)


def figure(value: Any, form: str, unit: str = "") -> str:
    """A value by its format and with its unit; "-" where there is none."""
    return "-" if value is None else f"{value:{form}}{unit}"


def make_table(columns: Sequence[Column], rows: Iterable[Row], *, narrow: bool = False) -> Table:
    """A table without lines: texts on the left, figures on the right. A `narrow` one breaks heads at spaces and inside
    CamelCase, and wraps texts."""
    table = Table(box=None, pad_edge=False)
    for column in columns:
        head = re.sub(r" |(?<=[a-z])(?=[A-Z])", "\n", column.head) if narrow else column.head
        justify: Literal["left", "right"] = "left" if column.text else "right"
        table.add_column(head, justify=justify, no_wrap=not (narrow and column.text), overflow="fold")
    for row in rows:
        table.add_row(*(column.cell(row) for column in columns))
    return table


def print_head(report: Report, console: Console) -> None:
    """What a report of `identity_columns` was measured with, and where."""
    machine = report["machine"]
    console.print(
        f"{report['device']}, {machine['cores']} cores, {report['threads']} threads; {report['backend']} "
        f"({report['backend_version']}), {report['dtype']}; commit {report['git_sha']}, plan {report['identity'][:12]}"
    )


def print_report(report: Report, as_json: bool, print_table: Callable[[Report, Console], None]) -> int:
    """One JSON object, or a table. The command's exit status."""
    if as_json:
        print_json(report)
    else:
        print_table(report, stdout)
    return 0


# Commands

_ARGUMENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "plan": ("plan", {"type": Path, "help": "folder of the plan"}),
    "prompts": ("--prompts", {"type": Path, "help": 'JSONL of {"prompt": ...} (default: the recipe\'s held_out)'}),
    "drafters": ("--drafters", {"metavar": "NAME,...", "help": "of the plan, or none (default: none and all)"}),
    "task": ("--task", {"metavar": "NAME", "help": "prompts of one task alone (default: of all, in turn)"}),
    "count": ("--count", {"type": at_least_1, "help": "prompts to run"}),
    "new": ("--new", {"type": at_least_1, "help": "tokens to generate"}),
    "reps": ("--reps", {"type": at_least_1, "help": "runs of each"}),
    "threads": ("--threads", {"type": at_least_0, "default": 0, "help": "0: the backend chooses"}),
    "json": ("--json", {"action": "store_true", "help": "print one JSON object"}),
}


def add_arguments(parser: argparse.ArgumentParser, names: str, **defaults: int) -> None:
    """Add arguments that several tools have, by their `names` with spaces between; numbers need a default."""
    for name in names.split():
        flag, options = _ARGUMENTS[name]
        if name in defaults:
            options = options | {"default": defaults[name], "help": f"{options['help']} (default {defaults[name]})"}
        parser.add_argument(flag, **options)


def names_among(known: Iterable[str]) -> Callable[[str], list[str]]:
    """For `add_argument`'s `type`: names with commas between, each of which is `known`."""

    def read(text: str) -> list[str]:
        names = [word.strip() for word in text.split(",")]
        if wrong := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"is {wrong[0]!r}; choose from {', '.join(known)}")
        return names

    return read


def drafters_named(asked: str | None, known: Iterable[str]) -> list[str]:
    """The drafters of `--drafters NAME,...`, of which "none" is one; all of them by default.

    Raises `RequestError` for a name that is not `known`.
    """
    names = ["none", *known]
    chosen = names if asked is None else asked.split(",")
    if wrong := [name for name in chosen if name not in names]:
        raise RequestError(f"--drafters names {wrong[0]!r}; the plan has {', '.join(names)}.")
    return chosen


def run_tool(
    make_parser: Callable[[], Parser],
    arguments: Sequence[str] | None,
    measure: Callable[[argparse.Namespace], Report],
    print_table: Callable[[Report, Console], None],
) -> int:
    """Parse the command line, measure, and print a table or JSON; return the exit status."""

    def run() -> int:
        from outrider.tools.identity import describe_run  # loads the runtime, which a table does not need

        options = make_parser().parse_args(arguments)
        return print_report({**describe_run(), **measure(options)}, options.json, print_table)

    return guarded(run)
