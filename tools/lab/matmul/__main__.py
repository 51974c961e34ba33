"""Products with quantised weights in three engines: `python -m outrider.tools.lab.matmul --shape 150m,1b`."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports, which take a second
    from outrider.commands.process import begin

    begin()

import argparse
import sys
from collections.abc import Iterable, Sequence

from outrider.commands.arguments import Parser, counts
from outrider.tools.lab.matmul.measure import measure
from outrider.tools.lab.matmul.shapes import SHAPES
from outrider.tools.lab.matmul.table import print_table
from outrider.tools.measuring import add_arguments, run_tool


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the measurement."""
    return run_tool(_parser, arguments, measure, print_table)


def _shapes(text: str) -> list[str]:
    return [_known(word.strip(), SHAPES) for word in text.split(",")]


def _bits(text: str) -> list[int]:
    types = {"int4": 4, "int8": 8}
    return [types[_known(word.strip(), types)] for word in text.split(",")]


def _known(word: str, known: Iterable[str]) -> str:
    if word not in known:
        raise argparse.ArgumentTypeError(f"is {word!r}; choose from {', '.join(known)}")
    return word


def _parser() -> Parser:
    parser = Parser(
        prog="python -m outrider.tools.lab.matmul",
        description="All products of a model with random quantised weights, chained in one graph: our QuantMatMul, "
        "ONNX Runtime's MatMulNBits (accuracy level 4, blocks of 32) and OpenVINO's compressed MatMul (groups of 32), "
        "by turns in one process. Minima and medians, and what part of their time ours takes.",
        epilog="example: %(prog)s --shape 150m,1b --rows 1,8 --types int4",
    )
    parser.add_argument(
        "--shape",
        type=_shapes,
        default=["150m"],
        metavar="NAME,...",
        help="40m, 150m (targets of tools.lab.synthetic_pair), 1b, 1b-128k (a Llama of 1B with 32k or 128k tokens; "
        "default 150m)",
    )
    parser.add_argument(
        "--rows", type=counts, default=[1, 4, 8, 16, 32], metavar="N,...", help="rows of a pass (1,4,8,16,32)"
    )
    parser.add_argument("--types", type=_bits, dest="bits", default=[4, 8], metavar="int4,int8", help="of the weights")
    add_arguments(parser, "reps threads json", reps=15)
    return parser


if __name__ == "__main__":
    sys.exit(main())
