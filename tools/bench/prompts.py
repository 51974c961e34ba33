"""Prompts to measure with: held-out ones, and prompts of a length that are made of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, zip_longest
from pathlib import Path

from compiler.held_out import Prompt, read_tasks
from compiler.recipe import source_recipe
from plans.errors import RequestError


def choose_prompts(plan: Path, path: Path | None, task: str | None = None) -> list[Prompt]:
    """Those of `path`, or the held-out prompts of the recipe that the plan was built from; all, or those of `task`.

    One of every task comes first, then a second one of each, so that the first few cover all tasks.
    """
    if path is None:
        recipe = source_recipe(plan, option="--prompts FILE")
        if recipe.held_out_path is None:
            raise RequestError(
                'The plan\'s recipe names no held_out prompts; pass --prompts FILE of {"prompt": ...} lines.'
            )
        path = recipe.held_out_path
    by_task: dict[str | None, list[Prompt]] = {}
    for prompt in read_tasks(path):
        by_task.setdefault(prompt.task, []).append(prompt)
    if task is not None:
        if task not in by_task:
            named = ", ".join(sorted(name for name in by_task if name))
            has = f"has the tasks {named}; pass one of those" if named else "names no tasks; leave it out"
            raise RequestError(f"--task is {task!r}, but {path} {has}.")
        return by_task[task]
    return [prompt for prompt in chain.from_iterable(zip_longest(*by_task.values())) if prompt is not None]


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
