"""KV in memory of a device moves as KV in an array of the host does, for any copies one after another."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.runtime.backends.device_kv import DeviceKv, KvShape
from outrider.runtime.kv.memory import HostKv, KvMemory, host_kv
from tests.plugins.emulator import Emulator
from tests.runtime.emulated_device import EmulatedDevice

PLANES, HEADS, SIZE, SLOTS, ROWS = 4, 2, 3, 12, 3
COPIES = st.lists(
    st.tuples(
        st.integers(0, ROWS), st.integers(0, ROWS), st.integers(0, SLOTS), st.integers(0, SLOTS), st.integers(0, 9)
    ),
    max_size=8,
)


@pytest.fixture(scope="module")
def device(emulator: Emulator) -> EmulatedDevice:
    return EmulatedDevice(emulator)


def rows_of_a_cache(device: EmulatedDevice, values: np.ndarray) -> list[KvMemory]:
    """Rows of KV `[planes, rows, heads, slots, size]`, which lie between each other's planes."""
    address = device.allocate(values.nbytes)
    with device.lock():
        device.to_device(address, values.ctypes.data, values.nbytes)
        done = device.mark()
    device.wait_for(done)
    shape = KvShape(PLANES, HEADS, SLOTS, SIZE, ROWS * HEADS, np.float16)
    return [DeviceKv(device, address + row * HEADS * SLOTS * shape.line, shape) for row in range(ROWS)]


@given(copies=COPIES, seed=st.integers(0, 99))
def test_rows_and_pages(device: EmulatedDevice, copies: list[tuple[int, int, int, int, int]], seed: int) -> None:
    """Rows of a cache and the pages of a pool, within themselves too, where slots move over each other."""
    values = np.random.default_rng(seed).normal(size=(PLANES, ROWS, HEADS, SLOTS, SIZE)).astype(np.float16)
    ours = [*rows_of_a_cache(device, values), DeviceKv.allocate(device, PLANES, HEADS, SLOTS, SIZE, np.float16)]
    theirs = [
        *(HostKv(values[:, row].copy()) for row in range(ROWS)),
        host_kv(PLANES, HEADS, SLOTS, SIZE, np.float16),
    ]
    for to, source, at, first, count in copies:
        count = min(count, SLOTS - at, SLOTS - first)
        for memory in (ours, theirs):
            memory[to].copy(at, memory[source], first, count)
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.slots, mine.slot_bytes) == (other.slots, other.slot_bytes) == (SLOTS, PLANES * HEADS * SIZE * 2)
        np.testing.assert_array_equal(mine.array(0, SLOTS), other.array(0, SLOTS))


def test_memory_is_given_back(device: EmulatedDevice) -> None:
    gc.collect()
    before = device.held
    kept = DeviceKv.allocate(device, PLANES, HEADS, SLOTS, SIZE, np.float32)
    kept.copy(1, kept, 0, 4)
    assert device.held > before
    del kept
    gc.collect()
    assert device.held == before
