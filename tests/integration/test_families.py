"""Every model family, from a checkpoint that transformers wrote to the tokens of a plan.

transformers is the oracle of the weights in float32; plain decoding is that of speculation, at any precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from outrider import PrefixCacheConfig, Runtime
from outrider.compiler.backends import BACKEND_CLASSES
from outrider.compiler.build import build
from outrider.compiler.recipe import load_recipe
from outrider.runtime.options.options import Options
from outrider.tools.verify.verification import verify_plan
from tests.compiler.eagle3_heads import write_eagle3
from tests.conftest import BuildOnce, made_once
from tests.integration.families import DRAFTERS, TOYS, write_toy
from tests.integration.long_context import prompt
from tests.integration.test_random_use import expect_the_tokens_of_the_target_alone
from tests.runtime.emulated_device import EmulatedBackend, EmulatedDevice, EmulatedKernels, driven

CUDA = "onnxruntime-cuda"
PROMPT = [(41 * i) % 299 + 1 for i in range(80)]  # longer than every window
NEW = 40


def int4(name: str) -> list[str]:
    """Weights of int4, searched on text in a target that has attention and MLPs alone."""
    toy = TOYS[name]
    searched = "" if toy.experts or toy.states else ", method: awq, calibration: text.jsonl"
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


SHORT = ("ministral", "qwen3_moe", "gpt_oss", "gemma2", "gemma3", "phi3", "granite", "lfm2")
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
def plan(recipe: Path, built: BuildOnce) -> Path:
    return built(f"{recipe.parent.name}/plan", (), recipe)


@pytest.fixture(scope="module")
def any_plan(request: pytest.FixtureRequest, recipe: Path, built: BuildOnce) -> Path:
    if request.param == "float32":
        return Path(request.getfixturevalue("plan"))
    return built(f"{recipe.parent.name}/int4", int4(name_of(recipe)), recipe)


DRAFTING = ("gemma2",)
"""Families whose draft models are built in the short run; the long one has those of all."""


@pytest.fixture(scope="module")
def some_plan(recipe: Path, request: pytest.FixtureRequest, built: BuildOnce) -> Path:
    if name_of(recipe) in DRAFTING:
        return Path(request.getfixturevalue("plan"))
    return built(f"{recipe.parent.name}/ngram", ["drafters=[{name: ngram, kind: ngram}]"], recipe)


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


ONE_ROW = ["capacity.batching=false", "capacity.branches=4"]
CACHE = PrefixCacheConfig(max_cached_tokens=512)
PLAIN = Options(max_new_tokens=16, ignore_eos=True, auto_disable=False, temperature=0.8, seed=4)


@contextmanager
def emulated_engines(device: EmulatedDevice, records: bool = True) -> Iterator[None]:
    """For a while engines run on the device, launched as TensorRT for RTX launches its own."""
    backend = EmulatedBackend(device, records=records, records_engines=True)
    with driven(CUDA, lambda target: backend):
        yield


@pytest.fixture(scope="module")
def on_device(request: pytest.FixtureRequest, recipe: Path, built: BuildOnce) -> Iterator[Callable[[str], Runtime]]:
    """Load the recipe's plan for an emulated device: for our kernels (`cuda`), or graphs by a target's rules."""
    pytest.importorskip("cuda.core")
    with ExitStack() as opened:

        def load(target: str) -> Runtime:
            kernels = target == "cuda"
            device = EmulatedDevice(request.getfixturevalue("engine_emulator" if kernels else "emulator"))
            backend = "cuda" if kernels else CUDA
            overrides = [*ONE_ROW, f"backends=[{{kind: {backend}, compute_capabilities: [sm_90]}}]"]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(BACKEND_CLASSES[CUDA], "rules", BACKEND_CLASSES[target if not kernels else CUDA].rules)
                plan = built(f"{recipe.parent.name}/{target}-device", overrides, recipe)
            engines = driven("cuda", lambda own: EmulatedKernels(own, device, records=True))
            opened.enter_context(engines if kernels else emulated_engines(device))
            return opened.enter_context(closing(Runtime.load(plan, prefix_cache=CACHE)))

        yield load


@pytest.fixture(scope="module", params=[CUDA, "tensorrt-rtx", "cuda"])
def runtime(request: pytest.FixtureRequest, recipe: Path, on_device: Callable[[str], Runtime]) -> Runtime:
    toy = TOYS[name_of(recipe)]
    if toy.states or (toy.experts and request.param == "cuda"):
        pytest.skip("the backend has no kernels for layers of experts, or for states, and refuses them")
    return on_device(request.param)


@pytest.mark.long  # `test_features_on_devices.py` and `test_kernel_engines.py` have the toy in every run
def test_branches_requests_and_the_prefix_cache_on_devices(runtime: Runtime, plan: Path) -> None:
    """As families are lowered for GPUs, as graphs or to our own kernels, on an emulated device: windows, capped scores,
    norms after a block, rotations of a part of each head."""
    oracle, prefix = Runtime.load(plan, threads=1), prompt(3, 50)  # longer than every window
    own = [[7 + place] for place in range(4)]
    expected = [oracle.generate([*prefix, *tokens], drafter="none", **PLAIN).token_ids for tokens in own]
    asked = [(tokens, Options(drafter=drafter) | PLAIN) for tokens, drafter in zip(own, DRAFTERS, strict=True)]
    branches = [{"prompt": tokens, "stream_id": 0, **options} for tokens, options in asked]
    assert [each.token_ids for each in runtime.generate_branches(prefix, branches)] == expected
    for _ in range(2):
        found = [handle.result() for handle in runtime.submit_all([([*prefix, *own], each) for own, each in asked])]
        assert [each.token_ids for each in found] == expected
    assert all(each.stats.reused_tokens >= len(prefix) - 1 for each in found)
