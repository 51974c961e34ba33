"""Choose the draft tree of a plan's drafter for this machine: `outrider tune PLAN [--drafter NAME] [--json]`.

With `--prices`, only the table of what passes cost is measured, which says how much of a draft is verified.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from outrider.commands.arguments import Parser, at_least_0, at_least_1, number
from outrider.commands.console import guarded, print_json, progress_bar, report_error, stderr, stdout
from outrider.commands.packages import optional_packages
from outrider.compiler.arguments import add_recipe, recipe_of
from outrider.plans.errors import PlanError, RequestError
from outrider.tools.measuring import add_arguments


def main(arguments: list[str] | None = None, called: str = "python -m outrider.tools.tune") -> int:
    """Run the command; `called` is what the user typed before the arguments."""
    return guarded(lambda: _run(_parser(called).parse_args(arguments)))


def _run(options: argparse.Namespace) -> int:
    if options.prices:
        return _price(options)
    with optional_packages("The command", "compiler"):
        return _tune(options)


def _parser(called: str) -> Parser:
    parser = Parser(
        prog=called,
        description="Choose the draft tree of a head (EAGLE3, block) or a draft model for this machine. A wider, "
        "deeper tree has more tokens accepted and costs more to draft and to verify; where that pays is measured: the "
        "target's pass by nodes, the drafter's by top_k and depth, and what held-out prompts accept of wide "
        "trees. The best few trees are then built and timed against plain decoding. Prints the table after the "
        "choice, and writes a copy of the recipe with the chosen tree and a PNG of the table beside it. At last "
        "it times the plan's own target by rows and writes prices.json into the plan, by which generations on "
        "this machine verify no more of a draft than is worth its price; a plan that is built anew needs that "
        "again (--prices).",
        epilog="Takes minutes (--prices: seconds), and room for two plans in the folder for temporary files (TMPDIR). "
        f"Leave the machine alone meanwhile. example: {called} build/reference --drafter eagle3, then "
        "outrider build plans/recipes/reference.tuned.yaml",
    )
    add_arguments(parser, "plan")
    parser.add_argument(
        "--prices",
        action="store_true",
        help="measure and write prices.json alone, and print it; of the options, --context, --threads and --json count",
    )
    parser.add_argument(
        "--context",
        type=at_least_1,
        metavar="N",
        help="tokens after which passes are priced (default: 512, or half of the plan's context)",
    )
    parser.add_argument(
        "--threads",
        type=at_least_0,
        default=0,
        help="that passes are priced with, the number that generations will have (default 0: the backend chooses)",
    )
    parser.add_argument("--drafter", metavar="NAME", help="the drafter to tune (default: the plan's first with a tree)")
    add_arguments(parser, "prompts count json", count=8)
    parser.add_argument("--new", type=at_least_1, default=128, help="tokens per prompt (default 128)")
    parser.add_argument(
        "--temperature",
        type=number(0),
        default=0.0,
        help="of the runs (default 0, greedy): choose the one that will be used",
    )
    parser.add_argument(
        "--out", type=Path, help="where the copy is written (default: NAME.tuned.yaml beside the recipe)"
    )
    add_recipe(parser)
    return parser


def _price(options: argparse.Namespace) -> int:
    from outrider.tools.tune.prices import price_plan, print_prices

    with progress_bar("pricing") as progress:
        table, path = price_plan(options.plan, context=options.context, threads=options.threads, progress=progress)
    if options.json:
        print_json(table.model_dump() | {"file": str(path)})
    else:
        print_prices(table, stdout)
        stdout.print(f"\nwrote {path}")
    return 0


def _tune(options: argparse.Namespace) -> int:
    from outrider.compiler.recipe_copy import RecipeCopy
    from outrider.plans.plan import read_manifest
    from outrider.tools.tune.prices import price_plan
    from outrider.tools.tune.search import Runs, tunable, tune_plan
    from outrider.tools.tune.table import draw_tuning, print_tuning

    drafter = tunable(read_manifest(options.plan), options.drafter).name
    recipe = recipe_of(options)
    out: Path = options.out or recipe.path.with_name(f"{recipe.path.stem}.tuned.yaml")
    copy = RecipeCopy(recipe.path, out, drafter)
    with progress_bar("tuning") as progress:
        runs = Runs(options.prompts, options.count, options.new, options.temperature)
        found = tune_plan(recipe, options.plan, runs, drafter=drafter, overrides=options.overrides, progress=progress)
    prices: Path | None = None
    try:
        with progress_bar("pricing") as progress:
            _, prices = price_plan(options.plan, context=options.context, threads=options.threads, progress=progress)
    except (PlanError, RequestError) as error:  # the tree is chosen all the same
        report_error(error)
    picture = out.with_suffix(".png")
    drawn = draw_tuning(found, picture)
    if not options.json:
        print_tuning(found, stdout)
    copy.write(found.chosen.tree)
    if options.json:
        files = {"recipe": str(out), "png": str(picture) if drawn else None, "prices": str(prices) if prices else None}
        print_json(found.to_json() | files)
    else:
        written = [out, *([picture] if drawn else []), *([prices] if prices else [])]
        stdout.print(f"\nwrote {', '.join(map(str, written))}")
    if not drawn:
        stderr.print("no picture was drawn: matplotlib is not installed (`pip install matplotlib`)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
