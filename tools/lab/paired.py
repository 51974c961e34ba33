"""Two versions of this package by turns: `python -m outrider.tools.lab.paired BEFORE [--plan PLAN] [--json]`.

BEFORE is another checkout of the repository, with an installed `.venv` and a plan of its own at the same path. For
every way, drafter and number of threads, each version runs in a process of its own, and they generate one burst at a
time, the same prompt first by one and then by the other. A shared machine's speed drifts over seconds, so only bursts
that follow each other are compared; where its memory lies makes one process faster than another of the same version, so
both are started several times. Figures are medians; `after / before` is the median of the ratios of the pairs with its
quartiles, below 1 where this checkout is faster; `fastest` compares the fastest burst of each, and `host us` are
microseconds a round outside the engines. Where a cell has two figures, the first is BEFORE's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from outrider.commands.arguments import Parser, at_least_1, counts
from outrider.plans.errors import RequestError
from outrider.plans.plan import open_plan
from outrider.plans.tokenizer import Tokenizer
from outrider.tools.bench.prompts import choose_prompts, cut_prompts
from outrider.tools.identity import git_sha
from outrider.tools.lab.child import Child, ChildError
from outrider.tools.measuring import (
    Column,
    add_arguments,
    drafters_named,
    figure,
    make_table,
    measuring,
    middle,
    paired_ratios,
    run_in_turn,
    run_tool,
    spread,
    within,
)

HERE = Path(__file__).resolve().parents[2]
_WARM_UP = 2  # bursts of each start that do not count
WAYS = ("session", "in-one-sequence", "batching", "submit")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """A row for every way, drafter and number of threads. Raises `RequestError` where a side cannot run."""
    sides = {"before": options.before.resolve(), "after": HERE}
    plans = {name: root / options.plan for name, root in sides.items()}
    for name, root in sides.items():
        if not _python(root).is_file():
            raise RequestError(f"{root} ({name}) has no .venv; install the package there first (tools/test.sh does).")
        if not (plans[name] / "plan.json").is_file():
            raise RequestError(f"{plans[name]} ({name}) is no plan; build it with that checkout first.")
    plan = open_plan(plans["after"])
    target = plan.manifest.target
    drafters = drafters_named(options.drafters, (drafter.name for drafter in plan.manifest.drafters))
    ways = _ways(options.ways, target.branches, target.rows)
    tokenizer = Tokenizer.load(plan.root / "tokenizer")
    chosen = [tokenizer.encode(prompt.text) for prompt in choose_prompts(plan.root, options.prompts)]
    prompts = cut_prompts(chosen, options.prompt_len, target.context - options.new)
    cases = [(way, drafter, threads) for way in ways for drafter in drafters for threads in options.threads]
    rows = []
    runs = options.starts * (options.pairs + _WARM_UP) * len(sides)
    with measuring([1.0] * len(cases) * runs) as begin:
        for way, drafter, threads in cases:
            several = 1 if way == "session" else min(options.sequences, target.branches)
            asked = {"drafter": drafter, "way": way, "threads": threads, "sequences": several, "new": options.new}
            bursts: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
            for start in range(options.starts):  # who allocates first was measured 5 % slower: by turns
                order = sides if start % 2 else dict(reversed(sides.items()))
                shown = within(f"{way}, {drafter}, {threads or 'all'} threads, start {start}", begin)
                found = _bursts(order, plans, asked | {"prompts": prompts}, options.pairs, shown)
                bursts = {name: [*bursts[name], *found[name]] for name in sides}
            rows.append({"way": way, "drafter": drafter, "threads": threads, "sequences": several} | _row(bursts))
    return {
        "commits": {name: git_sha(root) for name, root in sides.items()},
        "plan": str(options.plan),
        "starts": options.starts,
        "pairs": options.pairs,
        "new_tokens": options.new,
        "rows": rows,
    }


def _ways(asked: str | None, branches: int, rows: int) -> list[str]:
    """The ways that `--ways` names, or all that the plan has. Raises `RequestError` for one that it does not have."""
    known = [way for way in WAYS if way == "session" or (branches > 1 and (way != "batching" or rows > 1))]
    chosen = known if asked is None else asked.split(",")
    if wrong := [way for way in chosen if way not in known]:
        raise RequestError(f"--ways names {wrong[0]!r}; the plan has {', '.join(known)}.")
    return chosen


def _bursts(
    sides: dict[str, Path], plans: dict[str, Path], asked: dict[str, Any], pairs: int, begin: Callable[[str], None]
) -> dict[str, list[dict[str, Any]]]:
    """What each side printed for its bursts, in pairs, without those that warm up."""
    with ExitStack() as stack:
        running = {
            name: stack.enter_context(_Version(root, asked | {"plan": str(plans[name])}))
            for name, root in sides.items()
        }
        return run_in_turn(
            list(sides), [None], pairs, lambda name, *_: running[name].burst(), warm_up=[None] * _WARM_UP, begin=begin
        )


class _Version(Child):
    """A process of a checkout's own Python, with that checkout's packages before all others."""

    def __init__(self, root: Path, asked: dict[str, Any]) -> None:
        self._root = root
        source = Path(__file__).with_name("paired_worker.py").read_text("utf-8")
        super().__init__([str(_python(root)), "-c", source, json.dumps(asked)], cwd=root)

    def burst(self) -> dict[str, Any]:
        """Have one burst generated. Raises `RequestError` with the last line of a process that has failed."""
        try:
            found: dict[str, Any] = json.loads(self.ask())
        except ChildError as error:
            raise RequestError(f"The version in {self._root} has failed: {error}") from None
        return found


def _row(bursts: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    before, after = bursts["before"], bursts["after"]
    row: dict[str, Any] = {}
    for name, found in bursts.items():
        row[f"{name}_ms_per_token"] = median(each["ms"] / sum(map(len, each["tokens"])) for each in found)
        row[f"{name}_host_us"] = middle(each["host_us"] for each in found)
    row |= spread("ratio", paired_ratios(*([each["ms"] for each in found] for found in (after, before))), (25, 75))
    row["ratio_of_fastest"] = min(each["ms"] for each in after) / min(each["ms"] for each in before)
    row["same_tokens"] = all(a["tokens"] == b["tokens"] for a, b in zip(before, after, strict=True))
    return row


def _python(root: Path) -> Path:
    return root / ".venv" / "bin" / "python"


def print_table(report: dict[str, Any], console: Console) -> None:
    machine, commits = report["machine"], report["commits"]
    console.print(
        f"{machine['processor']}, {machine['cores']} cores; {commits['after']} (after) against {commits['before']} "
        f"(before); plan {report['plan']}, {report['starts']} starts of {report['pairs']} pairs of bursts of "
        f"{report['new_tokens']} tokens a sequence"
    )
    console.print(make_table(_COLUMNS, report["rows"]))


def _host(row: dict[str, Any]) -> str | None:
    both = [row[f"{name}_host_us"] for name in ("before", "after")]
    return None if both[1] is None else ", ".join(figure(each, ".0f") for each in both)


_COLUMNS = (
    Column("way", "way", text=True),
    Column("drafter", "drafter", text=True),
    Column("threads", lambda row: row["threads"] or "all"),
    Column("sequences", "sequences"),
    Column("ms a token", lambda row: f"{row['before_ms_per_token']:.3f}, {row['after_ms_per_token']:.3f}"),
    Column("after / before", "ratio", ".3f"),
    Column("quartiles", lambda row: f"{row['ratio_p25']:.3f} to {row['ratio_p75']:.3f}"),
    Column("fastest", "ratio_of_fastest", ".3f"),
    Column("host us", _host),
    Column("same", "same_tokens"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_tool(_parser, arguments, measure, print_table)


def _parser() -> Parser:
    parser = Parser(
        prog="python -m outrider.tools.lab.paired",
        description=__doc__.partition("\n\n")[2],
        epilog="example: %(prog)s ../outrider-before --plan build/branches --ways session,submit --drafters none,ngram",
    )
    parser.add_argument("before", type=Path, help="folder of the other checkout, installed, with the plan built")
    parser.add_argument(
        "--plan", type=Path, default=Path("build/reference"), help="the plan's path in both (default build/reference)"
    )
    parser.add_argument("--ways", metavar="NAME,...", help=f"of {', '.join(WAYS)} (default: all of the plan)")
    add_arguments(parser, "drafters prompts json")
    parser.add_argument("--threads", type=counts, default=[0], metavar="N,...", help="default: the backend chooses")
    parser.add_argument("--sequences", type=at_least_1, default=8, help="at once, but for session (default 8)")
    parser.add_argument("--new", type=at_least_1, default=64, help="tokens of each sequence in a burst (default 64)")
    parser.add_argument("--prompt-len", type=at_least_1, default=64, help="length of a prompt (default 64)")
    parser.add_argument("--pairs", type=at_least_1, default=8, help="pairs of bursts after each start (default 8)")
    parser.add_argument("--starts", type=at_least_1, default=6, help="times both are started (default 6)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
