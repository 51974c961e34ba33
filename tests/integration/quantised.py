"""Recipes with quantised weights."""

from __future__ import annotations

from pathlib import Path

import yaml

from outrider.compiler.held_out import read_text
from tests.conftest import HELD_OUT

CALIBRATION = HELD_OUT.with_name("calibration.jsonl.gz")


def calibration_text(folder: Path) -> Path:
    """Write a little of the reference's calibration text."""
    text = folder / "text.jsonl"
    text.write_text("".join(f"{line}\n" for line in read_text(CALIBRATION).splitlines()[:2]))
    return text


def quantised(overrides: list[str], kind: str, text: Path) -> list[str]:
    """The same recipe with weights of `kind` in the target and in all drafters but a head, which stays float32.

    Those of int4 are searched on `text`, in the target and in the first draft model.
    """
    searched = {"type": kind, "method": "awq", "calibration": str(text)} if kind == "int4" else {"type": kind}
    (drafters,) = (override for override in overrides if override.startswith("drafters="))
    sections = yaml.safe_load(drafters.removeprefix("drafters="))
    for section in sections:
        if section["kind"] != "ngram" and section["name"] != "classical-head":
            section["weights"] = searched if section["name"] == "chain" else {"type": kind}
    others = [override for override in overrides if override is not drafters]
    return [*others, f"drafters={sections!r}", f"target.weights={searched!r}"]
