"""Every feature in every way of asking, as in `test_features.py`, on a real GPU: `pytest -m gpu`. Tokens are compared
with tokens of the same GPU; where its kernels part a near tie by the size of a step, a test of these may fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from compiler.build import build
from compiler.recipe import load_recipe
from plans.errors import PlanError
from runtime import Runtime
from runtime.backends import reason_against
from runtime.backends.cuda_driver import architecture
from tests.conftest import EVERYTHING
from tests.integration.test_features import *  # noqa: F403  # the tests, and the fixture `doors`
from tests.integration.test_onnxruntime_cuda import CUDA

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=["cuda", CUDA])
def plan(request: pytest.FixtureRequest, toy_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        target = f"backends=[{{kind: {request.param}, compute_capabilities: [{architecture()}]}}]"
    except PlanError as error:
        pytest.skip(f"{request.param}: {error}")
    recipe = load_recipe(toy_recipe, [*EVERYTHING, "capacity.branches=4", target])
    plan = build(recipe, toy_recipe, tmp_path_factory.mktemp("everything") / "plan").plan
    reason = reason_against(request.param, plan.manifest.backends[request.param])
    if reason is not None and request.param == CUDA:  # its library may be missing; ours is this package
        pytest.skip(f"{request.param}: {reason}")
    Runtime.load(plan.root)
    return plan.root
