"""The backend `cuda` on an emulated device: its tokens, to the bit where weights are quantised, and what it refuses.

`test_features_on_devices.py` has every feature in every way of asking.
"""

from __future__ import annotations

from pathlib import Path
from shutil import copytree

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from outrider import PrefixCacheConfig, Runtime
from outrider.compiler.design import design_plan
from outrider.compiler.inspect import describe
from outrider.compiler.recipe import load_recipe
from outrider.plans.errors import PlanError, RecipeError
from outrider.plans.plan import open_plan
from outrider.plugins.cuda.engine_kernels import ENGINE_KERNELS
from outrider.plugins.cuda.resources import kernel_resources
from outrider.runtime.backends import DRIVERS
from outrider.runtime.backends.base import Driver
from outrider.runtime.options.options import Options
from tests.conftest import CPU_AND, BuildOnce, made_once, write_toy
from tests.fake_cuda.provider import CudaProvider
from tests.integration.test_features import PREFIX, Doors
from tests.integration.toy_forward import toy_log_probabilities
from tests.plugins.emulator import Emulator
from tests.runtime.emulated_device import EmulatedDevice, EmulatedKernels

pytest.importorskip("cuda.core")

CUDA, CPU = "cuda", "onnxruntime-cpu"
PROMPT = [(37 * i) % 299 + 1 for i in range(24)]
_DRAFTERS = (
    "drafters=[{name: ngram, kind: ngram}, {name: chain, kind: model, checkpoint: drafter, gamma: 4, weights: "
    "{type: int8}}, {name: head, kind: eagle3, checkpoint: head, tree: {top_k: 3, depth: 1, nodes: 6}}]"
)
_CAPACITY = "capacity={context: 160, prefill_chunk: 16, branches: 4, batching: true}"


@pytest.fixture(scope="module")
def quantised_plan(built: BuildOnce) -> Path:
    """int4, with KV in float16, one branch, for the CPU and for our kernels."""
    drafters = _DRAFTERS.replace("{name: head", "{name: block, kind: block, checkpoint: block}, {name: head")
    capacity = "capacity={context: 160, prefill_chunk: 16}"
    changes = ["target.weights={type: int4}", drafters, "kv_cache=float16", capacity, CPU_AND % CUDA]
    return built("quantised-kernel-plan", changes)


@pytest.fixture(scope="module")
def half_plan(built: BuildOnce) -> Path:
    backends = f"backends=[{{kind: {CUDA}, dtype: bfloat16, compute_capabilities: [sm_90]}}]"
    return built("half-kernel-plan", [_DRAFTERS.replace("int8", "int4"), _CAPACITY, backends])


@pytest.fixture
def device(engine_emulator: Emulator) -> EmulatedDevice:
    return EmulatedDevice(engine_emulator)


