"""The tests of `test_features.py` on devices: emulated, with memory apart from the host's and kernels as fibers (for
`onnxruntime-cuda` engines run on the CPU), and on a real GPU with `pytest -m gpu`. Tokens are compared with tokens of
the same device; where a GPU's kernels part a near tie by the size of a step, a test of these may fail."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from outrider import Runtime
from outrider.plans.errors import PlanError
from outrider.plans.plan import open_plan
from outrider.runtime.backends import DRIVERS, reason_against
from outrider.runtime.backends.base import Driver
from outrider.runtime.backends.cuda_driver import architecture
from tests.conftest import made_once
from tests.integration.gpu_plans import gpu_plan
from tests.integration.test_features import *  # noqa: F403  # the tests, and the fixture `doors`
from tests.integration.test_features import PREFIX, WAYS, Doors, options
from tests.integration.test_onnxruntime_cuda import CUDA
from tests.integration.toy_forward import toy_log_probabilities
from tests.runtime.emulated_device import EmulatedBackend, EmulatedDevice, EmulatedKernels, driven

pytest.importorskip("cuda.core")

KERNELS = "cuda"
TARGETS = [
    pytest.param((CUDA, True), id="emulated"),
    pytest.param((KERNELS, True), id="emulated kernels", marks=pytest.mark.long),  # a pass is a hundred of them
    pytest.param((KERNELS, False), id="kernels", marks=pytest.mark.gpu),
    pytest.param((CUDA, False), id="onnxruntime", marks=pytest.mark.gpu),
]


@pytest.fixture(scope="module", params=TARGETS)
def plan(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    target, emulated = request.param
    if not emulated:
        yield plan_of_this_gpu(target, tmp_path_factory)
        return
    kernels = target == KERNELS
    device = EmulatedDevice(request.getfixturevalue("engine_emulator" if kernels else "emulator"))
    launched = "outrider_attend" if kernels else "outrider_bim_mask"
    with pytest.MonkeyPatch.context() as patch:
        if kernels:
            patch.setitem(DRIVERS, "onnxruntime-cpu", Driver(lambda _: "the tests are for another", None))  # type: ignore[arg-type]
        with driven(target, lambda own: EmulatedKernels(own, device) if kernels else EmulatedBackend(device)):
            yield request.getfixturevalue("everything_kernel_plan" if kernels else "everything_cuda_plan")
    assert device.launched[launched] > 0


def plan_of_this_gpu(target: str, factory: pytest.TempPathFactory) -> Path:
    try:
        own = architecture()
    except PlanError as error:
        pytest.skip(f"{target}: {error}")
    plan = open_plan(gpu_plan(partial(made_once, factory), "everything", target, own))
    reason = reason_against(target, plan.manifest.backends[target])
    if reason is not None and target == CUDA:  # its library may be missing; ours is this package
        pytest.skip(f"{target}: {reason}")
    Runtime.load(plan.root)
    return plan.root


@pytest.mark.long
@pytest.mark.parametrize("way", [way for way in WAYS if way != "server"])
def test_the_tokens_are_those_of_a_numpy_forward(doors: Doors, toy_recipe: Path, way: str) -> None:
    """This finds what sequences that only share a device would all get wrong: each is computed by itself."""
    asked = [options(drafter=drafter, max_new_tokens=12) for drafter in ("none", "chain", "ngram", "head")]
    for place, found in enumerate(doors.ask(way, asked)):
        tokens = [*PREFIX, 7 + place, *found.token_ids]
        forward = toy_log_probabilities(toy_recipe.parent / "target", tokens)
        assert found.token_ids == forward[len(PREFIX) : -1].argmax(-1).tolist()
