"""KV and slot tables in memory of a device are what they are on the host, for any copies and changes."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.runtime.backends.device_kv import DeviceKv, KvShape
from outrider.runtime.backends.table_changes import LIST_BYTES, TableChanges, TableRow
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


LENGTH, FIRST = 700, LIST_BYTES // 8
LOST = st.booleans()  # an upload that never comes
CHANGES = st.lists(st.tuples(st.integers(0, 1), st.integers(0, LENGTH), st.integers(0, LENGTH)), max_size=4)


@given(rounds=st.lists(st.tuples(CHANGES, LOST), min_size=1, max_size=4))
def test_tables(emulator: Emulator, rounds: list[tuple[list[tuple[int, int, int]], bool]]) -> None:
    """Two rows of two tables; each round changes some, and is uploaded as programs are."""
    device, rng = EmulatedDevice(emulator), np.random.default_rng(0)
    size = 8 * (FIRST + 4 * LENGTH)
    block, twin = device.allocate(size), device.pinned(size)
    hosts = [twin.array(8 * (FIRST + part * LENGTH), (LENGTH,), np.int64) for part in range(4)]
    rows = {
        ("target", row): tuple(TableRow(FIRST + part * LENGTH, hosts[part]) for part in (row, 2 + row))
        for row in (0, 1)
    }
    changes = TableChanges(device, block, twin.array(0, (FIRST,), np.int64), rows)
    back = device.pinned(size)
    for changed, lost in rounds:
        for row, *ends in changed:
            start, stop = sorted(ends)
            for part in (row, 2 + row):
                hosts[part][start:stop] = rng.integers(-9, 9, stop - start)
            changes.note("target", row, start, stop)
        changes.prepare()
        if lost:
            changes.note_all()
            continue
        with device.lock():
            device.to_device(block, twin.address, LIST_BYTES)
            changes.put()
            device.to_host(back.address, block, size)
            done = device.mark()
        device.wait_for(done)
        for part, host in enumerate(hosts):
            np.testing.assert_array_equal(back.array(8 * (FIRST + part * LENGTH), (LENGTH,), np.int64), host)
