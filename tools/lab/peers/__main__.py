"""`python -m outrider.tools.lab.peers CKPT`: our engine against others, on the same checkpoint, prompts and threads."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from outrider.commands.arguments import Parser, at_least_0
from outrider.commands.console import guarded
from outrider.commands.packages import optional_packages
from outrider.tools.identity import describe_run
from outrider.tools.lab.peers.engine import PRECISIONS
from outrider.tools.measuring import add_arguments, names_among, print_report


def main(arguments: list[str] | None = None) -> int:
    return guarded(lambda: _run(_parser().parse_args(arguments)))


def _parser() -> Parser:
    parser = Parser(
        prog="python -m outrider.tools.lab.peers",
        description="Generate from the same prompts with Outrider (plain decoding, and every drafter of the plan), "
        "transformers (plain, assisted by a draft model, prompt lookup), onnxruntime-genai (plain, n-gram lookup, "
        "draft model), OpenVINO GenAI and llama.cpp (plain, prompt lookup, draft model): greedy, batch 1, the same "
        "number of threads, end tokens ignored, in each --precision for itself. Every engine has a process of its "
        "own, in which its model is loaded once; one generates at a time, in turn, once the others use no CPU. Prints "
        "ratios of pairs, ours to theirs, how far the tokens are the same, and what is missing and why.",
        epilog="example: %(prog)s plans/reference/target --draft plans/reference/model --plan build/reference",
    )
    parser.add_argument("checkpoint", type=Path, metavar="CKPT", help="folder of a Hugging Face checkpoint")
    parser.add_argument(
        "--precision", type=names_among(PRECISIONS), metavar="fp32,int8,int4",
        help="of the weights, one or several (default: those of the plans given, or fp32)",
    )  # fmt: skip
    parser.add_argument(
        "--plan", type=Path, action="append", default=[],
        help="our plan of the checkpoint; may be repeated, once for a precision (default: one is built, with an n-gram "
        "drafter and DRAFT)",
    )  # fmt: skip
    parser.add_argument(
        "--draft",
        type=Path,
        metavar="CKPT",
        help="folder of a draft model's checkpoint, for every engine that takes one",
    )
    add_arguments(parser, "prompts task count new reps json", count=12, new=128, reps=3)
    parser.add_argument(
        "--threads", type=at_least_0, default=0, help="of every engine; 0: the number of cores (default)"
    )
    parser.add_argument(
        "--work", type=Path, default=Path("build"), metavar="DIR",
        help="where checkpoints in other formats, and a plan built here, are kept for the next time (default build)",
    )  # fmt: skip
    return parser


def _run(options: argparse.Namespace) -> int:
    with optional_packages("This comparison", "compiler,dev"):
        from outrider.tools.lab.peers.figures import print_table
        from outrider.tools.lab.peers.measure import measure

        report = {**describe_run(), **measure(options)}
    return print_report(report, options.json, print_table)


if __name__ == "__main__":
    sys.exit(main())
