"""Plans of a mixture of experts: speculation and company change no token, and experts stay where they are mapped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from transformers import AutoModelForCausalLM

from compiler.build import build
from compiler.inspect import describe
from compiler.recipe import load_recipe
from plans.plan import open_plan
from runtime import Runtime, SchedulerConfig
from tests.conftest import TOY_PROMPTS, made_once, write_toy_checkpoint
from tests.instruction_sets import BETTER_THAN_PLAIN, Results, with_instructions
from tests.integration.random_use import RandomUse
from tests.integration.step_logits import expect_the_same_bits
from tools.verify.verification import verify_plan

RECIPE = """\
name: experts
target: {checkpoint: target}
drafters:
  - {name: ngram, kind: ngram, max_context: 3, min_context: 1, max_draft: 6}
  - {name: chain, kind: model, checkpoint: drafter, gamma: 4}
  - {name: bushy, kind: model, checkpoint: drafter, tree: {top_k: 3, depth: 2, nodes: 9}}
capacity: {context: 160, prefill_chunk: 16, branches: 4, batching: true}
"""
DRAFTERS = ("ngram", "chain", "bushy")
TYPES = ("float32", "int4", "int8")
CPU, RTX = "onnxruntime-cpu", "tensorrt-rtx"


def write_recipe(folder: Path) -> None:
    write_toy_checkpoint(folder / "target", experts=True)
    write_toy_checkpoint(folder / "drafter", noise=0.05, experts=True)
    (folder / "model.yaml").write_text(RECIPE, encoding="utf-8")
    (folder / "held_out.jsonl").write_text('{"prompt": "import os"}\n', encoding="utf-8")


def overrides(kind: str) -> list[str]:
    if kind == "float32":
        return []
    return [f"{part}.weights={{type: {kind}}}" for part in ("target", "drafters[1]", "drafters[2]")]


@pytest.fixture(scope="module")
def recipe_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "experts-recipe", write_recipe) / "model.yaml"


@pytest.fixture(scope="module", params=TYPES)
def plan(request: pytest.FixtureRequest, recipe_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = load_recipe(recipe_path, overrides(request.param))
    return made_once(tmp_path_factory, f"experts-{request.param}", lambda out: build(recipe, recipe_path, out))


@pytest.fixture
def alone(plan: Path) -> Iterator[Runtime]:
    runtime = Runtime.load(plan, threads=1)
    yield runtime
    runtime.close(timeout=10)


def kind_of(plan: Path) -> str:
    return plan.name.removeprefix("experts-")


def test_layers_with_experts_are_two_nodes_of_ours(plan: Path) -> None:
    graph = onnx.load(plan / "engines" / CPU / "target.onnx", load_external_data=False).graph
    kinds = [node.op_type for node in graph.node]
    experts = "MixtureOfExperts" if kind_of(plan) == "float32" else "QuantMixtureOfExperts"
    assert (kinds.count("Route"), kinds.count(experts), kinds.count("SwiGlu")) == (3, 3, 1)
    probe = open_plan(plan).manifest.backends[CPU].probe
    assert probe is not None
    assert {"Route", experts} <= {text.split()[1] for text in probe.ops.values()}


def test_float32_tokens_are_those_of_transformers(recipe_path: Path, plan: Path, alone: Runtime) -> None:
    if kind_of(plan) != "float32":
        pytest.skip("has other weights")
    oracle = AutoModelForCausalLM.from_pretrained(recipe_path.parent / "target").eval()
    for prompt in TOY_PROMPTS:
        ids = torch.tensor([alone.tokenizer.encode(prompt)])
        wanted = oracle.generate(ids, max_new_tokens=64, do_sample=False)[0, ids.shape[1] :].tolist()
        found = alone.generate(prompt, max_new_tokens=64, drafter="none").token_ids
        assert list(found) == wanted


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_tokens_do_not_depend_on_the_drafter(plan: Path, drafter: str) -> None:
    runtime = Runtime.load(plan, threads=2)
    accepted = 0
    for prompt in TOY_PROMPTS:
        for temperature in (0.0, 0.8):
            plain, drafted = (
                runtime.generate(
                    prompt, max_new_tokens=64, drafter=name, temperature=temperature, seed=3, ignore_eos=True
                )
                for name in ("none", drafter)
            )
            assert drafted.token_ids == plain.token_ids
            accepted += drafted.stats.accepted_draft_tokens
    assert accepted > 0
    runtime.close(timeout=10)


@pytest.mark.parametrize("mode", ["batching", "in-one-sequence"])
def test_tokens_depend_on_neither_drafter_nor_company(plan: Path, alone: Runtime, mode: str) -> None:
    used = Runtime.load(plan, threads=2, scheduler=SchedulerConfig(mode=mode))  # type: ignore[arg-type]
    user = RandomUse(alone, used, mode, seed=3)
    user.run(60)
    assert user.compared > 40
    assert used.close(timeout=10)


def test_logits_are_the_same_bits_in_a_prompt_and_in_a_step(plan: Path) -> None:
    expect_the_same_bits(Runtime.load(plan, threads=2), [(37 * i) % 299 + 1 for i in range(40)], (1, 2, 5, 8, 15))


def logits_of(plan: Path) -> Results:
    session = Runtime.load(plan, threads=2).session()
    session.generate([(41 * i) % 299 + 1 for i in range(60)], max_new_tokens=3, drafter="none", ignore_eos=True)
    return {"logits": session.step_logits(0).copy()}


@pytest.mark.parametrize("isa", BETTER_THAN_PLAIN)
def test_quantised_logits_are_the_same_bits_on_any_processor(plan: Path, tmp_path: Path, isa: str) -> None:
    if kind_of(plan) == "float32":
        pytest.skip("other products in float32 are the processor's")
    found = with_instructions(isa, __name__, "logits_of", plan, tmp_path / "found.npz")
    plain = with_instructions("plain", __name__, "logits_of", plan, tmp_path / "plain.npz")
    np.testing.assert_array_equal(found["logits"].view(np.uint32), plain["logits"].view(np.uint32))


def test_inspect_counts_the_bytes_of_experts(plan: Path) -> None:
    kind = kind_of(plan)
    weights = describe(plan)["backends"][CPU]["engines"]["target"]["weights"]
    experts = 3 * 8 * 3 * 32 * 32  # layers, experts, products
    layer = 32 * (64 + 32 + 32) + 64 * 32
    if kind == "float32":
        assert weights["float32"] > 4 * (experts + 4 * layer)
        return
    integers = experts + 4 * layer + 3 * 32 * 64
    head = 320 * (32 + 2)
    own = integers * (4 if kind == "int4" else 8) // 8 + integers // 32 * 2
    assert weights[kind] == own + (head if kind == "int8" else 0)


def test_the_plan_agrees_with_its_checkpoint(recipe_path: Path, plan: Path) -> None:
    result = verify_plan(load_recipe(recipe_path, overrides(kind_of(plan))), plan, prompts=1, new_tokens=24, texts=1)
    assert result.passed
    assert set(result.drafters) == set(DRAFTERS)


@pytest.mark.parametrize("kind", ["float32", "int4"])
def test_tensorrt_rtx_builds_an_engine_of_experts(recipe_path: Path, tmp_path: Path, kind: str) -> None:
    pytest.importorskip("tensorrt_rtx")
    backend = f"backends=[{{kind: {RTX}, compute_capabilities: [sm_89]}}]"
    recipe = load_recipe(recipe_path, [backend, "drafters=[]", *overrides(kind)[:1]])
    plan = build(recipe, recipe_path, tmp_path / "plan").plan.manifest.backends[RTX]
    assert plan.engines["target"].layers["KV_CACHE_UPDATE"] == 2 * 4
    assert plan.engines["target"].layers["TOPK"] == 3
