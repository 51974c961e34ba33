"""Compare a plan with its checkpoint: `outrider verify PLAN [--oracle auto|transformers|decoder] [--json]`."""

from __future__ import annotations

import argparse
import sys

from outrider.commands.arguments import Parser, at_least_1
from outrider.commands.console import guarded, print_json, progress_bar, stdout
from outrider.commands.packages import optional_packages
from outrider.compiler.arguments import add_recipe, recipe_of
from outrider.tools.measuring import add_arguments


def main(arguments: list[str] | None = None, called: str = "python -m outrider.tools.verify") -> int:
    """Run the command; `called` is what the user typed before the arguments."""
    return guarded(lambda: _run(_parser(called).parse_args(arguments)))


def _run(options: argparse.Namespace) -> int:
    with optional_packages("The command", "compiler"):
        return _verify(options)


def _parser(called: str) -> Parser:
    parser = Parser(
        prog=called,
        description="Compare a plan with its checkpoint, run by transformers in float32, on the recipe's held-out "
        "text: logits, greedy tokens, near ties. Every drafter's tokens are compared with those of plain decoding. "
        "On the CPU, every op is run in 1 to 32 rows on this machine: a row must have the same bits in any company. "
        "Exit status 1 if a logit is further off than rounding explains, a token differs where it is no near tie, or a "
        "row has other bits.",
        epilog=f"example: {called} build/reference --count 2",
    )
    add_arguments(parser, "plan")
    add_recipe(parser)
    add_arguments(parser, "prompts count json", count=8)
    parser.add_argument("--new-tokens", type=at_least_1, default=64, help="greedy tokens per prompt (default 64)")
    parser.add_argument(
        "--texts",
        type=at_least_1,
        help="held-out prompts on which what quantised weights cost is measured (default: all)",
    )
    parser.add_argument(
        "--oracle", choices=("auto", "transformers", "decoder"), default="auto",
        help="what runs the checkpoint: transformers, or Outrider's own decoder, which reads config.json as the build "
        "did (default: transformers where it is installed)",
    )  # fmt: skip
    return parser


def _verify(options: argparse.Namespace) -> int:
    from outrider.tools.verify.table import print_verification
    from outrider.tools.verify.verification import Extent, verify_plan

    recipe = recipe_of(options)
    extent = Extent(options.prompts, options.count, options.new_tokens, options.texts)
    with progress_bar("verifying prompts") as progress:
        result = verify_plan(recipe, options.plan, extent, oracle=options.oracle, progress=progress)
    if options.json:
        print_json(result.to_json())
    else:
        print_verification(result, stdout)
    return 0 if result.passed else 1


if __name__ == "__main__":
    sys.exit(main())
