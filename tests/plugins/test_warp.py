"""Operations of a warp give what NumPy gives: as sources, as PTX, and on a GPU (`-m gpu`).

Watched as PTX, lanes that hand memory on must wait for each other with a barrier of the warp, and warps with one of the
block.
"""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.conftest import compiled_once
from tests.fake_cuda.provider import CudaProvider
from tests.plugins.emulator import Emulator, compile_emulator
from tests.plugins.gpu import Gpu
from tests.plugins.ptx import compile_translated

SOURCE = Path(__file__).resolve().parent / "warp_kernels.cu"
WARPS = 6  # of two blocks

Kernels = Emulator | Gpu

ON_A_DEVICE = """
import ctypes, json
from pathlib import Path
from outrider.runtime.backends.cuda_driver import CudaDevice
cubin = Path("any.cubin")
cubin.write_bytes(b"\\x7fELF")
device = CudaDevice()
device.load_kernels(cubin)
found, place = device.allocate(128), device.allocate(8)
with device.lock():
    for shared in (1 << 10, 100 << 10, 60 << 10, 120 << 10):
        device.launch("found_there", 1, 32, [ctypes.c_uint64(found), ctypes.c_uint64(place)], shared)
back = device.pinned(128)
device.to_host(back.address, found, 128)
device.wait()
print(json.dumps(back.array(0, (32,), "uint32").tolist()))
"""


def library(name: str) -> Path:
    if shutil.which("g++") is None:
        pytest.skip("kernels are emulated with g++")
    compile_library = compile_translated if name == "ptx" else compile_emulator
    source = SOURCE.read_text(encoding="utf-8")
    return compiled_once(f"warp-{name}.so", lambda out: compile_library(out, source))


@pytest.fixture(scope="module")
def watched() -> Emulator:
    pytest.importorskip("cuda.bindings")
    return Emulator(library("ptx"))


@pytest.fixture(scope="module", params=["emulated", "ptx", pytest.param("gpu", marks=pytest.mark.gpu)])
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    if request.param == "gpu":
        return Gpu(tmp_path_factory.mktemp("gpu"), str(SOURCE))
    if request.param == "ptx":
        found: Emulator = request.getfixturevalue("watched")
        return found
    return Emulator(library("emulated"))


def launch(
    kernels: Kernels, name: str, *arrays: NDArray[Any], blocks: int = 2, threads: int = 96, shared: int = 0
) -> None:
    if isinstance(kernels, Gpu):
        kernels.launch(name, blocks, threads, arrays, [], shared)
    else:
        kernels.launch(name, blocks, threads, [ctypes.c_uint64(array.ctypes.data) for array in arrays], shared)


@pytest.mark.parametrize("mask", [1, 2, 4, 8, 16, 21, 31])
def test_shuffles(kernels: Kernels, mask: int) -> None:
    rng = np.random.default_rng(mask)
    words = rng.integers(0, 2**32, (WARPS, 32), np.uint32)
    integers = words[::-1].view(np.int32).copy()
    floats = rng.normal(size=(WARPS, 32)).astype(np.float32)
    lanes = rng.integers(0, 32, (WARPS, 32), np.int32)
    given = (words, integers, floats)
    own = np.zeros((WARPS, 32), np.int64)
    across, there = ([np.zeros_like(array) for array in given] for _ in range(2))
    launch(kernels, "shuffles", *given, lanes, np.array([mask], np.int32), own, *there, *across)
    np.testing.assert_array_equal(own, np.broadcast_to(np.arange(32), own.shape))
    for array, found, other in zip(given, there, across, strict=True):
        np.testing.assert_array_equal(found, np.take_along_axis(array, lanes, axis=1))
        np.testing.assert_array_equal(other, array[:, np.arange(32) ^ mask])


