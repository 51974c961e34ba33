"""Options of every command that reads a recipe."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from compiler.recipe import Recipe


def add_set(command: argparse.ArgumentParser) -> None:
    """`--set KEY=VALUE`, repeatable: what the recipe is to have in place of what it says."""
    command.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
        help="override a key of the recipe, such as capacity.context=2048; may be repeated",
    )  # fmt: skip


def add_recipe(command: argparse.ArgumentParser) -> None:
    """`--recipe` and `--set`, for commands that take a plan and need the recipe that it was built from."""
    command.add_argument("--recipe", type=Path, help="the recipe (default: where the plan was built from)")
    add_set(command)


def recipe_of(options: argparse.Namespace) -> Recipe:
    """The recipe that `add_recipe` has taken, or that the plan of `options` was built from. Raises `RecipeError`."""
    from compiler.recipe import load_recipe, source_recipe

    if options.recipe is None:
        return source_recipe(options.plan, option="--recipe FILE", overrides=options.overrides)
    return load_recipe(options.recipe, options.overrides)
