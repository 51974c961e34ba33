"""Slot tables on a device are those of the host whenever a program runs, by the list or by copies."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from outrider.runtime.backends.table_changes import LIST_BYTES, TableChanges, TableRow
from tests.plugins.emulator import Emulator
from tests.runtime.emulated_device import EmulatedDevice

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
