"""Plans with quantised weights or KV caches, and experts: speculation, company, mode and caches change no token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from outrider import PrefixCacheConfig, Runtime
from outrider.compiler.build import build
from outrider.compiler.checkpoint import defer_decoder, load_decoder
from outrider.compiler.inspect import describe
from outrider.compiler.models.eager import sequence_logits
from outrider.compiler.quantization.calibration import calibrate
from outrider.compiler.quantization.weight_form import WeightForm
from outrider.compiler.recipe import load_recipe
from outrider.plans import names
from outrider.plans.errors import CheckpointError
from outrider.plans.plan import open_plan
from outrider.tools.verify.quantized import QUANTIZED_LOGIT_BOUND, PlanWeights
from outrider.tools.verify.verification import KV_LOGIT_BOUND, Extent, verify_plan
from tests.conftest import (
    EVERYTHING,
    REFERENCE_RECIPE,
    REJECTING,
    TOY_DRAFTERS,
    TOY_PROMPTS,
    BuildOnce,
    made_once,
    write_toy,
)
from tests.integration.families import calibration_text
from tests.integration.step_logits import expect_the_bits_of_plain_code, expect_the_same_bits
from tests.integration.test_random_use import expect_the_tokens_of_the_target_alone

INT4_RECIPE = REFERENCE_RECIPE.with_name("reference-int4.yaml")
ROUNDED = ["target.weights={type: int4}", "drafters[1].weights={type: int4}"]
CPU, RTX = "onnxruntime-cpu", "tensorrt-rtx"
PROMPT = [(37 * i) % 299 + 1 for i in range(60)]
OF_EXPERTS = ("ngram", "chain", "bushy", "head")  # drafters
EXPERTS = ["experts-float32", "experts-int4"]
WEIGHTS = ["int4", pytest.param("int8", marks=pytest.mark.long), *EXPERTS]
OF_PLANS = {  # types of weights and of KV caches
    "int4": ("int4", "float32"),
    "int8": ("int8", "float32"),
    "kv-int8": ("float32", "int8"),
    "kv-float16": ("float32", "float16"),
    "int4-kv-int8": ("int4", "int8"),
}
KV = ["kv-int8", pytest.param("kv-float16", marks=pytest.mark.long)]


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


def experts_overrides(weights: str) -> list[str]:
    """A drafter of each kind, partial KV and rows, with weights rounded to the nearest."""
    drafters, *others = EVERYTHING
    sections = [s for s in yaml.safe_load(drafters.removeprefix("drafters=")) if s["name"] in OF_EXPERTS]
    if weights == "float32":
        return [f"drafters={sections!r}", *others]
    for section in sections:
        section |= {"weights": {"type": weights}} if section["kind"] == "model" else {}
    return [f"drafters={sections!r}", *others, f"target.weights={{type: {weights}}}"]


@pytest.fixture(scope="module")
def experts_recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "experts-toy", lambda out: write_toy(out, experts=True)) / "model.yaml"


@pytest.fixture(scope="module", params=[*WEIGHTS, *KV, pytest.param("int4-kv-int8", marks=pytest.mark.long)])
def plan(
    request: pytest.FixtureRequest, experts_recipe: Path, built: BuildOnce, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    if request.param in EXPERTS:
        return built(request.param, experts_overrides(request.param.removeprefix("experts-")), experts_recipe)
    weights, kept = OF_PLANS[request.param]
    overrides = [*EVERYTHING, f"kv_cache={kept}"]
    if weights != "float32":
        overrides = quantised(overrides, weights, calibration_text(tmp_path_factory.mktemp("calibration")))
    return built(f"{request.param}-everything", overrides)


@pytest.fixture
def alone(plan: Path) -> Iterator[Runtime]:
    with Runtime.load(plan, threads=1) as runtime:
        yield runtime


@pytest.mark.parametrize("plan", WEIGHTS, indirect=True)
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not say what is mapped")
def test_weights_are_mapped_where_they_lie_and_not_copied(plan: Path, alone: Runtime) -> None:
    """ONNX Runtime reads into its own memory what it packs anew, and a tensor that does not begin at a page."""
    assert alone.generate("import", max_new_tokens=1).token_ids
    experts = mapped(plan, lambda node: node.input[2:5] if node.op_type.endswith("MixtureOfExperts") else [])
    assert experts == (2 * 3 if "experts" in plan.name else 0)
    if plan.name != "experts-float32":
        ours, least = ("QuantMatMul", "QuantGather"), 9 if experts else 11
        assert mapped(plan, lambda node: node.input[1:2] if node.op_type in ours else []) >= least


@pytest.mark.usefixtures("run_ahead")
@pytest.mark.parametrize("mode", ["batching", pytest.param("in-one-sequence", marks=pytest.mark.long)])
def test_tokens_depend_on_neither_drafter_nor_company(plan: Path, alone: Runtime, mode: str) -> None:
    drafters, rejecting = (OF_EXPERTS, ()) if "experts" in plan.name else (TOY_DRAFTERS, tuple(REJECTING))
    own: dict[str, Any] = {"coupled": ("none", *drafters), "rejecting": rejecting}
    cache = PrefixCacheConfig(memory_bytes=1 << 19, max_cached_tokens=200)
    expect_the_tokens_of_the_target_alone(alone, plan, mode, 25, seed=3, cache=cache, **own)


def test_logits_are_the_same_bits_in_a_prompt_and_in_a_step(plan: Path) -> None:
    expect_the_same_bits(Runtime.load(plan, threads=2), PROMPT, (1, 2, 5, 8, 15, 16))


@pytest.mark.parametrize("plan", [*WEIGHTS[:2], "experts-int4"], indirect=True)  # products in float32 vary
def test_quantised_logits_are_the_same_bits_on_any_processor(plan: Path) -> None:
    expect_the_bits_of_plain_code(plan)


@pytest.mark.parametrize("plan", WEIGHTS, indirect=True)
def test_inspect_shows_bytes_by_type(plan: Path) -> None:
    kind = plan.name.removeprefix("experts-").partition("-")[0]
    engines = describe(plan)["backends"][CPU]["engines"]
    target = engines["target"]["weights"]
    attention, dense, head = 32 * (64 + 32 + 32) + 64 * 32, 3 * 32 * 64, 320 * (32 + 2)
    rows = 3 * (attention + dense)  # of all layers; the head has 300 tokens in groups of 32, with scales of two bytes
    if "experts" in plan.name:
        rows = 2 * 8 * 3 * 32 * 32 + 3 * attention + dense  # layers, experts, products
    if kind == "float32":
        assert target["float32"] > 4 * (rows - dense)
        return
    layers = rows * int(kind[3:]) // 8 + rows // 32 * 2
    assert target[kind] == layers + (head if kind == "int8" else 0)
    assert target["int8"] == head + (layers if kind == "int8" else 0)
    assert "experts" in plan.name or "int8" not in engines["classical-head"]["weights"]


@pytest.mark.parametrize("plan", EXPERTS, indirect=True)
def test_layers_with_experts_are_two_nodes_of_ours(plan: Path) -> None:
    graph = onnx.load(plan / "engines" / CPU / "target.onnx", load_external_data=False).graph
    kinds = [node.op_type for node in graph.node]
    experts = "MixtureOfExperts" if plan.name == "experts-float32" else "QuantMixtureOfExperts"
    assert (kinds.count("Route"), kinds.count(experts), kinds.count("GatedUnit")) == (2, 2, 1)
    probe = open_plan(plan).manifest.backends[CPU].probe
    assert probe is not None
    assert {"Route", experts} <= {text.split()[1] for text in probe.ops.values()}


@pytest.mark.parametrize("plan", ["experts-float32"], indirect=True)
def test_tokens_of_experts_in_float32_are_those_of_transformers(
    experts_recipe: Path, plan: Path, alone: Runtime
) -> None:
    oracle = AutoModelForCausalLM.from_pretrained(experts_recipe.parent / "target").eval()
    for prompt in TOY_PROMPTS:
        ids = torch.tensor([alone.tokenizer.encode(prompt)])
        wanted = oracle.generate(ids, max_new_tokens=64, do_sample=False)[0, ids.shape[1] :].tolist()
        assert list(alone.generate(prompt, max_new_tokens=64, drafter="none").token_ids) == wanted


@pytest.mark.parametrize("plan", ["experts-int4"], indirect=True)
def test_quantised_plans_of_experts_have_the_oracles_weights(experts_recipe: Path, plan: Path, alone: Runtime) -> None:
    """In the median of some prompts: where two experts are nearly as good, rounding a token may choose the other."""
    weights = PlanWeights(WeightForm(4, 8))
    ours = load_decoder(experts_recipe.parent / "target")
    theirs = AutoModelForCausalLM.from_pretrained(experts_recipe.parent / "target").eval()
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


def test_experts_are_not_searched_on_text(experts_recipe: Path) -> None:
    with pytest.raises(CheckpointError, match="method awq does not search a mixture of experts"):
        calibrate(defer_decoder(experts_recipe.parent / "target"), [[1, 2, 3]], WeightForm(4, 8))


@pytest.mark.long
@pytest.mark.parametrize("weights", ["float32", "int4"])
def test_tensorrt_rtx_builds_an_engine_of_experts(experts_recipe: Path, built: BuildOnce, weights: str) -> None:
    pytest.importorskip("tensorrt_rtx")
    own = "" if weights == "float32" else f", weights: {{type: {weights}}}"
    drafters = f"drafters=[{{name: chain, kind: model, checkpoint: drafter, gamma: 2{own}}}]"
    backend = f"backends=[{{kind: {RTX}, compute_capabilities: [sm_80]}}]"
    plan = built(f"experts-rtx-{weights}", [backend, drafters, *experts_overrides(weights)[3:]], experts_recipe)
    layers = open_plan(plan).manifest.backends[RTX].engines["target"].layers
    assert (layers["KV_CACHE_UPDATE"], layers["TOPK"]) == (2 * 3, 2)


@pytest.mark.long
def test_the_reference_in_int4_agrees_with_its_checkpoint(tmp_path: Path) -> None:
    """Greedily and sampled, with every drafter; and what rounding to the nearest costs is small."""
    recipe = load_recipe(INT4_RECIPE, ROUNDED)
    plan = tmp_path / "plan"
    build(recipe, INT4_RECIPE, plan)
    result = verify_plan(recipe, plan, Extent(prompts=2, new_tokens=32, texts=2))
    assert result.passed
    assert set(result.drafters) == set(result.sampled) == {"ngram", "model", "eagle3", "dspark"}
    assert all(check.equal_runs == 2 for check in (*result.drafters.values(), *result.sampled.values()))
    cost = result.quantization
    assert cost is not None
    assert cost.positions == 2 * 32
    assert cost.same_tokens > 0.9
    assert 0 < cost.kl < 0.05
    assert 0 < cost.bits_per_byte < 1.04 * cost.float_bits_per_byte  # the goal for int4


@pytest.mark.long
def test_a_search_on_text_halves_what_int4_costs_the_reference(tmp_path: Path) -> None:
    costs = []
    for name, overrides in (("searched", []), ("rounded", ROUNDED)):
        recipe = load_recipe(INT4_RECIPE, ["drafters=[]", *overrides[:1]])
        build(recipe, INT4_RECIPE, tmp_path / name)
        result = verify_plan(recipe, tmp_path / name, Extent(prompts=8, new_tokens=64))
        assert result.passed
        assert result.quantization is not None
        assert result.quantization.texts == 92
        costs.append(result.quantization)
    searched, rounded = costs
    assert searched.kl < 0.7 * rounded.kl
    assert 0 < searched.growth < 0.7 * rounded.growth < 0.01


@pytest.mark.parametrize("plan", KV, indirect=True)
def test_a_saved_prefix_cache_gives_what_a_cold_start_gives(plan: Path, alone: Runtime, tmp_path: Path) -> None:
    """KV of all models, and tokens; the file holds as many bytes as the type says."""
    config = PrefixCacheConfig(max_cached_tokens=512, min_prefix_length=1)
    first = Runtime.load(plan, threads=1, prefix_cache=config)
    for drafter in ("head", "bushy"):
        first.generate(PROMPT, max_new_tokens=4, drafter=drafter, ignore_eos=True, auto_disable=False)
    first.save_prefix_cache(tmp_path / "prompts")
    second = Runtime.load(plan, threads=1, prefix_cache=config)
    assert second.load_prefix_cache(tmp_path / "prompts") >= len(PROMPT)
    for drafter in ("none", "head", "bushy"):
        options = {"max_new_tokens": 12, "drafter": drafter, "logprobs": 5, "ignore_eos": True, "auto_disable": False}
        warm_session, cold_session = second.session(), alone.session()
        warm, cold = (session.generate(PROMPT, **options) for session in (warm_session, cold_session))
        assert warm.token_ids == cold.token_ids
        assert [entry.logprob for entry in warm.logprobs] == [entry.logprob for entry in cold.logprobs]
        assert warm.stats.cached_tokens == len(PROMPT) - 1
        warm_kv, cold_kv = (
            session.buffers.array(names.TARGET, names.KV)[:, 0, :, : len(PROMPT)]
            for session in (warm_session, cold_session)
        )
        np.testing.assert_array_equal(warm_kv.view(np.uint8), cold_kv.view(np.uint8))


@pytest.mark.parametrize("plan", KV, indirect=True)
def test_memory_and_inspect_count_the_bytes_of_the_type(plan: Path, everything_plan: Path) -> None:
    config = PrefixCacheConfig(max_cached_tokens=512)
    found = Runtime.load(plan, threads=1, prefix_cache=config)
    small, large = found.memory(), Runtime.load(everything_plan, threads=1, prefix_cache=config).memory()
    assert set(small.kv_bytes) == set(large.kv_bytes) >= {names.TARGET, names.PARTIAL, "head", "chain"}
    kind = plan.name.split("-")[1]
    for model, size in small.kv_bytes.items():
        head_dim = found.manifest.models[names.TARGET if model == names.PARTIAL else model].head_dim
        slot = {"float16": 2 * head_dim, "int8": head_dim + 4}[kind]
        assert size * 4 * head_dim == large.kv_bytes[model] * slot
    assert large.engine_bytes - small.engine_bytes == sum(large.kv_bytes.values()) - sum(small.kv_bytes.values())
    assert small.prefix_cache_bytes < large.prefix_cache_bytes
    inspected = describe(plan)["backends"]["onnxruntime-cpu"]
    assert inspected["kv_caches"] == {name: {"type": kind, "bytes": size} for name, size in small.kv_bytes.items()}
    assert inspected["session_bytes"] == small.engine_bytes


@pytest.mark.long
@pytest.mark.parametrize("kept", ["int8", "float16"])
def test_the_reference_agrees_with_its_checkpoint(kept: str, tmp_path: Path) -> None:
    """Logits within the type's bound of transformers', and with every drafter the tokens of plain decoding."""
    recipe = load_recipe(REFERENCE_RECIPE, [f"kv_cache={kept}"])
    build(recipe, REFERENCE_RECIPE, tmp_path / "plan")
    result = verify_plan(recipe, tmp_path / "plan", Extent(prompts=2, new_tokens=32))
    assert result.passed
    assert result.logit_bound == KV_LOGIT_BOUND[kept]
    assert KV_LOGIT_BOUND[kept] / 100 < result.max_logit_error < KV_LOGIT_BOUND[kept] / 2
    assert all(check.equal_runs == 2 for check in (*result.drafters.values(), *result.sampled.values()))


PAGE = 4096


def mapped(plan: Path, weights: Callable[[onnx.NodeProto], Iterable[str]]) -> int:
    """Assert that the `weights` of the target's nodes lie in pages of the plan's file; return how many these are."""
    folder = plan / "engines" / "onnxruntime-cpu"
    graph = onnx.load(folder / "target.onnx", load_external_data=False).graph
    names = {name for node in graph.node for name in weights(node)}
    lies = [{e.key: e.value for e in tensor.external_data} for tensor in graph.initializer if tensor.name in names]
    pages = set[int]()  # of the file
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        if line.endswith(str(folder / "weights.bin")):
            places, _, offset, *_ = line.split()
            first, end = (int(place, 16) for place in places.split("-"))
            pages |= {int(offset, 16) + page for page in range(0, end - first, PAGE)}
    assert len(lies) == len(names)
    for tensor in lies:
        begin = int(tensor["offset"])
        assert begin % PAGE == 0
        assert {begin + page for page in range(0, int(tensor["length"]), PAGE)} <= pages
    return len(lies)
