"""Held-out prompts: the text that `compiler verify`, the benchmark and the tests measure with."""

from __future__ import annotations

import json
from pathlib import Path

from plans.errors import RecipeError


def read_prompts(path: Path) -> list[str]:
    """The `prompt` of every line of a JSONL file. Raises `RecipeError` naming the file and the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} cannot be read as UTF-8 text ({error}); correct the path of the prompts.") from None
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            prompt = json.loads(line)["prompt"]
        except (ValueError, KeyError, TypeError):
            prompt = None
        if not isinstance(prompt, str) or not prompt:
            raise RecipeError(f'{path}:{number}: every line must be a JSON object with a text under "prompt".')
        prompts.append(prompt)
    if not prompts:
        raise RecipeError(f'{path} holds no prompts; write one JSON object with a "prompt" per line.')
    return prompts
