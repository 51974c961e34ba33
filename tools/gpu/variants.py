"""Kernels of other sources, measured beside ours: each variant's changes of files under `plugins/csrc/cuda`."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from plans.errors import OutriderError
from plugins.cuda.compile import SOURCES

Change = tuple[str, str, str]
"""A file, the text in it, which is there once, and the text in its place."""


VARIANTS: dict[str, Sequence[Change]] = {
    "half_short_ring": [("engine/half_product.cu.h", "kHalfAhead = 4;", "kHalfAhead = 3;")],
}
"""Each answers a question that only a GPU can: what it changes stands in the file that it names."""


def write_variant(name: str, changes: Sequence[Change], folder: Path) -> None:
    """Write the changed sources into `folder`. Raises `OutriderError` where a text is not there once."""
    shutil.copytree(SOURCES, folder, dirs_exist_ok=True)
    for file, old, new in changes:
        path = folder / "cuda" / file
        text = path.read_text(encoding="utf-8")
        if (found := text.count(old)) != 1:
            raise OutriderError(f"variant {name}: {file} has {old!r} {found} times, not once; mend VARIANTS")
        path.write_text(text.replace(old, new), encoding="utf-8")
