"""`python -m compiler build | inspect | verify | tune | recipe`."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports, which take a second
    from plans.process import begin

    begin()

import argparse
import sys
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from plans.arguments import Parser, at_least_1, number
from plans.console import guarded, print_json, progress_bar, stderr, stdout
from plans.errors import OutriderError
from plans.extras import install

if TYPE_CHECKING:
    from compiler.recipe import Recipe

_OURS = ("compiler", "plans", "plugins", "runtime")
_SHOWN = 10  # tokens that differ, in the text of verify


def main(arguments: list[str] | None = None, called: str = "python -m compiler") -> int:
    """Run a command; `called` is what the user typed before its name."""
    return guarded(lambda: _run(_parser(called).parse_args(arguments)))


def _run(options: argparse.Namespace) -> int:
    try:
        return int(options.command(options))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in _OURS:
            raise
        raise OutriderError(
            f"The compiler needs {error.name}, which is not installed; {install('compiler')}."
        ) from None


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
        epilog=f"{called} recipe prints every key that a recipe may have, and what --set may override.",
    )
    build.add_argument("recipe", type=Path, help="the recipe, a YAML file")
    build.add_argument("--out", type=Path, help="folder of the plan (default: build/NAME)")
    build.add_argument(
        "--backend", action="append", default=[], metavar="NAME", dest="backends",
        help="backend to build for, in place of the recipe's; may be repeated",
    )  # fmt: skip
    _add_set(build)
    build.add_argument("--json", action="store_true", help="print one JSON object")
    build.set_defaults(command=_build)

    inspect = commands.add_parser(
        "inspect", help="what a plan holds", description="Show a plan: geometry, programs, op counts, lowering."
    )
    inspect.add_argument("plan", type=Path, help="folder of the plan")
    inspect.add_argument("--json", action="store_true", help="print one JSON object")
    inspect.set_defaults(command=_inspect)

    verify = commands.add_parser(
        "verify",
        help="compare a plan with its checkpoint in transformers",
        description="Compare a plan with its checkpoint, run by transformers in float32, on the recipe's held-out "
        "text: logits, greedy tokens, near ties. Every drafter's tokens are compared with those of plain decoding. "
        "Exit status 1 if a logit is further off than rounding explains, or a token differs where it is no near tie.",
    )
    verify.add_argument("plan", type=Path, help="folder of the plan")
    verify.add_argument("--recipe", type=Path, help="the recipe (default: where the plan was built from)")
    _add_set(verify)
    verify.add_argument("--prompts", type=at_least_1, default=8, help="held-out prompts to run (default 8)")
    verify.add_argument("--new-tokens", type=at_least_1, default=64, help="greedy tokens per prompt (default 64)")
    verify.add_argument(
        "--oracle", choices=("auto", "transformers", "decoder"), default="auto",
        help="what runs the checkpoint: transformers, or Outrider's own decoder, which reads config.json as the build "
        "did (default: transformers where it is installed)",
    )  # fmt: skip
    verify.add_argument("--json", action="store_true", help="print one JSON object")
    verify.set_defaults(command=_verify)
    _add_tune(commands, called)
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
    return parser


def _add_tune(commands: argparse._SubParsersAction[Parser], called: str) -> None:
    tune = commands.add_parser(
        "tune",
        help="choose a draft tree for this machine",
        description="Choose the draft tree of an EAGLE3 head or a draft model for this machine. A wider, deeper tree "
        "has more tokens accepted and costs more to draft and to verify; where that pays is measured: the target's "
        "pass by nodes, the drafter's by top_k and depth, and what held-out prompts accept of wide trees. The best "
        "few trees are then built and timed against plain decoding. Prints the table behind the choice, and writes "
        "a copy of the recipe with the chosen tree and a PNG of the table beside it.",
        epilog="Takes minutes, and room for two plans in the folder for temporary files (TMPDIR). Leave the machine "
        f"alone meanwhile. example: {called} tune build/reference --drafter eagle3, then "
        f"{called} build plans/recipes/reference.tuned.yaml",
    )
    tune.add_argument("plan", type=Path, help="folder of the plan")
    tune.add_argument("--drafter", metavar="NAME", help="the drafter to tune (default: the plan's first with a tree)")
    tune.add_argument("--prompts", type=Path, help='JSONL of {"prompt": ...} (default: the recipe\'s held_out)')
    tune.add_argument("--count", type=at_least_1, default=8, help="prompts to run (default 8)")
    tune.add_argument("--new", type=at_least_1, default=128, help="tokens per prompt (default 128)")
    tune.add_argument(
        "--temperature",
        type=number(0),
        default=0.0,
        help="of the runs (default 0, greedy): choose the one that will be used",
    )
    tune.add_argument("--out", type=Path, help="where the copy is written (default: NAME.tuned.yaml beside the recipe)")
    tune.add_argument("--recipe", type=Path, help="the recipe (default: where the plan was built from)")
    _add_set(tune)
    tune.add_argument("--json", action="store_true", help="print one JSON object")
    tune.set_defaults(command=_tune)


def _add_set(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
        help="override a key of the recipe, such as capacity.context=2048; may be repeated",
    )  # fmt: skip


def _build(options: argparse.Namespace) -> int:
    from compiler.recipe import load_recipe

    started = perf_counter()
    recipe = load_recipe(options.recipe, options.overrides)
    recipe = recipe.for_backends(options.backends) if options.backends else recipe
    out: Path = options.out or Path("build") / recipe.name
    with progress_bar("building") as bar:
        from compiler.build import build

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
    from compiler.inspect import describe, print_description

    description = describe(options.plan)
    if options.json:
        print_json(description)
    else:
        print_description(description, stdout)
    return 0


def _recipe_of(options: argparse.Namespace) -> Recipe:
    """The recipe that the plan was built from, or the one given."""
    from compiler.recipe import load_recipe, source_recipe

    if options.recipe is None:
        return source_recipe(options.plan, option="--recipe FILE", overrides=options.overrides)
    return load_recipe(options.recipe, options.overrides)


def _verify(options: argparse.Namespace) -> int:
    from compiler.verify import verify_plan

    recipe = _recipe_of(options)
    with progress_bar("verifying prompts") as progress:
        result = verify_plan(
            recipe,
            options.plan,
            prompts=options.prompts,
            new_tokens=options.new_tokens,
            oracle=options.oracle,
            progress=lambda done, total: progress(done, total, ""),
        )
    if options.json:
        print_json(result.to_json())
    else:
        stdout.print(
            f"against {result.oracle}: {result.prompts} prompts, {result.tokens} tokens, largest logit error "
            f"{result.max_logit_error:.2e} (at most {result.logit_bound:.0e}), {result.equal_runs} runs with equal "
            "greedy tokens"
        )
        for d in result.divergences[:_SHOWN]:
            kind = "near tie" if d.near_tie else "DIFFERENT"
            stdout.print(
                f"  prompt {d.prompt}, token {d.index}: {kind}, plan {d.plan_token}, oracle {d.torch_token}, "
                f"margin {d.margin:.2e} (tolerance {result.tolerance:.2e})"
            )
        if len(result.divergences) > _SHOWN:
            stdout.print(f"  and {len(result.divergences) - _SHOWN} more (--json lists all)")
        for how, checks in (("greedy", result.drafters), ("sampled", result.sampled)):
            for name, check in checks.items():
                stdout.print(
                    f"drafter {name}, {how}: {check.tokens_per_verify:.2f} tokens per verify, {check.equal_runs} runs "
                    "with the tokens of plain decoding"
                )
                for p in check.partings[:_SHOWN]:
                    kind = "near tie" if p.near_tie else "DIFFERENT"
                    stdout.print(
                        f"  prompt {p.prompt}, token {p.index}: {kind}, plain {p.plain_token}, drafted "
                        f"{p.drafted_token}, margin {p.margin:.2e} (tolerance {result.tolerance:.2e})"
                    )
        partial = result.partial_kv
        if partial is not None and partial.runs == 0:
            stdout.print(f"partial KV was not checked: contexts of {partial.context} tokens leave no room for the run")
        elif partial is not None:
            stdout.print(
                f"partial KV, behind {partial.context} tokens: lossless {partial.lossless_equal_runs} of "
                f"{partial.runs} runs with the tokens of full KV; lossy drifts: {_share(partial.agreement)} of tokens "
                f"as with full KV where those before are, {partial.lossy_equal_runs} runs the same, "
                f"{_share(partial.same)} of tokens before the first that differs"
            )
        stdout.print(f"the plan {'agrees' if result.passed else 'does NOT agree'} with its checkpoint")
    return 0 if result.passed else 1


def _recipe(options: argparse.Namespace) -> int:
    from compiler.recipe_keys import NOTE, choose_keys, print_keys, recipe_keys, recipe_schema

    if options.json:
        print_json(recipe_schema())
    elif options.key is not None:
        print_keys(choose_keys(options.key), stdout)
    else:
        print_keys(recipe_keys(), stdout)
        stdout.print(NOTE, markup=False)
    return 0


def _share(value: float | None) -> str:
    return "no" if value is None else f"{value:.1%}"


def _tune(options: argparse.Namespace) -> int:
    from compiler.recipe_copy import RecipeCopy
    from compiler.tune import tunable, tune_plan
    from compiler.tune_table import draw_tuning, print_tuning
    from plans.plan import read_manifest

    drafter = tunable(read_manifest(options.plan), options.drafter).name
    recipe = _recipe_of(options)
    out: Path = options.out or recipe.path.with_name(f"{recipe.path.stem}.tuned.yaml")
    copy = RecipeCopy(recipe.path, out, drafter)
    with progress_bar("tuning") as progress:
        found = tune_plan(
            recipe,
            options.plan,
            drafter=drafter,
            prompts=options.prompts,
            count=options.count,
            new_tokens=options.new,
            temperature=options.temperature,
            overrides=options.overrides,
            progress=progress,
        )
    picture = out.with_suffix(".png")
    drawn = draw_tuning(found, picture)
    if not options.json:
        print_tuning(found, stdout)
    copy.write(found.chosen.tree)
    if options.json:
        print_json(found.to_json() | {"recipe": str(out), "png": str(picture) if drawn else None})
    else:
        stdout.print(f"\nwrote {out}{f' and {picture}' if drawn else ''}")
    if not drawn:
        stderr.print("no picture was drawn: matplotlib is not installed (`pip install matplotlib`)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