def test_products_of_bytes(kernels: Kernels) -> None:
    rng = np.random.default_rng(1)
    a = rng.integers(-128, 128, (WARPS, 16, 32)).astype(np.int8)
    b = rng.integers(-128, 128, (WARPS, 8, 32)).astype(np.int8)
    c = rng.integers(-(2**31), 2**31, (WARPS, 16, 8)).astype(np.int32)
    expected = (c + a.astype(np.int64) @ b.astype(np.int64).transpose(0, 2, 1)).astype(np.int32)
    launch(kernels, "products_of_bytes", a, b, c)
    np.testing.assert_array_equal(c, expected)


@pytest.mark.parametrize(("kernel", "dtype"), [("halves", np.float16), ("bfloats", ml_dtypes.bfloat16)])
def test_products_of_floats(kernels: Kernels, kernel: str, dtype: Any) -> None:
    """Of small integers, exact in any order, and of any numbers, as the emulators order them."""
    rng = np.random.default_rng(2)
    whole = [rng.integers(-9, 10, shape).astype(np.float32) for shape in ((3, 16, 16), (3, 8, 16), (3, 16, 8))]
    any_numbers = [rng.normal(size=array.shape).astype(np.float32) for array in whole]
    a, b, c = (np.concatenate(both) for both in zip(whole, any_numbers, strict=True))
    a, b = a.astype(dtype), b.astype(dtype)
    expected = c.copy()
    for k in range(16):
        expected += a[:, :, None, k].astype(np.float32) * b[:, None, :, k].astype(np.float32)
    launch(kernels, f"products_of_{kernel}", a, b, c)
    np.testing.assert_array_equal(c[:3], expected[:3])
    if isinstance(kernels, Gpu):
        np.testing.assert_allclose(c, expected, rtol=1e-5, atol=1e-5)
    else:
        np.testing.assert_array_equal(c, expected)


def bits(array: NDArray[Any]) -> NDArray[Any]:
    return array.view(f"u{array.itemsize}")


def test_every_number_of_two_bytes_is_widened(kernels: Kernels) -> None:
    numbers = np.arange(2**16, dtype=np.uint16)
    halves, bfloats = np.zeros((2, 2**16), np.float32)
    launch(kernels, "widened", numbers, halves, bfloats, blocks=256, threads=256)
    quiet = numbers[(numbers & 0x7C00 != 0x7C00) | (numbers & 0x3FF == 0) | (numbers & 0x200 != 0)]
    np.testing.assert_array_equal(bits(halves)[quiet], bits(quiet.view(np.float16).astype(np.float32)))
    assert np.isnan(np.delete(halves, quiet)).all()
    np.testing.assert_array_equal(bits(bfloats), numbers.astype(np.uint32) << 16)


