"""`python -m outrider.compiler build | inspect | recipe | families`."""

from __future__ import annotations

if __name__ == "__main__":  # before the other imports, which take a second
    from outrider.commands.process import begin

    begin()

import argparse
import sys
from pathlib import Path
from time import perf_counter

from outrider.commands.arguments import Parser
from outrider.commands.console import guarded, print_json, progress_bar, stderr, stdout
from outrider.commands.packages import optional_packages
from outrider.compiler.arguments import add_set


def main(arguments: list[str] | None = None, called: str = "python -m outrider.compiler") -> int:
    """Run a command; `called` is what the user typed before its name."""
    return guarded(lambda: _run(_parser(called).parse_args(arguments)))


def _run(options: argparse.Namespace) -> int:
    with optional_packages("The compiler", "compiler"):
        return int(options.command(options))


def _parser(called: str) -> Parser:
    parser = Parser(
        prog=called,
        description="Compile a recipe (model.yaml) into a plan, and look at plans.",
        epilog=f"example: {called} build plans/recipes/reference.yaml --out build/reference",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    build = commands.add_parser(
        "build",
        help="recipe to plan",
        description="Build the plan of a recipe.",
        epilog="examples: %(prog)s plans/recipes/reference.yaml; %(prog)s path/to/checkpoint; "
        f"%(prog)s model.yaml --set capacity.context=4096 --out build/wide. {called} recipe prints every key that a "
        "recipe may have, and what --set may override.",
    )
    build.add_argument(
        "recipe", type=Path,
        help="the recipe, a YAML file; of a checkpoint, a folder or a GGUF file, a recipe is written beside the plan",
    )  # fmt: skip
    build.add_argument("--out", type=Path, help="folder of the plan (default: build/NAME)")
    build.add_argument(
        "--backend", action="append", default=[], metavar="NAME", dest="backends",
        help="backend to build for, in place of the recipe's; may be repeated",
    )  # fmt: skip
    add_set(build)
    build.add_argument("--json", action="store_true", help="print one JSON object")
    build.set_defaults(command=_build)

    inspect = commands.add_parser(
        "inspect",
        help="what a plan holds",
        description="Show a plan: geometry, programs, op counts, lowering.",
        epilog="example: %(prog)s build/reference",
    )
    inspect.add_argument("plan", type=Path, help="folder of the plan")
    inspect.add_argument("--json", action="store_true", help="print one JSON object")
    inspect.set_defaults(command=_inspect)

    recipe = commands.add_parser(
        "recipe",
        help="the keys of a recipe",
        description="Print the keys that a recipe (model.yaml) may have, with their types, defaults and meaning.",
        epilog="examples: %(prog)s drafters.eagle3; %(prog)s capacity.context; %(prog)s --json > recipe.schema.json",
    )
    asked = recipe.add_mutually_exclusive_group()
    asked.add_argument(
        "key", nargs="?", help="one mapping or key alone, such as capacity, drafters.ngram or target.rope_scaling"
    )
    asked.add_argument("--json", action="store_true", help="print the JSON schema, for editors that check YAML by one")
    recipe.set_defaults(command=_recipe)

    families = commands.add_parser(
        "families",
        help="the models that can be compiled",
        description="Print the families of models that can be compiled, by the model_type in their config.json.",
        epilog="examples: %(prog)s; %(prog)s --json",
    )
    families.add_argument("--json", action="store_true", help="print one JSON object")
    families.set_defaults(command=_families)
    return parser


def _build(options: argparse.Namespace) -> int:
    from outrider.compiler.default_recipe import is_checkpoint, write_recipe
    from outrider.compiler.recipe import load_recipe

    started = perf_counter()
    if is_checkpoint(options.recipe):
        options.recipe = write_recipe(options.recipe, options.out)
        stderr.print(f"the recipe is {options.recipe}: change it there, and build it again", soft_wrap=True)
    recipe = load_recipe(options.recipe, options.overrides)
    recipe = recipe.for_backends(options.backends) if options.backends else recipe
    out: Path = options.out or Path("build") / recipe.name
    with progress_bar("building") as bar:
        from outrider.compiler.build import build

        built = build(recipe, options.recipe, out, bar)
    seconds = perf_counter() - started
    manifest = built.plan.manifest
    size = sum(f.size for f in manifest.files)
    if options.json:
        print_json(
            {
                "plan": str(out),
                "identity": manifest.identity,
                "reused": list(built.reused),
                "backends": list(manifest.backends),
                "bytes": size,
                "seconds": round(seconds, 3),
            }
        )
    else:
        reused = f", reused: {', '.join(built.reused)}" if built.reused else ""
        stdout.print(f"{out}: {size / 1e6:.1f} MB, identity {manifest.identity[:12]}, {seconds:.1f} s{reused}")
    return 0


def _inspect(options: argparse.Namespace) -> int:
    from outrider.compiler.inspect import describe, print_description

    description = describe(options.plan)
    if options.json:
        print_json(description)
    else:
        print_description(description, stdout)
    return 0


def _recipe(options: argparse.Namespace) -> int:
    from outrider.compiler.recipe_keys import NOTE, choose_keys, print_keys, recipe_keys, recipe_schema

    if options.json:
        print_json(recipe_schema())
    elif options.key is not None:
        print_keys(choose_keys(options.key), stdout)
    else:
        print_keys(recipe_keys(), stdout)
        stdout.print(NOTE, markup=False)
    return 0


def _families(options: argparse.Namespace) -> int:
    from outrider.compiler.families_table import family_rows, print_families

    if options.json:
        print_json({"families": family_rows()})
    else:
        print_families(stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
