"""`python -m tools.bench latency | against`: what a plan costs, in paired runs on this machine."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from plans.console import guarded, print_json, stdout
from tools.bench.machine import describe_machine


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    return guarded(lambda: int(options.command(options)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.bench", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    latency = commands.add_parser(
        "latency",
        help="plain decoding against the plan's drafters",
        description="Run plain decoding and every drafter alternately on held-out prompts in one process: tokens/s, "
        "paired speedup, tokens per verify, host share, and whether the tokens are the same.",
    )
    latency.add_argument("plan", type=Path)
    latency.add_argument("--prompts", type=Path, help='JSONL of {"prompt": ...} (default: the recipe\'s held_out)')
    latency.add_argument("--count", type=int, default=12, help="prompts to run (default 12)")
    latency.add_argument("--drafters", help="comma-separated (default: all of the plan)")
    latency.add_argument("--new", type=int, default=128, help="tokens to generate (default 128)")
    latency.add_argument("--reps", type=int, default=3, help="runs of each prompt and mode (default 3)")
    latency.add_argument("--temperature", type=float, default=0.0)
    latency.add_argument("--threads", type=int, default=0)
    latency.add_argument("--json", action="store_true")
    latency.set_defaults(command=_latency)

    against = commands.add_parser(
        "against",
        help="plain decoding against other engines on the same weights",
        description="Decode the same prompts greedily with this plan, transformers (PyTorch eager), and "
        "onnxruntime-genai where it is installed, alternately in one process.",
    )
    against.add_argument("plan", type=Path)
    against.add_argument("--checkpoint", type=Path, help="the plan's checkpoint (default: the recipe's)")
    against.add_argument("--new", type=int, default=128, help="tokens to generate (default 128)")
    against.add_argument("--reps", type=int, default=5, help="runs of each engine (default 5)")
    against.add_argument("--threads", type=int, default=0, help="for every engine; 0: all cores")
    against.add_argument("--json", action="store_true")
    against.set_defaults(command=_against)
    return parser


def _latency(options: argparse.Namespace) -> int:
    from tools.bench.latency import measure, print_table

    report = {"machine": describe_machine(), **measure(options)}
    if options.json:
        print_json(report)
    else:
        print_table(report, stdout)
    return 0


def _against(options: argparse.Namespace) -> int:
    from tools.bench.against import measure, print_table

    report = {"machine": describe_machine(), **measure(options)}
    if options.json:
        print_json(report)
    else:
        print_table(report, stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
