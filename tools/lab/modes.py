"""The two modes of branches side by side: `python -m outrider.tools.lab.modes PLAN [--branches 1,8] [--json]`.

The same branches after the same prefix run in one sequence, in batching (where the plan has a row for each), and one
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
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, cast

from rich.console import Console

from outrider import Runtime, Stats
from outrider.commands.arguments import Parser, counts
from outrider.plans.errors import RequestError
from outrider.runtime.branch_request import MODES, Mode
from outrider.tools.bench.prompts import choose_prompts, cut_prompts
from outrider.tools.bench.sampling import GREEDY
from outrider.tools.identity import identity_columns
from outrider.tools.measuring import (
    Column,
    add_arguments,
    drafters_named,
    make_table,
    measuring,
    middle,
    paired_ratios,
    print_head,
    run_in_turn,
    run_tool,
)

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
    cases = [(length, count, drafter) for length in prefixes for count in counts for drafter in drafters]
    runs = (1 + len(modes)) * (1 + options.reps)
    rows: list[dict[str, Any]] = []
    with measuring([1.0] * len(cases) * runs) as begin:
        for length, count, drafter in cases:
            branches = [openings[index % len(openings)] for index in range(count)]
            case = _Case(runtime, branches, drafter, options.new)
            found = run_in_turn(
                [*modes, ALONE],
                [[next(prefixes[length]) for _ in range(1 + options.reps)]],
                options.reps,
                case.run,
                begin=begin,
                within=f"prefix {length}, {count} branches, {drafter}, ",
            )
            columns = {"prefix": length, "branches": count, "drafter": drafter}
            rows += [columns | case.row(mode, found) for mode in found]
    return {
        **identity_columns(runtime, options),
        "plan": str(options.plan),
        "context": geometry.context,
        "new_tokens": options.new,
        "rows": rows,
    }


@dataclass(frozen=True)
class _Run:
    """All branches once: milliseconds, the tokens of each, and, where they ran together, what that cost."""

    ms: float
    tokens: list[list[int]]
    stats: Stats | None = None


class _Case:
    """Branches after prefixes of one length, with one drafter."""

    def __init__(self, runtime: Runtime, branches: Sequence[list[int]], drafter: str, new: int) -> None:
        self._runtime, self._branches = runtime, branches
        self._options: dict[str, Any] = {"max_new_tokens": new, "drafter": drafter, "ignore_eos": True}
        self._session = runtime.session()
        self._new = new * len(branches)

    def run(self, mode: str, prefixes: list[list[int]], repetition: int) -> _Run:
        """Run all branches after the prefix of this repetition."""
        prefix, started = prefixes[repetition], perf_counter()
        if mode != ALONE:
            stream = self._runtime.stream_branches(prefix, self._branches, mode=cast(Mode, mode), **self._options)
            tokens = [result.token_ids for result in stream.results]
            return _Run((perf_counter() - started) * 1000, tokens, stream.stats)
        session, tokens = self._session, []
        session.reset()
        for place, branch in enumerate(self._branches):
            prompt = [*prefix, *branch]
            tokens.append(session.generate(prompt, whole=True, stream_id=place, **self._options).token_ids)
        return _Run((perf_counter() - started) * 1000, tokens)

    def row(self, mode: str, found: dict[str, list[_Run]]) -> dict[str, Any]:
        """Figures of a mode beside the branches one after another."""
        runs = found[mode]
        spent = median(run.ms for run in runs)
        stats = [run.stats for run in runs if run.stats is not None]
        return {
            "mode": mode,
            "ms_per_token": spent / self._new,
            "tokens_per_second": 1000 * self._new / spent,
            "speedup": _ratio(found[ALONE], runs),
            "against_batching": _ratio(found["batching"], runs) if "batching" in found else None,
            "rounds": middle(each.rounds for each in stats),
            "host_share": middle(1 - each.engine_ms / each.total_ms for each in stats),
            "state_and_mask": middle((each.state_ms + _masks(each)) / each.total_ms for each in stats),
            "kv_bytes": stats[0].kv_bytes if stats else None,
            "bytes_copied": stats[0].bytes_copied if stats else None,
            "same_tokens": all(run.tokens == alone.tokens for run, alone in zip(runs, found[ALONE], strict=True)),
        }


def _ratio(baseline: Sequence[_Run], runs: Sequence[_Run]) -> float | None:
    """How many times as fast as the baseline, median of pairs."""
    return middle(paired_ratios((run.ms for run in baseline), (run.ms for run in runs)))


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
    console.print(make_table(_COLUMNS, report["rows"]))


_COLUMNS = (
    Column("prefix", "prefix"),
    Column("branches", "branches"),
    Column("drafter", "drafter", text=True),
    Column("mode", "mode", text=True),
    Column("ms a token", "ms_per_token", ".3f"),
    Column("tokens/s", "tokens_per_second", ".0f"),
    Column("against one by one", "speedup", ".2f", "x"),
    Column("against batching", "against_batching", ".2f", "x"),
    Column("rounds", "rounds", ".0f"),
    Column("host", "host_share", ".1%"),
    Column("state and mask", "state_and_mask", ".1%"),
    Column("KV MB", "kv_bytes", ".1f", per=1e6),
    Column("copied MB", "bytes_copied", ".1f", per=1e6),
    Column("same", "same_tokens"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the measurement."""
    return run_tool(_parser, arguments, measure, print_table)


def _parser() -> Parser:
    parser = Parser(
        prog="python -m outrider.tools.lab.modes",
        description=__doc__.partition("\n\n")[2],
        epilog="example: %(prog)s build/branches --branches 2,8 --prefix 1000 --drafters none,ngram",
    )
    parser.add_argument("plan", type=Path, help="folder of a plan with several branches")
    parser.add_argument("--branches", type=counts, metavar="N,...", help="1 to 16 (default 1, 2, 4 ... of the plan)")
    parser.add_argument("--prefix", type=counts, default=[1000], metavar="N,...", help="tokens that all share (1000)")
    add_arguments(parser, "drafters new reps prompts threads json", new=128, reps=3)
    parser.set_defaults(sampling=GREEDY, task=None)
    return parser


if __name__ == "__main__":
    sys.exit(main())
