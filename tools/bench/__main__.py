"""`python -m tools.bench latency | startup | embedded`: what a plan costs, on this machine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from plans.console import guarded, print_json, stdout
from plans.errors import OutriderError
from tools.arguments import at_least_1
from tools.bench.machine import describe_machine


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    return guarded(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    try:
        return int(options.command(options))
    except ModuleNotFoundError as error:
        raise OutriderError(
            f"This benchmark needs {error.name}, which is not installed; run `pip install -e '.[compiler,dev]'`."
        ) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.bench", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    latency = commands.add_parser(
        "latency",
        help="plain decoding against the plan's drafters",
        description="Run plain decoding and drafters alternately on held-out prompts in one process, by wall clock: "
        "tokens/s, paired speedup, tokens per verify, milliseconds a round by stage, what of a round no engine "
        "accounts for (host gap), and whether the tokens are the same.",
        epilog="example: python -m tools.bench latency build/reference --drafters ngram,eagle3 --temperature 0.7",
    )
    latency.add_argument("plan", type=Path, help="folder of the plan")
    latency.add_argument("--prompts", type=Path, help='JSONL of {"prompt": ...} (default: the recipe\'s held_out)')
    latency.add_argument("--task", metavar="NAME", help="prompts of one task alone (default: of all, in turn)")
    latency.add_argument("--count", type=at_least_1, default=12, help="prompts to run (default 12)")
    latency.add_argument(
        "--drafters",
        metavar="NAME|KIND,...",
        help="by name, or all of a kind (ngram, model, eagle3); none, plain decoding, always runs (default: all)",
    )
    latency.add_argument("--new", type=int, default=128, help="tokens to generate (default 128)")
    latency.add_argument("--reps", type=at_least_1, default=3, help="runs of each prompt and mode (default 3)")
    latency.add_argument(
        "--prompt-len", type=at_least_1, metavar="N", help="prompts of exactly N tokens, made of the held-out ones"
    )
    latency.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    latency.add_argument("--top-k", type=int, default=0, help="keep the k most probable tokens; 0 is off (default)")
    latency.add_argument("--top-p", type=float, default=1.0, help="keep the most probable tokens up to p; 1 is off")
    latency.add_argument("--seed", type=int, default=0, help="seed of the draws (default 0)")
    latency.add_argument(
        "--keep-drafting", action="store_true", help="draft even where the runtime would see that it does not pay"
    )
    latency.add_argument("--threads", type=int, default=0, help="0: the backend chooses")
    latency.add_argument("--target", help="execution target (default: the best that this machine drives)")
    printed = latency.add_mutually_exclusive_group()
    printed.add_argument("--json", action="store_true", help="print one JSON object")
    printed.add_argument("--csv", action="store_true", help="print a line for each drafter, with every figure")
    printed.add_argument("--markdown", action="store_true", help="print the main figures as a Markdown table")
    latency.set_defaults(command=_latency)

    startup = commands.add_parser(
        "startup",
        help="from nothing to the first token",
        description="Start fresh processes one after another: time to import the runtime, to load the plan, and to "
        "the first token of a short prompt. Medians and spread.",
    )
    startup.add_argument("plan", type=Path)
    startup.add_argument("--reps", type=at_least_1, default=5, help="processes to start (default 5)")
    startup.add_argument("--threads", type=int, default=0, help="0: the backend chooses")
    startup.add_argument("--json", action="store_true")
    startup.set_defaults(command=_startup)

    embedded = commands.add_parser(
        "embedded",
        help="from C against from Python",
        description="Compile a C program against the library, and run it and a Python program that does the same in "
        "turn, in fresh processes: plain greedy decoding of a held-out prompt, milliseconds a token.",
    )
    embedded.add_argument("plan", type=Path)
    embedded.add_argument("--prompts", type=Path, help='JSONL of {"prompt": ...} (default: the recipe\'s held_out)')
    embedded.add_argument("--new", type=at_least_1, default=256, help="tokens to generate (default 256)")
    embedded.add_argument("--reps", type=at_least_1, default=7, help="pairs of processes (default 7)")
    embedded.add_argument("--runs", type=at_least_1, default=5, help="generations of each process (default 5)")
    embedded.add_argument("--json", action="store_true")
    embedded.set_defaults(command=_embedded)
    return parser


def _embedded(options: argparse.Namespace) -> int:
    from tools.bench.embedded import measure, print_table

    return _report(measure(options), options, print_table)


def _latency(options: argparse.Namespace) -> int:
    from tools.bench.latency import measure
    from tools.bench.tables import print_table, to_csv, to_markdown

    if not (options.csv or options.markdown):
        return _report(measure(options), options, print_table)
    report = {"machine": describe_machine(), **measure(options)}
    print(to_csv(report) if options.csv else to_markdown(report), end="" if options.csv else "\n")
    return 0


def _startup(options: argparse.Namespace) -> int:
    from tools.bench.startup import measure, print_table

    return _report(measure(options), options, print_table)


def _report(
    measured: dict[str, Any], options: argparse.Namespace, print_table: Callable[[dict[str, Any], Console], None]
) -> int:
    report = {"machine": describe_machine(), **measured}
    if options.json:
        print_json(report)
    else:
        print_table(report, stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
