"""A plan of a checkpoint whose experts are in MXFP4."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider import Runtime
from outrider.compiler.build import build
from outrider.compiler.recipe import load_recipe
from outrider.tools.verify.verification import verify_plan
from tests.compiler.formats.mxfp4 import pack_experts
from tests.integration.families import DRAFTERS, write_toy


@pytest.mark.parametrize("kind", ["float32", pytest.param("int4", marks=pytest.mark.long)])
def test_verify_holds_it_against_transformers(kind: str, toy_recipe: Path, tmp_path: Path) -> None:
    write_toy("gpt_oss", tmp_path, toy_recipe.parent / "target")
    pack_experts(tmp_path / "target")
    drafters = DRAFTERS[:2] if kind == "float32" else DRAFTERS
    changes = ["drafters=[{name: ngram, kind: ngram}]"] if kind == "float32" else [f"target.weights={{type: {kind}}}"]
    recipe = load_recipe(tmp_path / "model.yaml", changes)
    plan = tmp_path / "plan"
    build(recipe, tmp_path / "model.yaml", plan)
    found = verify_plan(recipe, plan, prompts=2, new_tokens=12, texts=1)
    assert found.oracle.startswith("transformers")
    assert found.passed, found
    session = Runtime.load(plan, threads=1).session()
    prompt = [(41 * i) % 299 + 1 for i in range(40)]
    first, *others = (
        session.generate(prompt, whole=True, drafter=drafter, max_new_tokens=32, ignore_eos=True).token_ids
        for drafter in drafters
    )
    assert all(each == first for each in others)
