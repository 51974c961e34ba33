"""A recipe written for a checkpoint that has none: a file that the user can edit and build again."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from outrider.compiler.formats.gguf_file import is_gguf
from outrider.compiler.recipe import load_recipe
from outrider.compiler.recipe_sections import positions_served
from outrider.plans.errors import RecipeError

_CONTEXT = 4096  # tokens, where the model serves them
_TEXT = """\
# Written by `outrider build {written}`: change it, and build it again.
# Paths are relative to this file; `outrider recipe` prints every key.
name: {name}
target:
  checkpoint: {checkpoint}
drafters:
  - {{name: ngram, kind: ngram}}
capacity:
  context: {context}
"""


def is_checkpoint(path: Path) -> bool:
    """Whether the path is one of a checkpoint, a folder or a GGUF file, and none of a recipe."""
    return path.is_dir() or is_gguf(path)


def write_recipe(checkpoint: Path, out: Path | None) -> Path:
    """Write the recipe of a checkpoint beside its plan at `out` (default: build/NAME), unless its recipe is there, and
    return the file. Raises `RecipeError` where the file is of another checkpoint."""
    named = Path(os.path.abspath(checkpoint))  # not where links lead: names in caches say nothing
    stem = named.stem if is_gguf(named) else named.name
    name = re.sub(r"[^a-z0-9._-]+", "-", stem.lower()).strip("-._") or "model"
    plan = Path(os.path.abspath(out or Path("build") / name))
    file = plan.with_name(f"{plan.name}.yaml")
    if file.exists():
        if load_recipe(file).checkpoint_path.resolve() != named.resolve():
            raise RecipeError(
                f"{file} is the recipe of another checkpoint; pass --out with another folder, or that file"
            )
        return file
    from outrider.compiler.opening import read_config  # with torch, for which a path with a mistake in it need not wait

    context = min(_CONTEXT, positions_served(read_config(checkpoint), replaced=False))
    file.parent.mkdir(parents=True, exist_ok=True)
    place = json.dumps(os.path.relpath(named, file.parent.resolve()), ensure_ascii=False)  # a text of YAML, too
    file.write_text(_TEXT.format(written=checkpoint, name=name, checkpoint=place, context=context), encoding="utf-8")
    return file
