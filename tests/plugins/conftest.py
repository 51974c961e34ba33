"""What several op tests share: the CUDA kernels, and strategies of sampling slots and adversarial logits."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from hypothesis import strategies as st

from outrider.plans.sampling import Sampling
from outrider.plugins.ops.row_choices import SamplingSlots
from tests.conftest import compiled_once
from tests.plugins.emulator import KERNELS, OF_ENGINES, Emulator
from tests.plugins.gpu import Gpu
from tests.plugins.ptx import compile_translated
from tests.plugins.tensorrt_stand_in import StandIn

TEMPERATURES = st.sampled_from([0.0, 1e-3, 0.1, 0.7, 1.0, 1.7, 100.0])
TOP_PS = st.sampled_from([0.0, 1e-12, 0.1, 0.5, 0.9, 0.999999, 1.0 - 2.0**-53, 1.0])
MIN_PS = st.sampled_from([0.0, 0.0, 1e-12, 0.05, 0.5, 1.0])

TOP_KS = st.sampled_from([0, 1, 2, 3, 7, 50, 10**6, 2**53 + 2, 2**63 - 1])
SIGMAS = st.sampled_from([0.0, 0.0, 0.5, 1.0, 3.0])
SETTINGS = st.builds(Sampling, TEMPERATURES, TOP_KS, TOP_PS, MIN_PS, st.integers(0, 1), SIGMAS)


@st.composite
def _slots(draw, branches: int) -> SamplingSlots:
    def column(values, dtype):
        return np.array(draw(st.lists(values, min_size=branches, max_size=branches)), dtype=dtype)

    return SamplingSlots(
        sampling=column(SETTINGS, np.float64),
        seed=column(st.integers(0, 2**64 - 1), np.uint64),
        stream=column(st.integers(-(2**63), 2**63 - 1), np.int64),
    )


@st.composite
def _logits(draw, rows: int, vocabulary: int) -> np.ndarray:
    """float32 `[rows, vocabulary]`: smooth, full of ties, huge, nearly masked; never a row of -inf alone."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scale = draw(st.sampled_from([0.0, 1e-3, 1.0, 5.0, 40.0, 1e30]))
    logits = (rng.normal(size=(rows, vocabulary)) * scale).astype(np.float32)
    kind = draw(st.sampled_from(["smooth", "ties", "zeros", "masked", "infinite"]))
    if kind == "ties":
        logits = np.round(logits)
    elif kind == "zeros":
        logits = np.where(rng.random(logits.shape) < 0.5, np.float32(-0.0), np.float32(0.0))
    elif kind == "masked":
        logits[rng.random(logits.shape) < 0.8] = -np.inf
        logits[:, rng.integers(vocabulary)] = 0.5
    elif kind == "infinite":
        logits[:, rng.integers(vocabulary)] = np.inf
    return logits


@pytest.fixture(scope="session")
def slots():
    """`slots(branches)`: a strategy of SamplingSlots."""
    return _slots


@pytest.fixture(scope="session")
def logits_rows():
    """`logits_rows(rows, vocabulary)`: a strategy of logits."""
    return _logits


def _translated(name: str, source: str) -> Emulator:
    pytest.importorskip("cuda.bindings")
    if shutil.which("g++") is None:
        pytest.skip("translated PTX is compiled with g++")
    return Emulator(compiled_once(name, lambda out: compile_translated(out, source)))


@pytest.fixture(scope="session")
def translated() -> Emulator:
    """The CUDA kernels of our ops as NVRTC compiles them, translated for the CPU, once."""
    return _translated("translated.so", KERNELS)


@pytest.fixture(scope="session")
def translated_engines() -> Emulator:
    """The same of those that engines of the backend `cuda` are made of."""
    return _translated("engines-translated.so", OF_ENGINES)


GPU = pytest.param("gpu", marks=pytest.mark.gpu)


ON_THE_CPU = {"emulated": "emulator", "ptx": "translated", "tensorrt": "plugin_shells"}
OP_KERNELS = (*ON_THE_CPU, GPU)


def kernels_of(request: pytest.FixtureRequest, factory: pytest.TempPathFactory) -> Emulator | StandIn | Gpu:
    if request.param == "gpu":
        return Gpu(factory.mktemp("gpu"))
    if request.param == "tensorrt":
        pytest.importorskip("cuda.bindings")  # a layer is built with its PTX
    found: Emulator | StandIn = request.getfixturevalue(ON_THE_CPU[request.param])
    return found


@pytest.fixture(scope="session", params=["emulated", "ptx", GPU])
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Emulator | StandIn | Gpu:
    """The CUDA kernels: their sources and their PTX as blocks of fibers on the CPU, and on a GPU where there is one."""
    return kernels_of(request, tmp_path_factory)


@pytest.fixture(scope="session", params=OP_KERNELS)
def op_kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Emulator | StandIn | Gpu:
    """As `kernels`, and as TensorRT's plugins, whose kernels run on the CPU."""
    return kernels_of(request, tmp_path_factory)


@pytest.fixture(scope="session", params=["emulated", pytest.param("ptx", marks=pytest.mark.long), GPU])
def engine_kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Emulator | Gpu:
    """As `kernels`, those of engines of the backend `cuda` among them, whose translation takes half a minute."""
    if request.param == "gpu":
        return Gpu(tmp_path_factory.mktemp("gpu"), "engine.cu")
    found: Emulator = request.getfixturevalue("translated_engines" if request.param == "ptx" else "engine_emulator")
    return found


@pytest.fixture(scope="session", params=["emulated", GPU])
def fast_kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Emulator | StandIn | Gpu:
    """The same for sizes that take translated PTX too long."""
    return kernels_of(request, tmp_path_factory)
