"""How good a model is by length of context: `python -m outrider.tools.lab.context_quality RECIPE [--lengths 4096]`.

All text is held out: files of the standard library that the reference models did not learn from. Two things are
measured, with the recipe's rope scaling and, up to twice the trained length, with the checkpoint's own.

Loss: files one after another make documents of the longest length. For every length L, the nats that a token at the
positions from L/2 up to L costs on average. Texts differ more than lengths do, so the same tokens are read in short
windows as well: the difference is what the context beyond them is worth, and more than 0 is harm.

Questions: imports under other names are strewn into a text, and after it the model is asked for each of them, as in
the reference target's training (reference/tasks.py); another model may not know that form. A question counts as
answered where greedy decoding gives the right name and ends; who finds imports, but not which, names any of them.

Last comes the length from which on the model is out of its depth, by a rule that is printed with it.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports, which take a second
    from outrider.commands.process import begin

    begin()

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from outrider.commands.arguments import Parser, at_least_1, counts
from outrider.tools.lab.context_quality.measure import MOST_CONTEXTS, measure
from outrider.tools.lab.context_quality.table import print_table
from outrider.tools.measuring import add_arguments, run_tool


def main(arguments: Sequence[str] | None = None) -> int:
    return run_tool(_parser, arguments, measure, print_table)


def _parser() -> Parser:
    parser = Parser(
        prog="python -m outrider.tools.lab.context_quality",
        description=__doc__.partition("\n\n")[2],
        epilog="example: %(prog)s plans/recipes/reference-long.yaml --lengths 4096,8192,16384",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", type=Path, help="the recipe, a YAML file; no plan is needed")
    parser.add_argument(
        "--lengths",
        type=counts,
        metavar="N,...",
        help="in tokens (default: 1024, doubled up to the recipe's context)",
    )
    parser.add_argument("--documents", type=at_least_1, default=3, metavar="N", help="to read for the loss (default 3)")
    parser.add_argument(
        "--contexts",
        type=at_least_1,
        default=2,
        metavar="N",
        help="to ask after at the longest length; shorter ones have as many tokens of them, but at most "
        f"{MOST_CONTEXTS}N contexts (default 2)",
    )
    parser.add_argument(
        "--needles", type=at_least_1, default=3, metavar="N", help="imports in a context, and questions (default 3)"
    )
    parser.add_argument(
        "--library", type=Path, help="standard library to read, such as /usr/lib/python3.11 (default: this Python's)"
    )
    add_arguments(parser, "json")
    return parser


if __name__ == "__main__":
    sys.exit(main())
