"""Plans with quantised weights: speculation, company and mode change no token, as in float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider import Runtime
from outrider.compiler.build import build
from outrider.compiler.inspect import describe
from outrider.compiler.recipe import load_recipe
from outrider.tools.verify.verification import verify_plan
from tests.conftest import EVERYTHING, REFERENCE_RECIPE, made_once
from tests.integration.mapped import mapped
from tests.integration.quantised import calibration_text, quantised
from tests.integration.random_use import expect_the_tokens_of_the_target_alone
from tests.integration.step_logits import expect_the_bits_of_plain_code, expect_the_same_bits

INT4_RECIPE = REFERENCE_RECIPE.with_name("reference-int4.yaml")
ROUNDED = ["target.weights={type: int4}", "drafters[1].weights={type: int4}"]


@pytest.fixture(scope="module", params=["int4", pytest.param("int8", marks=pytest.mark.long)])
def plan(request: pytest.FixtureRequest, toy_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = calibration_text(tmp_path_factory.mktemp("calibration"))
    recipe = load_recipe(toy_recipe, quantised(EVERYTHING, request.param, text))
    return made_once(tmp_path_factory, f"{request.param}-everything-plan", lambda out: build(recipe, toy_recipe, out))


@pytest.fixture
def alone(plan: Path) -> Iterator[Runtime]:
    runtime = Runtime.load(plan, threads=1)
    yield runtime
    runtime.close(timeout=60)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not say what is mapped")
def test_weights_are_mapped_where_they_lie_and_not_copied(plan: Path, alone: Runtime) -> None:
    """ONNX Runtime reads into its own memory what it packs anew, and a tensor that does not begin at a page."""
    assert alone.generate("import", max_new_tokens=1).token_ids
    assert mapped(plan, lambda node: node.input[1:2] if node.op_type in ("QuantMatMul", "QuantGather") else []) > 10


@pytest.mark.usefixtures("run_ahead")
@pytest.mark.parametrize("mode", ["batching", pytest.param("in-one-sequence", marks=pytest.mark.long)])
def test_tokens_depend_on_neither_drafter_nor_company(plan: Path, alone: Runtime, mode: str) -> None:
    expect_the_tokens_of_the_target_alone(alone, plan, mode, 25, seed=3)


def test_logits_are_the_same_bits_in_a_prompt_and_in_a_step(plan: Path) -> None:
    expect_the_same_bits(Runtime.load(plan, threads=2), [(37 * i) % 299 + 1 for i in range(40)], (1, 2, 5, 8, 15))


def test_logits_are_the_same_bits_on_any_processor(plan: Path) -> None:
    expect_the_bits_of_plain_code(plan)


def test_inspect_shows_bytes_by_type(plan: Path) -> None:
    kind = plan.name.partition("-")[0]
    engines = describe(plan)["backends"]["onnxruntime-cpu"]["engines"]
    target = engines["target"]["weights"]
    assert set(target) == {kind, "int8", "float32", "int64"}
    rows = 32 * (64 + 32 + 32) + 64 * 32 + 3 * 32 * 64  # of a layer: q, k, v, o, gate, up, down
    head = 320 * (32 + 2)  # 300 tokens in groups of 32, with a scale of two bytes
    bits = 4 if kind == "int4" else 8
    layers = 3 * (rows * bits // 8 + rows // 32 * 2)
    assert target[kind] == layers + (head if kind == "int8" else 0)
    assert target["int8"] == head + (layers if kind == "int8" else 0)
    assert "int8" not in engines["classical-head"]["weights"]


@pytest.mark.long
def test_the_reference_in_int4_agrees_with_its_checkpoint(tmp_path: Path) -> None:
    """Greedily and sampled, with every drafter; and what rounding to the nearest costs is small."""
    recipe = load_recipe(INT4_RECIPE, ROUNDED)
    plan = tmp_path / "plan"
    build(recipe, INT4_RECIPE, plan)
    result = verify_plan(recipe, plan, prompts=2, new_tokens=32, texts=2)
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
        result = verify_plan(recipe, tmp_path / name, prompts=8, new_tokens=64)
        assert result.passed
        assert result.quantization is not None
        assert result.quantization.texts == 92
        costs.append(result.quantization)
    searched, rounded = costs
    assert searched.kl < 0.7 * rounded.kl
    assert 0 < searched.growth < 0.7 * rounded.growth < 0.01