@pytest.fixture
def emulated(device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> EmulatedDevice:
    made = Driver(lambda plan: None, lambda plan, settings: EmulatedKernels(plan, device, records=settings.cuda_graphs))
    monkeypatch.setitem(DRIVERS, CUDA, made)
    return device


def asked(drafter: str, temperature: float) -> Options:
    return Options(
        drafter=drafter, temperature=temperature, seed=5, max_new_tokens=8, ignore_eos=True, logprobs=3,
        auto_disable=False,
    )  # fmt: skip


def test_quantised_weights_give_the_bits_of_the_cpu(quantised_plan: Path, emulated: EmulatedDevice) -> None:
    """Log-probabilities and all, with any drafter, and drafters draft what they do on the CPU."""
    on_cpu = Runtime.load(quantised_plan, backend=CPU, threads=1)
    ours = Runtime.load(quantised_plan, backend=CUDA, cuda_graphs=False)
    accepted = 0
    for drafter in ("none", "ngram", "chain", "block", "head"):
        expected, found = (each.generate(PROMPT, **asked(drafter, 0.9)) for each in (on_cpu, ours))
        assert (found.token_ids, found.logprobs) == (expected.token_ids, expected.logprobs)
        assert (found.stats.rounds, found.stats.accepted) == (expected.stats.rounds, expected.stats.accepted)
        accepted += found.stats.accepted
    assert accepted > 0
    assert emulated.launched["outrider_quant_product"] > 0


def halves(x: NDArray[np.float32]) -> NDArray[np.float32]:
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def test_the_numbers_are_those_of_a_numpy_forward(half_plan: Path, toy_recipe: Path, emulated: EmulatedDevice) -> None:
    """In bfloat16, which is rounded to where NumPy rounds: what is left is the order of float32 sums."""
    runtime = Runtime.load(half_plan, backend=CUDA, cuda_graphs=False)
    found = runtime.generate(PROMPT, **asked("none", 0.0))
    tokens = [*PROMPT, *found.token_ids]
    expected = toy_log_probabilities(toy_recipe.parent / "target", tokens, halves)[len(PROMPT) - 1 : -1]
    differences = [entry.logprob - row[entry.token_id] for entry, row in zip(found.logprobs, expected, strict=True)]
    assert found.token_ids == expected.argmax(-1).tolist()
    # A sum that rounds to the other neighbour, 2^-8 apart, is one of 32 inputs of a product: that is seldom, and small.
    # After a token of whose prompt some sum rounds otherwise all are 4e-4 off; without rounding the median is 6e-3.
    assert np.median(np.abs(differences)) < 1e-3
    assert np.abs(differences).max() < 0.05


def test_every_drafter_in_one_pass_has_the_tokens_of_a_numpy_forward(
    half_plan: Path, toy_recipe: Path, emulated: EmulatedDevice
) -> None:
    runtime = Runtime.load(half_plan, backend=CUDA)
    drafters = [asked(drafter, 0.0) for drafter in ("none", "chain", "ngram", "head")]
    for place, found in enumerate(Doors(runtime, runtime, None).ask("submit, rows", drafters)):
        forward = toy_log_probabilities(toy_recipe.parent / "target", [*PREFIX, 7 + place, *found.token_ids], halves)
        assert found.token_ids == forward[len(PREFIX) : -1].argmax(-1).tolist()


def test_rows_that_a_batch_filled_up_hold_no_prefix(half_plan: Path, emulated: EmulatedDevice) -> None:
    """Requests end one after another, and steps of the last are filled up in the rows of the first."""
    runtime = Runtime.load(half_plan, backend=CUDA, prefix_cache=PrefixCacheConfig(max_cached_tokens=1024))
    questions = [([*PREFIX, token], asked("none", 0.9) | {"max_new_tokens": 6}) for token in (7, 8, 9, 10)]
    expected = [handle.result().token_ids for handle in runtime.submit_all(questions)]
    again = [handle.result() for handle in runtime.submit_all(questions)]
    assert [each.token_ids for each in again] == expected
    assert all(each.stats.reused_tokens >= len(PREFIX) - 1 for each in again)


def test_bfloat16_gives_the_same_bits_with_any_drafter_and_beside_others(
    half_plan: Path, emulated: EmulatedDevice
) -> None:
    runtime = Runtime.load(half_plan, backend=CUDA, cuda_graphs=False)
    expected = runtime.generate(PROMPT, **asked("none", 0.9))
    for drafter in ("ngram", "chain", "head"):
        found = runtime.generate(PROMPT, **asked(drafter, 0.9))
        assert (found.token_ids, found.logprobs) == (expected.token_ids, expected.logprobs)
    alone = runtime.generate([*PROMPT, 7], **asked("none", 0.9))
    branches = [{"prompt": [token], "stream_id": 0, **asked("chain", 0.9)} for token in (7, 8, 9)]
    together = runtime.generate_branches(PROMPT, branches, mode="in-one-sequence")
    assert (together[0].token_ids, together[0].logprobs) == (alone.token_ids, alone.logprobs)
    assert emulated.launched["outrider_half_product"] > 0


def test_a_step_is_one_recorded_launch(quantised_plan: Path, emulated: EmulatedDevice) -> None:
    session = Runtime.load(quantised_plan, backend=CUDA).session()
    assert emulated.graphs > 0
    options = asked("chain", 0.0)
    del options["logprobs"]
    session.generate(PROMPT, **options)
    session.reset()
    before, enqueued = emulated.replays, emulated.enqueued
    result = session.generate(PROMPT, **options)
    rounds = result.stats.rounds
    assert emulated.replays - before >= rounds - 1
    assert emulated.enqueued - enqueued < 3 * rounds + 800  # prompts are enqueued call by call
    on_cpu = Runtime.load(quantised_plan, backend=CPU, threads=1)
    assert result.token_ids == on_cpu.generate(PROMPT, **asked("none", 0.0)).token_ids


ALONE = """
import json, sys
from outrider import Runtime
root, *drafters = sys.argv[1:]
runtime = Runtime.load(root, backend="cuda")
options = dict(max_new_tokens=8, ignore_eos=True, auto_disable=False, temperature=0.9, seed=5)
prompt = [(37 * i) % 299 + 1 for i in range(24)]
print(json.dumps([runtime.generate(prompt, drafter=drafter, **options).token_ids for drafter in drafters]))
"""


def test_it_needs_a_driver_and_no_onnx_runtime(
    quantised_plan: Path, fake_cuda: Path, engine_emulator: Emulator, tmp_path: Path
) -> None:
    """As on a GPU, over a driver whose kernels are emulated: graphs are recorded and replayed, memory is its own."""
    (tmp_path / "onnxruntime.py").write_text("raise ImportError", encoding="utf-8")
    driver = CudaProvider(tmp_path, fake_cuda, engine_emulator.library)
    drafters = ("none", "chain", "block")
    ended = driver.run(ALONE, quantised_plan, *drafters, folder=tmp_path)
    expected = Runtime.load(quantised_plan, backend=CPU, threads=1).generate(PROMPT, **asked("none", 0.9))
    assert ended.answer == [expected.token_ids] * len(drafters)
    assert ended.events("fault") == []
    assert len(ended.events("capture")) > 0
    assert len(ended.events("replay")) > 8


def test_a_plan_has_the_kernels_of_its_engines_and_inspect_lists_them_by_part(quantised_plan: Path) -> None:
    plan = open_plan(quantised_plan)
    cubin = plan.file(plan.manifest.backends[CUDA].kernels["sm_90"]).read_bytes()
    assert set(ENGINE_KERNELS) <= set(kernel_resources(cubin))
    engine = describe(quantised_plan)["backends"][CUDA]["engines"]["target"]
    parts = {part["part"]: part for part in engine["parts"]}
    product = parts["layers.0.q+k+v"]
    assert (product["kernels"], product["operations"]) == (["quant_product"], 2 * 32 * 128)
    assert product["bytes_moved"] > 32 * 128 // 2
    assert parts["attention.2"]["kernels"] == ["attend"]


def test_an_engine_that_was_changed_is_refused(quantised_plan: Path, emulated: EmulatedDevice, tmp_path: Path) -> None:
    changed = copytree(quantised_plan, tmp_path / "plan")
    path = changed / "engines" / CUDA / "target.json"
    path.write_text(path.read_text().replace('"kernel"', '"kernal"', 1))
    with pytest.raises(PlanError, match=r"target\.json"):
        Runtime.load(changed, backend=CUDA)  # by its hash
    with pytest.raises(PlanError, match=r"no list of kernels: .*kernal.*; build the plan again"):
        Runtime.load(changed, backend=CUDA, verify=False)
    path.write_text(path.read_text().replace('"kernal"', '"kernel"').replace("outrider_rms_norm", "outrider_rms_gone"))
    with pytest.raises(PlanError, match=r"target\.json: .*'outrider_rms_gone': there is no such kernel; build the"):
        Runtime.load(changed, backend=CUDA, verify=False)


def test_what_it_has_no_kernels_for_is_refused(toy_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = made_once(tmp_path_factory, "experts-toy", lambda out: write_toy(out, experts=True))
    recipe = load_recipe(folder / "model.yaml", ["drafters=[]", f"backends=[{CPU}, {CUDA}]"])
    with pytest.raises(RecipeError, match=r"target\.checkpoint is .* experts, and cuda has no .*onnxruntime-cuda"):
        design_plan(recipe)
    recipe = load_recipe(toy_recipe, ["kv_cache=int8", f"backends=[{CUDA}]"])
    with pytest.raises(RecipeError, match="kv_cache is int8; cuda keeps keys and values in float32 or float16 here"):
        design_plan(recipe)
