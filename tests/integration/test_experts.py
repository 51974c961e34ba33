"""Plans of a mixture of experts: speculation and company change no token, and experts stay where they are mapped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from outrider import Runtime
from outrider.compiler.build import build
from outrider.compiler.checkpoint import defer_decoder, load_decoder
from outrider.compiler.inspect import describe
from outrider.compiler.models.eager import sequence_logits
from outrider.compiler.quantization.calibration import calibrate
from outrider.compiler.quantization.weight_form import WeightForm
from outrider.compiler.recipe import load_recipe
from outrider.plans.errors import CheckpointError
from outrider.plans.plan import open_plan
from outrider.tools.verify.quantized import QUANTIZED_LOGIT_BOUND, PlanWeights
from outrider.tools.verify.verification import verify_plan
from tests.conftest import EVERYTHING, TOY_PROMPTS, made_once, write_toy
from tests.integration.mapped import mapped
from tests.integration.random_use import expect_the_tokens_of_the_target_alone
from tests.integration.step_logits import expect_the_bits_of_plain_code, expect_the_same_bits

DRAFTERS = ("ngram", "chain", "bushy", "head")
TYPES = ("float32", "int4")
CPU, RTX = "onnxruntime-cpu", "tensorrt-rtx"


def overrides(kind: str) -> list[str]:
    """Make a plan with a drafter of each kind, partial KV and rows, with weights of `kind`, rounded to the nearest."""
    drafters, *others = EVERYTHING
    sections = [s for s in yaml.safe_load(drafters.removeprefix("drafters=")) if s["name"] in DRAFTERS]
    for section in sections:
        if section["kind"] == "model" and kind != "float32":
            section["weights"] = {"type": kind}
    weights = [] if kind == "float32" else [f"target.weights={{type: {kind}}}"]
    return [f"drafters={sections!r}", *others, *weights]


@pytest.fixture(scope="module")
def recipe_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "experts-toy", lambda out: write_toy(out, experts=True)) / "model.yaml"


@pytest.fixture(scope="module", params=TYPES)
def plan(request: pytest.FixtureRequest, recipe_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = load_recipe(recipe_path, overrides(request.param))
    return made_once(tmp_path_factory, f"experts-{request.param}", lambda out: build(recipe, recipe_path, out))


@pytest.fixture
def alone(plan: Path) -> Iterator[Runtime]:
    runtime = Runtime.load(plan, threads=1)
    yield runtime
    runtime.close(timeout=60)


def kind_of(plan: Path) -> str:
    return plan.name.removeprefix("experts-")


def test_layers_with_experts_are_two_nodes_of_ours(plan: Path) -> None:
    graph = onnx.load(plan / "engines" / CPU / "target.onnx", load_external_data=False).graph
    kinds = [node.op_type for node in graph.node]
    experts = "MixtureOfExperts" if kind_of(plan) == "float32" else "QuantMixtureOfExperts"
    assert (kinds.count("Route"), kinds.count(experts), kinds.count("GatedUnit")) == (2, 2, 1)
    probe = open_plan(plan).manifest.backends[CPU].probe
    assert probe is not None
    assert {"Route", experts} <= {text.split()[1] for text in probe.ops.values()}


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not say what is mapped")
def test_experts_are_mapped_where_they_lie_and_not_copied(plan: Path, alone: Runtime) -> None:
    assert alone.generate("import", max_new_tokens=1).token_ids
    assert mapped(plan, lambda node: node.input[2:5] if node.op_type.endswith("MixtureOfExperts") else []) == 2 * 3


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
            accepted += drafted.stats.accepted
    assert accepted > 0
    runtime.close(timeout=60)


@pytest.mark.parametrize(
    ("plan", "mode"),
    [
        ("int4", "batching"),
        *(pytest.param(kind, mode, marks=pytest.mark.long) for kind, mode in (
            ("int4", "in-one-sequence"), ("float32", "batching"), ("float32", "in-one-sequence"),
        )),
    ],
    indirect=["plan"],
)  # fmt: skip
def test_tokens_depend_on_neither_drafter_nor_company(plan: Path, alone: Runtime, mode: str) -> None:
    expect_the_tokens_of_the_target_alone(alone, plan, mode, 25, seed=3, coupled=("none", *DRAFTERS), rejecting=())


def test_logits_are_the_same_bits_in_a_prompt_and_in_a_step(plan: Path) -> None:
    expect_the_same_bits(Runtime.load(plan, threads=2), [(37 * i) % 299 + 1 for i in range(40)], (1, 2, 5, 8, 15))


def test_quantised_logits_are_the_same_bits_on_any_processor(plan: Path) -> None:
    if kind_of(plan) == "float32":
        pytest.skip("other products in float32 are the processor's")
    expect_the_bits_of_plain_code(plan)


def test_inspect_counts_the_bytes_of_experts(plan: Path) -> None:
    kind = kind_of(plan)
    weights = describe(plan)["backends"][CPU]["engines"]["target"]["weights"]
    experts = 2 * 8 * 3 * 32 * 32  # layers, experts, products
    layer = 32 * (64 + 32 + 32) + 64 * 32
    if kind == "float32":
        assert weights["float32"] > 4 * (experts + 3 * layer)
        return
    integers = experts + 3 * layer + 3 * 32 * 64
    head = 320 * (32 + 2)
    own = integers * (4 if kind == "int4" else 8) // 8 + integers // 32 * 2
    assert weights[kind] == own + (head if kind == "int8" else 0)


@pytest.mark.long
def test_float32_plans_agree_with_their_checkpoint(recipe_path: Path, plan: Path) -> None:
    if kind_of(plan) != "float32":
        pytest.skip("rounding may choose other experts")
    recipe = load_recipe(recipe_path, [*overrides("float32"), "held_out=held_out.jsonl"])
    result = verify_plan(recipe, plan, prompts=1, new_tokens=16, texts=1)
    assert result.passed
    assert set(result.drafters) >= set(DRAFTERS)


def test_quantised_plans_have_the_oracles_weights(recipe_path: Path, plan: Path, alone: Runtime) -> None:
    """In the median of some prompts: where two experts are nearly as good, rounding a token may choose the other."""
    if kind_of(plan) == "float32":
        pytest.skip("has its checkpoint's weights")
    weights = PlanWeights(WeightForm(4, 8))
    ours = load_decoder(recipe_path.parent / "target")
    theirs = AutoModelForCausalLM.from_pretrained(recipe_path.parent / "target").eval()
    for model in (ours, theirs):
        weights.give(model)
    session, errors = alone.session(), []
    for seed in range(11):
        ids = np.random.default_rng(seed).integers(1, 300, 24).tolist()
        session.reset()
        session.generate(ids, max_new_tokens=1, drafter="none", ignore_eos=True)
        wanted = sequence_logits(ours, ids)
        with torch.no_grad():
            torch.testing.assert_close(theirs(torch.tensor([ids])).logits[0], wanted, rtol=0, atol=1e-4)
        errors.append(float(np.abs(session.step_logits(0).ravel() - wanted[-1].numpy()).max()))
    assert np.median(errors) < QUANTIZED_LOGIT_BOUND


def test_experts_are_not_searched_on_text(recipe_path: Path) -> None:
    with pytest.raises(CheckpointError, match="method awq does not search a mixture of experts"):
        calibrate(defer_decoder(recipe_path.parent / "target"), [[1, 2, 3]], WeightForm(4, 8))


@pytest.mark.long
@pytest.mark.parametrize("kind", [pytest.param("float32", marks=pytest.mark.long), "int4"])
def test_tensorrt_rtx_builds_an_engine_of_experts(recipe_path: Path, tmp_path: Path, kind: str) -> None:
    pytest.importorskip("tensorrt_rtx")
    weights = [] if kind == "float32" else [f"target.weights={{type: {kind}}}"]
    backend = f"backends=[{{kind: {RTX}, compute_capabilities: [sm_80]}}]"
    chain = "{name: chain, kind: model, checkpoint: drafter, gamma: 2"
    chain += "}" if kind == "float32" else f", weights: {{type: {kind}}}}}"
    recipe = load_recipe(recipe_path, [backend, f"drafters=[{chain}]", *weights])
    plan = build(recipe, recipe_path, tmp_path / "plan").plan.manifest.backends[RTX]
    assert plan.engines["target"].layers["KV_CACHE_UPDATE"] == 2 * 3
    assert plan.engines["target"].layers["TOPK"] == 2
