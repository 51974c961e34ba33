"""Prompts to measure with: held-out ones, and prompts of a length that are made of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from compiler.held_out import read_prompts
from compiler.recipe import source_recipe
from plans.errors import RequestError


def choose_prompts(plan: Path, path: Path | None) -> list[str]:
    """Those of `path`, or the held-out prompts of the recipe that the plan was built from."""
    if path is None:
        recipe = source_recipe(plan, option="--prompts FILE")
        if recipe.held_out_path is None:
            raise RequestError(
                'The plan\'s recipe names no held_out prompts; pass --prompts FILE of {"prompt": ...} lines.'
            )
        path = recipe.held_out_path
    return read_prompts(path)


def cut_prompts(prompts: Sequence[list[int]], length: int, most: int) -> list[list[int]]:
    """Prompts of exactly `length` tokens: the ends of long ones, short ones behind the ones before them.

    Raises `RequestError` where the plan's context has no room for it.
    """
    if not 1 <= length <= most:
        raise RequestError(f"--prompt-len is {length}; pass 1 to {most}, what the context leaves beside --new tokens.")
    found: list[list[int]] = []
    for index in range(len(prompts)):
        tokens: list[int] = []
        for step in range(len(prompts) * (1 + length)):
            tokens = prompts[(index - step) % len(prompts)] + tokens
            if len(tokens) >= length:
                break
        found.append(tokens[-length:])
    return found
