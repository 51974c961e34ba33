"""Damaging a copy of the toy plan, and the sentence with which loading then refuses it."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from outrider import Runtime
from outrider.plans.errors import PlanError
from outrider.plans.plan import file_sha256, manifest_json

Edit = Callable[[dict[str, Any]], object]
BACKEND = "onnxruntime-cpu"
ENGINE = f"engines/{BACKEND}/target.onnx"
WEIGHTS = f"engines/{BACKEND}/weights.bin"
TOKENIZER = "tokenizer/tokenizer.json"
TEMPLATE = "tokenizer/chat_template.jinja"


def edit(plan: Path, change: Edit) -> None:
    """Change `plan.json` as data, under a digest that fits, so that the check after it is reached."""
    path = plan / "plan.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    change(manifest)
    path.write_text(manifest_json(manifest), encoding="utf-8")


def sign_again(plan: Path) -> None:
    """Make the digest of `plan.json` fit its content, where that is JSON."""
    with suppress(ValueError, AttributeError, RecursionError):
        edit(plan, lambda manifest: None)


def list_again(plan: Path) -> None:
    """Make sizes and hashes true again, so that the check after them is reached."""

    def refresh(manifest: dict[str, Any]) -> None:
        for entry in manifest["files"]:
            path = plan / entry["path"]
            entry["sha256"], entry["size"] = file_sha256(path), path.stat().st_size

    edit(plan, refresh)


def refused(plan: Path) -> str:
    """The sentence with which loading refuses the plan."""
    with pytest.raises(PlanError) as caught:
        Runtime.load(plan)
    sentence = str(caught.value)
    assert len(sentence) > 30
    assert "Traceback" not in sentence
    return sentence
