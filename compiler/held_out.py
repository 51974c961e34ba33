"""Held-out prompts: texts that `outrider verify`, the benchmark and the tests measure with."""

from __future__ import annotations

import gzip
import json
import zlib
from dataclasses import dataclass
from pathlib import Path

from outrider.plans.errors import RecipeError
from outrider.plans.text_file import read_text_file

_LARGEST = 2**28  # characters of a text that a file unpacks to


@dataclass(frozen=True)
class Prompt:
    """A held-out text to continue. `task` names the kind of continuation; None where the file names none."""

    text: str
    task: str | None = None


def read_prompts(path: Path) -> list[str]:
    """Read the texts of a file's prompts, in its order; raises as `read_tasks` does."""
    return [prompt.text for prompt in read_tasks(path)]


def read_text(path: Path) -> str:
    """Read a file of UTF-8 text, by gzip where its name ends in `.gz`.

    Raises `OSError` naming the file, also where what gzip wrote is broken, and `UnicodeDecodeError`.
    """
    if path.suffix != ".gz":
        return read_text_file(path, most=_LARGEST)
    try:
        with gzip.open(path, "rt", encoding="utf-8-sig") as file:
            text = file.read(_LARGEST + 1)
        if len(text) > _LARGEST:  # a small file may unpack to all of the memory
            raise gzip.BadGzipFile(f"{path}: it unpacks to more than {_LARGEST} characters")
        return text
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise gzip.BadGzipFile(f"{path}: {error}") from None


def read_tasks(path: Path) -> list[Prompt]:
    """Read the `prompt`, and the `task` if there is one, of every line of a JSONL file, gzipped if it ends in `.gz`.

    Raises `RecipeError` naming the file and the line.
    """
    try:
        lines = read_text(path).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} cannot be read as UTF-8 text ({error}); correct the path of the prompts.") from None
    prompts = [_prompt(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise RecipeError(f'{path} holds no prompts; write one JSON object with a "prompt" per line.')
    return prompts


def _prompt(line: str, place: str) -> Prompt:
    try:
        row = json.loads(line)
        prompt, task = row["prompt"], row.get("task")
    except (ValueError, KeyError, TypeError, RecursionError):
        prompt = task = None
    if not isinstance(prompt, str) or not prompt:
        raise RecipeError(f'{place}: every line must be a JSON object with a text under "prompt".')
    if task is not None and (not isinstance(task, str) or not task):
        raise RecipeError(f'{place}: "task" must be a name; correct it, or leave it out.')
    return Prompt(prompt, task)
