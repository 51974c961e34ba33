"""The two modes of branches side by side: `python -m outrider.tools.lab.modes PLAN [--branches 1,8] [--json]`.

The same branches behind the same prefix run in one sequence, in batching (where the plan has a row for each), and one
after another in a session that keeps the prefix. All are measured in turn in one process, greedy, every branch `--new`
tokens long; each pays for the prefix once, which is another one in each repetition. Figures are medians, speedups are
medians of paired ratios.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports, which take a second
    from outrider.commands.process import begin

    begin()

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, cast

from rich.console import Console
from rich.table import Table

from outrider import Runtime, Stats
from outrider.commands.arguments import Parser, at_least_0, at_least_1, counts
from outrider.commands.console import progress_bar
from outrider.plans.errors import RequestError
from outrider.runtime.branch_request import MODES, Mode
from outrider.tools.arguments import drafters_named
from outrider.tools.bench.identity import identity_columns
from outrider.tools.bench.prompts import choose_prompts, cut_prompts
from outrider.tools.bench.sampling import GREEDY
from outrider.tools.measuring import run_tool
from outrider.tools.output import figure, print_head

ALONE = "one by one"
_OPENING = 12  # tokens that a branch begins with


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """A row for every prefix, number of branches, drafter and mode.

    Raises `RequestError` for what the plan cannot do.
    """
    runtime = Runtime.load(options.plan, threads=options.threads)
    geometry = runtime.manifest.target
    drafters = drafters_named(options.drafters, (drafter.name for drafter in runtime.manifest.drafters))
    if geometry.branches < 2:
        raise RequestError("The plan serves one branch; build it with capacity.branches of 2 to 16.")
    counts = options.branches or [count for count in (1, 2, 4, 8, 16) if count <= geometry.branches]
    for count in counts:
        if count > geometry.branches:
            raise RequestError(f"--branches is {count}; the plan serves at most {geometry.branches}.")
    modes = [mode for mode in MODES if mode != "batching" or geometry.rows > 1]
    held_out = [runtime.tokenizer.encode(prompt.text) for prompt in choose_prompts(options.plan, options.prompts)]
    most = geometry.context - _OPENING - options.new
    for length in options.prefix:
        if length > most:
            raise RequestError(f"--prefix is {length}; pass 1 to {most}, what the context leaves beside --new tokens.")
    prefixes = {length: _several(cut_prompts(held_out, length, most)) for length in options.prefix}
    openings = cut_prompts(held_out, _OPENING, most)
    rows: list[dict[str, Any]] = []
    cases = [(length, count, drafter) for length in prefixes for count in counts for drafter in drafters]
    with progress_bar("measuring") as progress:
        for place, (length, count, drafter) in enumerate(cases):
            progress(place, len(cases), f"prefix {length}, {count} branches, {drafter}")
            branches = [openings[index % len(openings)] for index in range(count)]
            case = _Case(runtime, prefixes[length], branches, drafter, options.new)
            columns = {"prefix": length, "branches": count, "drafter": drafter}
            rows += [columns | row for row in case.rows(modes, options.reps)]
    return {
        **identity_columns(runtime, options),
        "plan": str(options.plan),
        "context": geometry.context,
        "new_tokens": options.new,
        "rows": rows,
    }


class _Case:
    """Branches behind prefixes of one length, with one drafter."""

    def __init__(
        self, runtime: Runtime, prefixes: Iterator[list[int]], branches: Sequence[list[int]], drafter: str, new: int
    ) -> None:
        self._runtime, self._prefixes, self._branches = runtime, prefixes, branches
        self._prefix: list[int] = []
        self._options: dict[str, Any] = {"max_new_tokens": new, "drafter": drafter, "ignore_eos": True}
        self._session = runtime.session()
        self._new = new * len(branches)

    def rows(self, modes: Sequence[str], reps: int) -> list[dict[str, Any]]:
        """Figures of every mode, the branches one after another last."""
        ms: dict[str, list[float]] = {mode: [] for mode in (*modes, ALONE)}
        stats: dict[str, list[Stats]] = {mode: [] for mode in modes}
        same = dict.fromkeys(ms, True)
        for repetition in range(reps + 1):
            self._prefix = next(self._prefixes)
            tokens: dict[str, list[list[int]]] = {}
            for mode in ms if repetition % 2 else reversed(ms):
                if mode == ALONE:
                    spent, tokens[mode] = self._alone()
                else:
                    spent, tokens[mode], cost = self._together(mode)
                    stats[mode] += [cost] if repetition else []
                if repetition:  # the first warms up
                    ms[mode].append(spent)
            for mode, found in tokens.items():
                same[mode] = same[mode] and found == tokens[ALONE]
        return [self._row(mode, ms, same[mode], stats.get(mode)) for mode in ms]

    def _row(
        self,
        mode: str,
        ms: dict[str, list[float]],
        same: bool,
        stats: Sequence[Stats] | None,
    ) -> dict[str, Any]:
        spent = median(ms[mode])
        row: dict[str, Any] = {
            "mode": mode,
            "ms_per_token": spent / self._new,
            "tokens_per_second": 1000 * self._new / spent,
            "speedup": median(alone / own for alone, own in zip(ms[ALONE], ms[mode], strict=True)),
            "against_batching": None,
            "rounds": None,
            "host_share": None,
            "state_and_mask": None,
            "kv_bytes": None,
            "bytes_copied": None,
            "same_tokens": same,
        }
        if "batching" in ms:
            row["against_batching"] = median(b / own for b, own in zip(ms["batching"], ms[mode], strict=True))
        if stats:
            row["rounds"] = median(each.rounds for each in stats)
            row["host_share"] = median(1 - each.engine_ms / each.total_ms for each in stats)
            row["state_and_mask"] = median((each.state_ms + _masks(each)) / each.total_ms for each in stats)
            row["kv_bytes"], row["bytes_copied"] = stats[0].kv_bytes, stats[0].bytes_copied
        return row

    def _together(self, mode: str) -> tuple[float, list[list[int]], Stats]:
        started = perf_counter()
        stream = self._runtime.stream_branches(self._prefix, self._branches, mode=cast(Mode, mode), **self._options)
        found = [result.token_ids for result in stream.results]
        return (perf_counter() - started) * 1000, found, stream.stats

    def _alone(self) -> tuple[float, list[list[int]]]:
        session, found = self._session, []
        session.reset()
        started = perf_counter()
        for place, branch in enumerate(self._branches):
            prompt = [*self._prefix, *branch]
            found.append(session.generate(prompt, whole=True, stream_id=place, **self._options).token_ids)
        return (perf_counter() - started) * 1000, found


def _masks(stats: Stats) -> float:
    return sum(ms for name, ms in stats.stage_ms.items() if name.startswith("BimMask"))


def _several(prompts: Sequence[list[int]]) -> Iterator[list[int]]:
    """One after another and again, at least two that differ: a run would find the rows of the prefix before it."""
    (*_, last) = prompts
    return cycle([*prompts, [*last[1:], abs(last[0] - 1)]])


def print_table(report: dict[str, Any], console: Console) -> None:
    print_head(report, console)
    console.print(
        f"branches of {report['new_tokens']} tokens, greedy; medians of {report['reps']} runs, modes alternating, the "
        "prefix computed in each"
    )
    table = Table(box=None, pad_edge=False)
    heads = (
        "prefix", "branches", "drafter", "mode", "ms a token", "tokens/s", "against one by one",
        "against batching", "rounds", "host", "state and mask", "KV MB", "copied MB", "same",
    )  # fmt: skip
    for head in heads:
        table.add_column(head, justify="left" if head in ("drafter", "mode") else "right", no_wrap=head == "mode")
    for row in report["rows"]:
        table.add_row(
            str(row["prefix"]),
            str(row["branches"]),
            row["drafter"],
            row["mode"],
            f"{row['ms_per_token']:.3f}",
            f"{row['tokens_per_second']:.0f}",
            f"{row['speedup']:.2f}x",
            figure(row["against_batching"], ".2f", "x"),
            figure(row["rounds"], ".0f"),
            figure(row["host_share"], ".1%"),
            figure(row["state_and_mask"], ".1%"),
            figure(None if row["kv_bytes"] is None else row["kv_bytes"] / 1e6, ".1f"),
            figure(None if row["bytes_copied"] is None else row["bytes_copied"] / 1e6, ".1f"),
            "yes" if row["same_tokens"] else "no",
        )
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the measurement."""
    return run_tool(lambda: _parser().parse_args(arguments), measure, print_table)


def _parser() -> Parser:
    parser = Parser(
        prog="python -m outrider.tools.lab.modes",
        description=__doc__.partition("\n\n")[2],
        epilog="example: %(prog)s build/branches --branches 2,8 --prefix 1000 --drafters none,ngram",
    )
    parser.add_argument("plan", type=Path, help="folder of a plan with several branches")
    parser.add_argument("--branches", type=counts, metavar="N,...", help="1 to 16 (default 1, 2, 4 ... of the plan)")
    parser.add_argument("--prefix", type=counts, default=[1000], metavar="N,...", help="tokens that all share (1000)")
    parser.add_argument("--drafters", metavar="NAME,...", help="of the plan, or none (default: none and all)")
    parser.add_argument("--new", type=at_least_1, default=128, help="tokens of each branch (default 128)")
    parser.add_argument("--reps", type=at_least_1, default=3, help="runs of each mode (default 3)")
    parser.add_argument("--prompts", type=Path, help='JSONL of {"prompt": ...} (default: the recipe\'s held_out)')
    parser.add_argument("--threads", type=at_least_0, default=0, help="0: the backend chooses")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(sampling=GREEDY, task=None)
    return parser


if __name__ == "__main__":
    sys.exit(main())
