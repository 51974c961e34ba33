"""Every feature in every way of asking, as in `test_features.py`, on a real GPU: `pytest -m gpu`. Tokens are compared
with tokens of the same GPU; where its kernels part a near tie by the size of a step, a test of these may fail."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from outrider import Runtime
from outrider.plans.errors import PlanError
from outrider.plans.plan import open_plan
from outrider.runtime.backends import reason_against
from outrider.runtime.backends.cuda_driver import architecture
from tests.conftest import made_once
from tests.integration.gpu_plans import gpu_plan
from tests.integration.test_features import *  # noqa: F403  # the tests, and the fixture `doors`
from tests.integration.test_onnxruntime_cuda import CUDA

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=["cuda", CUDA])
def plan(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        own = architecture()
    except PlanError as error:
        pytest.skip(f"{request.param}: {error}")
    plan = open_plan(gpu_plan(partial(made_once, tmp_path_factory), "everything", request.param, own))
    reason = reason_against(request.param, plan.manifest.backends[request.param])
    if reason is not None and request.param == CUDA:  # its library may be missing; ours is this package
        pytest.skip(f"{request.param}: {reason}")
    Runtime.load(plan.root)
    return plan.root
