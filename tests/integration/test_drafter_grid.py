"""Same seed, same tokens, on 120 held-out prompts: every kind of drafter at every kind of sampling.

It takes some minutes:

    python -m pytest -m long -s tests/integration/test_drafter_grid.py

It prints how many tokens a target pass committed, and every near tie with its margin.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider import Runtime
from outrider.compiler.build import build
from outrider.compiler.held_out import read_prompts
from outrider.compiler.recipe import Recipe, load_recipe
from outrider.plans.tokenizer import Tokenizer
from outrider.runtime.options.options import Options
from outrider.tools.verify.agreement import compare_drafters
from outrider.tools.verify.verification import verify_plan
from tests.conftest import HELD_OUT, REFERENCE_RECIPE

pytestmark = pytest.mark.long

SAMPLINGS = {
    "greedy": Options(temperature=0.0),
    "temperature 0.7, top-p 0.9": Options(temperature=0.7, top_p=0.9, seed=1),
    "temperature 1.0, top-k 50": Options(temperature=1.0, top_k=50, seed=2),
}


def cut_prompts(tokenizer: Tokenizer, most: int) -> list[list[int]]:
    """Each of the 60 held-out prompts twice, cut between tokens: up to `most` of them, and half as many."""
    encoded = [tokenizer.encode(text)[:most] for text in read_prompts(HELD_OUT)]
    return [ids[:length] for ids in encoded for length in (len(ids) // 2, len(ids))]


def measured_tolerance(recipe: Recipe, plan: Path) -> float:
    """Below which two logits may change places: from the plan's error against PyTorch."""
    verification = verify_plan(recipe, plan, prompts=4, new_tokens=48)
    assert verification.passed
    return verification.tolerance


def check(runtime: Runtime, drafters: list[str], sampling: str, tolerance: float, *, most: int, new: int) -> int:
    """Compare, and print what was found; of the drafters, how many had a draft accepted."""
    prompts = cut_prompts(runtime.tokenizer, most)
    assert len({tuple(ids) for ids in prompts}) >= 100
    options = SAMPLINGS[sampling] | Options(max_new_tokens=new)
    checks = compare_drafters(runtime.session(), prompts, drafters, options, tolerance, exact=True)
    print(f"\n{sampling}, {len(prompts)} prompts, tolerance {tolerance:.1e}")
    for drafter, found in checks.items():
        margins = [f"{parting.margin:.1e}" for parting in found.partings]
        print(f"  {drafter}: {found.tokens / found.rounds:.2f} tokens per verify, {len(margins)} partings", *margins)
        assert found.tokens == len(prompts) * new
        assert found.partings == []
    return sum(found.rounds < found.tokens for found in checks.values())


@pytest.fixture(scope="module")
def toy_tolerance(toy_recipe: Path, toy_plan: Path) -> float:
    return measured_tolerance(load_recipe(toy_recipe, [f"held_out={HELD_OUT}"]), toy_plan)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_every_drafter_of_the_toy_gives_the_tokens_of_plain_decoding(
    toy: Runtime, toy_tolerance: float, sampling: str
) -> None:
    """Its head is random, and hardly ever right."""
    assert check(toy, ["ngram", "chain", "bushy", "head", "block"], sampling, toy_tolerance, most=40, new=10) >= 3


def grid_recipe() -> Recipe:
    """The reference recipe with its draft model as a chain and as a tree, and its head with a tree."""
    sections = reversed(load_recipe(REFERENCE_RECIPE).drafters)  # of each kind, the first
    listed = {section.kind: section.model_dump(exclude_none=True) for section in sections}
    if missing := sorted({"ngram", "model", "eagle3", "block"} - set(listed)):
        pytest.fail(
            f"{REFERENCE_RECIPE} has no drafter of kind {' and '.join(missing)}; train them with "
            "`python -m outrider.tools.lab.train_reference all` and list them there"
        )
    model = {key: listed["model"][key] for key in ("kind", "checkpoint")}
    drafters = [
        listed["ngram"] | {"name": "ngram"},
        model | {"name": "chain", "gamma": 4},
        model | {"name": "tree", "tree": "auto"},
        listed["eagle3"] | {"name": "head", "tree": "auto"},
        listed["block"] | {"name": "block"},
    ]
    return load_recipe(REFERENCE_RECIPE, [f"drafters={json.dumps(drafters)}"])


@pytest.fixture(scope="module")
def reference_grid(tmp_path_factory: pytest.TempPathFactory) -> tuple[Runtime, float]:
    recipe, out = grid_recipe(), tmp_path_factory.mktemp("grid") / "plan"
    build(recipe, REFERENCE_RECIPE, out)
    return Runtime.load(out), measured_tolerance(recipe, out)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_every_drafter_of_the_reference_gives_the_tokens_of_plain_decoding(
    reference_grid: tuple[Runtime, float], sampling: str
) -> None:
    runtime, tolerance = reference_grid
    drafters = [drafter.name for drafter in runtime.manifest.drafters]
    assert check(runtime, drafters, sampling, tolerance, most=1024, new=64) == 5
