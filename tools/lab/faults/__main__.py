"""Faults while a plan is served: `python -m outrider.tools.lab.faults PLAN [--only NAME,...] [--minutes N] [--json]`.

Every scenario starts a server of its own, puts it under load, breaks something, and compares every answer with the
tokens that plain decoding gives. The table says what became of all requests, and what the server holds afterwards that
it did not hold before. The exit status is 1 where a request was lost or has other tokens, or where anything leaked.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from time import monotonic
from typing import Any

from rich.console import Console

from outrider.commands.arguments import Parser, at_least_0, at_least_1, number
from outrider.commands.console import guarded, progress_bar
from outrider.commands.packages import optional_packages
from outrider.plans.errors import OutriderError, RequestError
from outrider.plans.plan import open_plan
from outrider.tools.bench.prompts import prompts_file
from outrider.tools.identity import describe_run, git_sha
from outrider.tools.lab.faults.figures import Figures
from outrider.tools.measuring import Column, add_arguments, make_table, print_report

_WHOLE = 60.0  # minutes of the whole form, which are shared out among the scenarios
SCENARIOS = {
    "killed": ("replicas:kill", "replicas on Ray Serve are killed under load"),
    "starved-replica": ("replicas:starve", "a replica on Ray Serve may take no more memory"),
    "disconnects": ("slow_clients:disconnect", "clients leave at random moments, deadlines are milliseconds"),
    "malformed": ("malformed:run", "10,000 bodies that are wrong, and requests that are none"),
    "slow-clients": ("slow_clients:run", "clients send and read a byte a second"),
    "clock": ("clock:run", "the wall clock jumps by an hour and a day, there and back"),
    "full-disk": ("full_disk:run", "no room to save the prefix cache"),
    "out-of-memory": ("out_of_memory:run", "the server may take no more memory"),
    "replaced-plan": ("replaced_plan:run", "the plan is replaced, moved, built over, written over"),
}
"""By name, in the order in which they run: module and function, and what is done to the server."""


def main(arguments: Sequence[str] | None = None) -> int:
    return guarded(lambda: _run(_parser().parse_args(arguments)))


def _run(options: argparse.Namespace) -> int:
    with optional_packages("The server", "serve"):
        from outrider.tools.lab.faults.questions import make_questions
        from outrider.tools.lab.faults.setting import Setting
    names = list(SCENARIOS) if options.only is None else options.only.split(",")
    if wrong := [name for name in names if name not in SCENARIOS]:
        raise RequestError(f"--only names {wrong[0]!r}; choose from {', '.join(SCENARIOS)}.")
    manifest, prompts = open_plan(options.plan).manifest, prompts_file(options.plan, options.prompts)
    questions = make_questions(options.plan, options.questions, options.seed, options.new, prompts, options.threads)
    seconds = 60 * options.minutes / len(names)
    report: dict[str, Any] = {
        **describe_run(),
        "git_sha": git_sha(),
        "identity": manifest.identity,
        "minutes": options.minutes,
        "clients": options.clients,
        "seed": options.seed,
        "rows": [],
    }
    with tempfile.TemporaryDirectory(prefix="outrider-faults-") as folder, progress_bar("faults") as progress:
        for place, name in enumerate(names):
            work = Path(folder) / name
            work.mkdir()
            setting = Setting(
                options.plan.resolve(),
                questions,
                work,
                seconds,
                options.seed,
                options.clients,
                scale=min(1.0, options.minutes / _WHOLE * len(SCENARIOS) / len(names)),
                threads=options.threads,
                new=options.new,
                prompts=prompts,  # of copies of the plan too, which find no recipe
                show=lambda what, place=place, name=name: progress(place, len(names), f"{name}: {what}"),  # type: ignore[misc]
            )
            report["rows"].append(_figures(name, setting).to_json())
    print_report(report, options.json, _print)
    return 0 if all(row["passed"] for row in report["rows"]) else 1


def _figures(name: str, setting: Any) -> Figures:
    """A scenario's figures; an error that ends it is one of the things that are wrong."""
    module, _, function = SCENARIOS[name][0].partition(":")
    run: Callable[[Any, Figures], None] = getattr(import_module(f"outrider.tools.lab.faults.{module}"), function)
    figures, began = Figures(name), monotonic()
    try:
        run(setting, figures)
    except (OutriderError, OSError) as error:
        figures.fail(f"The scenario ended with {type(error).__name__}: {error}")
    figures.seconds = round(monotonic() - began, 1)
    return figures


def _print(report: dict[str, Any], console: Console) -> None:
    machine = report["machine"]
    console.print(
        f"{machine['processor']}, {machine['cores']} cores; commit {report['git_sha']}, "
        f"plan {report['identity'][:12]}; {report['minutes']:g} minutes, {report['clients']} clients, "
        f"seed {report['seed']}; {report['time']}"
    )
    console.print(make_table(_COLUMNS, report["rows"]))
    for row in report["rows"]:
        if row["notes"]:
            console.print(f"{row['name']}: " + ", ".join(f"{name} {value}" for name, value in row["notes"].items()))
        for sentence in row["wrong"]:
            console.print(f"{row['name']} failed: {sentence}", markup=False)


_COLUMNS = (
    Column("what", "name", text=True),
    *(Column(key, key) for key in ("faults", "sent", "answered", "refused", "cut", "lost", "different", "retried")),
    Column("files", "leaked_files", "+d"),
    Column("threads", "leaked_threads", "+d"),
    Column("MB", "leaked_mb", "+.0f"),
    Column("s", "seconds", ".0f"),
    Column("passed", "passed"),
)


def _parser() -> Parser:
    scenarios = "; ".join(f"{name}: {what}" for name, (_, what) in SCENARIOS.items())
    parser = Parser(
        prog="python -m outrider.tools.lab.faults",
        description=__doc__.partition("\n\n")[2],
        epilog=f"example: %(prog)s build/branches --only malformed,disconnects --minutes 10; scenarios: {scenarios}",
    )
    parser.add_argument("plan", type=Path, help="folder of a plan")
    parser.add_argument("--only", metavar="NAME,...", help="scenarios to run (default: all)")
    parser.add_argument(
        "--minutes",
        type=number(above=0),
        default=_WHOLE,
        metavar="N",
        help="minutes under load, shared by all scenarios (60)",
    )
    parser.add_argument("--clients", type=at_least_1, default=32, metavar="N", help="clients that ask at once (32)")
    parser.add_argument("--seed", type=at_least_0, default=1, metavar="N", help="seed of all random choices (1)")
    parser.add_argument("--questions", type=at_least_1, default=48, metavar="N", help="different requests (48)")
    parser.add_argument("--new", type=at_least_1, default=40, metavar="N", help="most new tokens of a choice (40)")
    parser.add_argument("--threads", type=at_least_0, default=1, metavar="N", help="of each server's engines (1)")
    add_arguments(parser, "prompts json")
    return parser


if __name__ == "__main__":
    sys.exit(main())
