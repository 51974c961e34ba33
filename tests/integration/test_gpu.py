"""Sessions on a real GPU, on every backend that runs there: `pytest -m gpu`."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import get_args

import pytest

from outrider import Runtime
from outrider.compiler.backends.tensorrt_rtx import RtxCapability
from outrider.plans.errors import PlanError
from outrider.runtime.backends.cuda_driver import architecture, call
from outrider.runtime.options.options import Options
from outrider.tools.parting import find_parting
from tests.conftest import TOY_DRAFTERS, made_once
from tests.integration.gpu_plans import gpu_plan

pytestmark = pytest.mark.gpu

PROMPT = [(37 * i) % 299 + 1 for i in range(20)]
LIBRARIES = {"cuda": "cuda.core", "onnxruntime-cuda": "cuda.core", "tensorrt-rtx": "tensorrt_rtx"}  # builders'
TOLERANCE = 1e-3  # logits, float32 on both sides: the GPU sums in another order


@pytest.fixture(scope="module", params=["cuda", "onnxruntime-cuda", "tensorrt-rtx", "tensorrt"])
def target(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def plan(target: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy for this GPU. Skipped where there is none, and where the target's library is missing."""
    pytest.importorskip(LIBRARIES.get(target, target), exc_type=ImportError)
    try:
        own = architecture()
    except PlanError as error:
        pytest.skip(str(error))
    if target == "tensorrt-rtx" and own not in get_args(RtxCapability):
        pytest.skip(f"{target} has no engines for {own}")
    return gpu_plan(partial(made_once, tmp_path_factory), "toy", target, own)


@pytest.fixture(scope="module", params=[True, False], ids=["graphs", "kernel by kernel"])
def gpu(request: pytest.FixtureRequest, plan: Path, target: str) -> Runtime:
    try:
        return Runtime.load(plan, backend=target, cuda_graphs=request.param)
    except PlanError as error:
        if target != "cuda" and "cannot run here" in str(error):  # `cuda` needs what built the plan
            pytest.skip(str(error))
        raise


@pytest.mark.parametrize("drafter", ["none", *TOY_DRAFTERS])
@pytest.mark.parametrize(
    "sampling", [Options(temperature=0.0), Options(temperature=0.8, top_p=0.9, seed=3)], ids=["greedy", "sampled"]
)
def test_tokens_are_those_of_the_cpu(gpu: Runtime, toy: Runtime, drafter: str, sampling: Options) -> None:
    """Up to near ties."""
    options = sampling | Options(max_new_tokens=60, ignore_eos=True, auto_disable=False)
    session = toy.session()
    expected = session.generate(PROMPT, drafter="none", **options).token_ids
    found = gpu.generate(PROMPT, drafter=drafter, **options).token_ids
    parted = find_parting(session, 0, PROMPT, options, expected, found)
    assert parted is None or parted.margin < TOLERANCE


def test_threads_of_their_own(gpu: Runtime) -> None:
    """Sessions are made and used in other threads than the one that loaded the plan."""
    options = Options(max_new_tokens=40, ignore_eos=True, drafter="bushy", temperature=0.8, seed=4)
    expected = gpu.generate(PROMPT, **options).token_ids
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: gpu.session().generate(PROMPT, **options).token_ids, range(3)))
    assert found == [expected] * 3


def test_memory_is_given_back(gpu: Runtime) -> None:
    def free() -> int:
        gc.collect()
        gpu.session().generate(PROMPT, max_new_tokens=2)
        gc.collect()
        return int(call("cuMemGetInfo")[0])

    free()
    before = free()
    for _ in range(5):
        left = free()
    assert left > before - (16 << 20)  # what libraries keep for themselves


def test_beams(gpu: Runtime, toy: Runtime) -> None:
    ours, theirs = (runtime.beam_search(PROMPT, beams=3, max_new_tokens=6)[0] for runtime in (gpu, toy))
    assert ours.score == pytest.approx(theirs.score, abs=1e-3)
