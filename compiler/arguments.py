"""Options of every command that reads a recipe."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.compiler.recipe import Recipe


def add_set(command: argparse.ArgumentParser) -> None:
    """Add `--set KEY=VALUE`, repeatable, which overrides a key of the recipe."""
    command.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
        help="override a key of the recipe, such as capacity.context=2048; may be repeated",
    )  # fmt: skip


def add_recipe(command: argparse.ArgumentParser) -> None:
    """Add `--recipe` and `--set`, for commands that take a plan and need the recipe that the plan was built from."""
    command.add_argument("--recipe", type=Path, help="the recipe (default: where the plan was built from)")
    add_set(command)


def recipe_of(options: argparse.Namespace) -> Recipe:
    """Load the recipe that `--recipe` names, or that the plan of `options` was built from. Raises `RecipeError`."""
    from outrider.compiler.recipe import load_recipe, source_recipe

    if options.recipe is None:
        return source_recipe(options.plan, option="--recipe FILE", overrides=options.overrides)
    return load_recipe(options.recipe, options.overrides)