@pytest.mark.parametrize(("place", "dtype"), [(0, np.float16), (1, ml_dtypes.bfloat16)])
def test_numbers_are_narrowed_to_the_nearest(kernels: Kernels, place: int, dtype: Any) -> None:
    """Every number of two bytes itself, all numbers halfway between two, and their neighbours."""
    sizes = np.arange(2**15, dtype=np.uint16).view(dtype).astype(np.float32)
    sizes = sizes[np.isfinite(sizes)]
    middles = (sizes[:-1].astype(np.float64) + sizes[1:]).astype(np.float64) / 2
    middles = np.append(middles.astype(np.float32), np.float32(65520 if dtype is np.float16 else np.inf))
    near = [np.nextafter(middles, np.float32(toward)) for toward in (-np.inf, np.inf)]
    special = np.array([0, np.inf, np.nan, 2.0**-149, 2.0**-126, 3e38], np.float32)
    values = np.concatenate([sizes, middles, *near, special])
    values = np.concatenate([values, -values])
    values = np.resize(values, -(-len(values) // 256) * 256)
    found = np.zeros((2, len(values)), np.uint16)
    launch(kernels, "narrowed", values, found[0], found[1], blocks=len(values) // 256, threads=256)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(found[place], bits(values.astype(dtype)))


def hand_on(kernels: Kernels, kernel: str, threads: int = 32) -> None:
    given = np.random.default_rng(threads).integers(0, 256, (3, threads, 16)).astype(np.uint8)
    room = np.zeros(given.size + 16, np.uint8)
    start = -room.ctypes.data % 16
    aligned = room[start : start + given.size].reshape(given.shape)
    aligned[...] = given
    to = np.zeros_like(given)
    launch(kernels, kernel, aligned, to, blocks=3, threads=threads, shared=16 * threads)
    np.testing.assert_array_equal(to, np.roll(given, -1, axis=1))


@pytest.mark.parametrize(
    ("kernel", "threads"),
    [
        ("bytes_after_warp_barrier", 32), ("words_after_warp_barrier", 32), ("bytes_after_barrier", 32),
        ("bytes_after_barrier", 96),
    ],
)  # fmt: skip
def test_memory_is_handed_on(kernels: Kernels, kernel: str, threads: int) -> None:
    hand_on(kernels, kernel, threads)


@pytest.mark.parametrize(
    ("kernel", "threads"),
    [
        ("bytes_without_barrier", 32), ("bytes_after_shuffle", 32), ("words_without_barrier", 32),
        ("bytes_after_warp_barrier", 64), ("words_after_warp_barrier", 64),
    ],
)  # fmt: skip
def test_a_barrier_that_is_missing_is_found(watched: Emulator, kernel: str, threads: int) -> None:
    with pytest.raises(
        AssertionError, match=rf"a race in {kernel}: thread \d+ of block \d (loads|stores) what .* in shared memory"
    ):
        hand_on(watched, kernel, threads)


def test_memory_is_written_again_after_a_barrier_alone(kernels: Kernels, watched: Emulator) -> None:
    to = np.zeros((2, 96), np.uint32)
    launch(kernels, "again_after_warp_barrier", to, shared=4 * 96)
    np.testing.assert_array_equal(to, np.broadcast_to(np.arange(96) + 100, to.shape))
    with pytest.raises(AssertionError, match=r"a race in again_without_barrier: .* in shared memory"):
        launch(watched, "again_without_barrier", to, shared=4 * 96)


@pytest.mark.parametrize(
    ("kernel", "threads"), [("halves_of_a_warp_wait_for_others", 64), ("again_after_warp_barrier", 48)]
)
@pytest.mark.parametrize("way", ["emulated", "ptx"])
def test_lanes_that_part_are_found(request: pytest.FixtureRequest, way: str, kernel: str, threads: int) -> None:
    emulator: Emulator = request.getfixturevalue("watched") if way == "ptx" else Emulator(library(way))
    with pytest.raises(AssertionError, match="do not all reach the same barriers, or lanes the same collectives"):
        launch(emulator, kernel, np.zeros((2, threads), np.uint32), threads=threads, shared=4 * threads)


def test_dynamic_shared_memory_holds_anything_at_first(kernels: Kernels) -> None:
    """Each block finds what no other has left; a launch may have much of it."""
    found = np.zeros((4, 32), np.uint32)
    launch(kernels, "found_there", found, np.array([100 << 10]), blocks=4, threads=32, shared=(100 << 10) + 1)
    if not isinstance(kernels, Gpu):
        assert found.all()


def test_a_write_beside_dynamic_shared_memory_is_found() -> None:
    emulator = Emulator(library("emulated"))
    for place in (-1, 128):
        found = np.zeros((1, 32), np.uint32)
        with pytest.raises(AssertionError, match="found_there writes beside its 128 bytes of dynamic shared memory"):
            launch(emulator, "found_there", found, np.array([place]), blocks=1, threads=32, shared=128)


def test_a_device_asks_leave_for_much_shared_memory(fake_cuda: Path, tmp_path: Path) -> None:
    """Of the driver, which else refuses the launch."""
    pytest.importorskip("cuda.bindings")
    device = CudaProvider(tmp_path, fake_cuda, library("emulated"))
    ended = device.run(ON_A_DEVICE, folder=tmp_path)
    assert ended.events("fault") == []
    assert ended.events("kernel") == ["found_there"] * 4
    assert all(ended.answer)
