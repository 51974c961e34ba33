"""Prompts to measure with: held-out ones, and prompts of a length, or edits, that are made of them."""

from __future__ import annotations

import builtins
import json
import keyword
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain, zip_longest
from pathlib import Path

from outrider.compiler.held_out import Prompt, read_tasks
from outrider.compiler.recipe import Recipe, source_recipe
from outrider.plans.errors import RequestError
from outrider.plans.tokenizer import Tokenizer


@dataclass(frozen=True)
class Prompts:
    """Token ids of what every mode continues, and the task of each, None where it has none."""

    ids: list[list[int]]
    tasks: list[str | None]

    @property
    def sha256(self) -> str:
        """Hash of the token ids, as JSON without spaces: the same for the same prompts in the same order."""
        return sha256(json.dumps(self.ids, separators=(",", ":")).encode()).hexdigest()

    def select(self, task: str) -> Prompts:
        chosen = [ids for ids, other in zip(self.ids, self.tasks, strict=True) if other == task]
        return Prompts(chosen, [task] * len(chosen))


def prompts_file(plan: Path, path: Path | None) -> Path:
    """Return `path`, or the held-out prompts of the recipe that the plan was built from. Raises RequestError."""
    return path or held_out_of(source_recipe(plan, option="--prompts FILE"))


def held_out_of(recipe: Recipe) -> Path:
    """Return the file of held-out prompts that a recipe names. Raises RequestError where it names none."""
    if recipe.held_out_path is None:
        raise RequestError(
            f'The recipe {recipe.path.name} names no held_out prompts; pass --prompts FILE of {{"prompt": ...}} lines, '
            "or add `held_out: FILE.jsonl` to the recipe."
        )
    return recipe.held_out_path


def choose_prompts(plan: Path, path: Path | None, task: str | None = None) -> list[Prompt]:
    """Read prompts of `path`, or the held-out ones of the recipe that the plan was built from; all, or of one `task`.

    One of every task comes first, then a second one of each, so that the first few cover all tasks. Prompts of the task
    `edit` are made of those of the task `long` where the file has none, and only where they are asked for.
    """
    path = prompts_file(plan, path)
    by_task: dict[str | None, list[Prompt]] = {}
    for prompt in read_tasks(path):
        by_task.setdefault(prompt.task, []).append(prompt)
    if task is not None:
        if task == EDIT and task not in by_task and SOURCE in by_task:
            return make_edits(by_task[SOURCE])
        if task not in by_task:
            named = ", ".join(sorted(name for name in by_task if name))
            has = f"has the tasks {named}; pass one of those" if named else "names no tasks; leave it out"
            if SOURCE in by_task:
                has += f", or {EDIT}, which is made of {SOURCE}"
            raise RequestError(f"--task is {task!r}, but {path} {has}.")
        return by_task[task]
    return [prompt for prompt in chain.from_iterable(zip_longest(*by_task.values())) if prompt is not None]


def encode_prompts(chosen: Sequence[Prompt], tokenizer: Tokenizer, context: int, new: int) -> Prompts:
    """Their token ids. Raises `RequestError` unless each leaves room for `new` tokens in a plan's `context`, and has a
    token: every measurement after them is then of the length asked for."""
    most = room_for_prompts(context, new)
    for index, prompt in enumerate(chosen):
        if (least := tokenizer.least_tokens(prompt.text)) > most:  # encoding it would take seconds, and gigabytes
            raise RequestError(
                f"Prompt {index}, counted from 0, has at least {least} tokens, but 1 to {most} fit into the plan's "
                f"context of {context} beside --new {new}; choose other prompts with --task, --count or --prompts."
            )
    prompts = Prompts([tokenizer.encode(prompt.text) for prompt in chosen], [prompt.task for prompt in chosen])
    wrong = [index for index, ids in enumerate(prompts.ids) if not 1 <= len(ids) <= most]
    if wrong:
        index = wrong[0]
        of = f" (task {prompts.tasks[index]})" if prompts.tasks[index] else ""
        others = f", and {len(wrong) - 1} more do not fit" if len(wrong) > 1 else ""
        raise RequestError(
            f"Prompt {index}{of}, counted from 0, has {len(prompts.ids[index])} tokens, but 1 to {most} fit into the "
            f"plan's context of {context} beside --new {new}{others}; lower --new, choose other prompts with --task, "
            "--count or --prompts, or build the plan with a larger capacity.context."
        )
    return prompts


def room_for_prompts(context: int, new: int) -> int:
    """Tokens of the longest prompt after which `new` tokens fit. Raises `RequestError` where none does."""
    if new >= context:
        raise RequestError(f"--new is {new}, but the plan's context is {context}; pass at most {context - 1}.")
    return context - new


def cut_prompts(prompts: Sequence[list[int]], length: int, most: int) -> list[list[int]]:
    """Prompts of exactly `length` tokens: the ends of long ones, short ones after the ones before them.

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


EDIT, SOURCE = "edit", "long"
CHARACTERS = 2200  # of a file: about 600 tokens of the reference target
LEAST_LINES, MOST_SHARE = 5, 1 / 2  # of the changed file that a prompt begins with
_NAME, _WORD = r"[^\W\d]\w{2,}", r"\b[^\W\d]\w{4,}\b"
_DEFINED = re.compile(rf"\b(?:def|class)\s+({_NAME})|^[ \t]*({_NAME})[ \t]*=[^=]", re.MULTILINE)
_COMMON = {*keyword.kwlist, *dir(builtins), "self", "cls"}  # what no edit of one file renames


def make_edits(prompts: Sequence[Prompt]) -> list[Prompt]:
    """A prompt of the task `edit` for each of `prompts`, in their order.

    Raises `RequestError` for one that has no two lines, or no name.
    """
    return [Prompt(_edit(prompt.text, place), EDIT) for place, prompt in enumerate(prompts)]


def _edit(text: str, place: int) -> str:
    file = text[: text.rfind("\n", 0, CHARACTERS) + 1]
    name = _name(file)
    if name is None or file.count("\n") < 2:
        raise RequestError(
            f"Prompt {place} of the task {SOURCE}, counted from 0, has no name to change in its first {CHARACTERS} "
            f"characters, or no two lines; {EDIT} needs code or prose of several lines. Pass other --prompts."
        )
    new = f"new_{name}"
    while new in file:
        new = f"new_{new}"
    lines = re.sub(rf"\b{name}\b", new, file).splitlines(keepends=True)
    shown = 1 + next(index for index, line in enumerate(lines) if new in line)
    most = max(1, int(MOST_SHARE * len(lines)))
    beginning = "".join(lines[: min(max(shown, LEAST_LINES), most)])
    return f"{file}\n\n# The same file, with {name} renamed to {new}:\n\n{beginning}"


def _name(file: str) -> str | None:
    """The function, class or variable of the file that stands in it most often, the first of several; of a text that
    defines none, the word, of five letters or more. None where there is neither."""
    defined = [name for pair in _DEFINED.findall(file) for name in pair if _renamable(name)]
    named = defined or [word for word in re.findall(_WORD, file) if _renamable(word)]
    counts = Counter(re.findall(rf"\b{_NAME}\b", file))
    return max(named, key=lambda name: counts[name], default=None)


def _renamable(name: str) -> bool:
    return bool(name) and name not in _COMMON and not name.startswith("__")
