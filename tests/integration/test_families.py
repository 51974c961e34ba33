"""Every model family, from a checkpoint that transformers wrote to the tokens of a plan.

transformers is the oracle of the weights in float32; plain decoding is that of speculation, at any precision.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from outrider import PrefixCacheConfig, Runtime
from outrider.compiler.build import build
from outrider.compiler.recipe import load_recipe
from outrider.runtime.options.options import Options
from outrider.tools.verify.verification import verify_plan
from tests.compiler.eagle3_heads import write_eagle3
from tests.conftest import made_once
from tests.integration.families import DRAFTERS, TOYS, write_toy
from tests.integration.random_use import expect_the_tokens_of_the_target_alone

PROMPT = [(41 * i) % 299 + 1 for i in range(80)]  # longer than every window
NEW = 40


def int4(name: str) -> list[str]:
    """Weights of int4, searched on text in a target without experts."""
    searched = "" if TOYS[name].experts else ", method: awq, calibration: text.jsonl"
    return [
        f"target.weights={{type: int4{searched}}}",
        "drafters[1].weights={type: int4}",
        "drafters[2].weights={type: int4}",
    ]


def each_of(short: dict[str, str]) -> pytest.MarkDecorator:
    """Plans of all families with all weights; but for those of `short`, by the weights, in the long run alone."""
    return pytest.mark.parametrize(
        ("recipe", "any_plan"),
        [
            pytest.param(name, kind, marks=() if short.get(name) == kind else pytest.mark.long, id=f"{name}-{kind}")
            for name in TOYS
            for kind in ("float32", "int4")
        ],
        indirect=True,
    )


SHORT = ("ministral", "qwen3_moe", "gpt_oss", "gemma2", "gemma3", "phi3", "granite")
"""Families that the short run builds plans of; `test_models.py` computes all graphs in every run."""


@pytest.fixture(
    scope="module", params=[name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in TOYS]
)
def recipe(request: pytest.FixtureRequest, toy_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name = request.param
    tokenizer = toy_recipe.parent / "target"
    return made_once(tmp_path_factory, f"family-{name}", lambda out: write_toy(name, out, tokenizer)) / "model.yaml"


def name_of(recipe: Path) -> str:
    return recipe.parent.name.removeprefix("family-")


@pytest.fixture(scope="module")
def plan(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    loaded = load_recipe(recipe)
    return made_once(tmp_path_factory, f"{recipe.parent.name}/plan", lambda out: build(loaded, recipe, out))


@pytest.fixture(scope="module")
def any_plan(request: pytest.FixtureRequest, recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "float32":
        return Path(request.getfixturevalue("plan"))
    loaded = load_recipe(recipe, int4(name_of(recipe)))
    return made_once(tmp_path_factory, f"{recipe.parent.name}/int4", lambda out: build(loaded, recipe, out))


DRAFTING = ("gemma2",)
"""Families whose draft models are built in the short run; the long one has those of all."""


@pytest.fixture(scope="module")
def some_plan(recipe: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if name_of(recipe) in DRAFTING:
        return Path(request.getfixturevalue("plan"))
    loaded = load_recipe(recipe, ["drafters=[{name: ngram, kind: ngram}]"])
    return made_once(tmp_path_factory, f"{recipe.parent.name}/ngram", lambda out: build(loaded, recipe, out))


@pytest.fixture(scope="module")
def oracle(recipe: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(recipe.parent / "target", dtype=torch.float32).eval()
    return model


def test_tokens_and_logits_are_those_of_transformers(some_plan: Path, oracle: PreTrainedModel) -> None:
    runtime = Runtime.load(some_plan, threads=1)
    session = runtime.session()
    options = Options(whole=True, max_new_tokens=NEW, ignore_eos=True)
    tokens = session.generate(PROMPT, drafter="none", **options).token_ids
    whole, error = PROMPT + tokens, 0.0
    with torch.no_grad():
        logits = oracle(torch.tensor([whole]), use_cache=False).logits[0, :-1]
    assert logits[len(PROMPT) - 1 :].argmax(-1).tolist() == tokens  # each after those before it, so all of them
    for drafter in (each.name for each in runtime.manifest.drafters):
        assert session.generate(PROMPT, drafter=drafter, **options).token_ids == tokens, drafter
    for at in range(1, len(whole)):  # after a prompt of any length, each fed to what there is
        session.generate(whole[:at], whole=True, drafter="none", max_new_tokens=1, ignore_eos=True)
        error = max(error, float(np.abs(session.step_logits(0) - logits[at - 1].numpy()).max()))
    assert error < 1e-4


@each_of({"gemma2": "float32"})
def test_verify_holds_a_plan_against_transformers(recipe: Path, any_plan: Path) -> None:
    """Scalings that depend on the context, fused projections, norms that lack 1: the oracle has what the plan has."""
    overrides = int4(name_of(recipe)) if any_plan.name == "int4" else []
    found = verify_plan(load_recipe(recipe, overrides), any_plan, prompts=2, new_tokens=12, texts=1)
    assert found.oracle.startswith("transformers")
    assert found.passed, found


@pytest.mark.parametrize(("mode", "prefill_tokens"), [("batching", 3), ("in-one-sequence", None)])
@each_of({"gemma2": "float32"})
def test_tokens_depend_on_neither_drafter_nor_company(any_plan: Path, mode: Any, prefill_tokens: int | None) -> None:
    """Draft trees, branches, the prefix cache, sessions that are cut, at any temperature."""
    own: dict[str, Any] = {"cache": PrefixCacheConfig(max_cached_tokens=300), "prefill_tokens": prefill_tokens}
    with Runtime.load(any_plan, threads=1) as alone:
        expect_the_tokens_of_the_target_alone(alone, any_plan, mode, 25, seed=3, coupled=DRAFTERS, rejecting=(), **own)


@pytest.mark.parametrize("name", ["gemma3", pytest.param("olmo3", marks=pytest.mark.long)])
def test_a_head_drafts_for_layers_of_any_kind(name: str, toy_recipe: Path, tmp_path: Path) -> None:
    """It reads the residual streams of layers with windows and norms after them."""
    write_toy(name, tmp_path, toy_recipe.parent / "target")
    write_eagle3(tmp_path / "head", target_hidden=32, vocab=300, draft_vocab=120, aux_layer_ids=[0, 1, 2])
    head = "{name: head, kind: eagle3, checkpoint: head, tree: {top_k: 4, depth: 2, nodes: 12}}"
    recipe = load_recipe(tmp_path / "model.yaml", [f"drafters=[{head}]"])
    plan = build(recipe, tmp_path / "model.yaml", tmp_path / "plan").plan.root
    with Runtime.load(plan, threads=1) as alone:
        expect_the_tokens_of_the_target_alone(
            alone, plan, "in-one-sequence", 30, seed=5, threads=1, coupled=("none", "head"), rejecting=()
        )
