"""The rows that a drafter's KV cache keeps of a long sequence, against a dictionary of all of them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from outrider.plans import names
from outrider.plans.manifest import Geometry
from outrider.runtime.kv.memory import HostKv
from outrider.runtime.kv.slots import FIRST, SlotTable
from outrider.runtime.kv.window import WindowedRow

SINK, WINDOW, MODEL = 3, 5, "drafter"
ROOM = SINK + 2 * WINDOW


class Memory:
    """As much of a session's buffers as rows need: a row holds its own number."""

    def __init__(self) -> None:
        capacity = 40
        self.arrays = {
            names.KV: np.zeros((2, 1, 1, capacity, 1), np.float32),
            names.BIM: np.zeros((1, capacity), np.int64),
            names.SLOT_POSITIONS: np.zeros((1, capacity), np.int64),
        }

    def array(self, model: str, tensor: str) -> np.ndarray:
        return self.arrays[tensor]

    def changed(self, *_: object) -> None: ...


def rows(window: int, lead: int) -> tuple[WindowedRow, np.ndarray]:
    memory = Memory()
    geometry = Geometry(
        layers=1, heads=1, kv_heads=1, head_dim=1, hidden_size=1, vocab_size=1, context=30, view_bucket=1, capacity=40,
        prefill_chunk=WINDOW, branches=1, sink=SINK if window else 0, window=window,
    )  # fmt: skip
    slots = SlotTable(MODEL, memory, None)  # type: ignore[arg-type]
    kept = WindowedRow(HostKv(memory.arrays[names.KV][:, 0]), geometry, slots, lead)
    return kept, memory.arrays[names.KV][0, 0, 0, :, 0]


@given(data=st.data(), window=st.sampled_from([0, WINDOW]), lead=st.integers(0, 1))
def test_kept_indices_are_those_of_the_sequence(data: st.DataObject, window: int, lead: int) -> None:
    kept, slots = rows(window, lead)
    there: set[int] = set()  # numbers of rows that were given and not forgotten
    end = 0
    for _ in range(data.draw(st.integers(1, 25))):
        kind = data.draw(st.sampled_from(["append", "append", "append", "truncate", "skip", "restore"]))
        if kind == "append":
            count = data.draw(st.integers(1, min(WINDOW, max(1, 25 - end))))
            kept.make_room(count)
            assert kept.end == end
            at = kept.slots.length
            slots[at : at + count] = range(end, end + count)
            kept.slots.claim(count, FIRST, end)
            there |= set(range(end, end + count))
            end += count
        elif kind == "truncate":
            to = data.draw(st.integers(0, end))
            kept.truncate(to)
            there = {row for row in there if row < min(to, kept.end)}
            assert kept.end <= to
            end = kept.end
        elif kind == "skip" and window:
            to = data.draw(st.integers(max(end, SINK), max(end, SINK) + 12))  # never into the sink: see `too_far`
            kept.skip_to(to)
            there = {row for row in there if row < SINK} if to > end else there
            end = to
        elif kind == "restore":
            known = data.draw(st.integers(lead + 1, 20))
            if known <= kept.reach or (not window and end > known):
                continue
            for first, last, place in kept.missing(known):
                numbers = np.arange(first - lead, last - lead, dtype=np.float32)
                kv = HostKv(np.broadcast_to(numbers[:, None], (2, 1, len(numbers), 1)))
                place.put(first, len(numbers), kv, 0)
                there |= set(range(max(first - lead, 0), last - lead))
            kept.restore(known)
            end = known - lead
        assert kept.end == end
        length = kept.slots.length
        held = [int(row) for row in slots[:length]]
        assert held == sorted(set(held))  # in order, each once
        assert set(held) <= there
        assert not window or length <= ROOM + WINDOW
        if held and kept.reach > lead:
            assert held[-1] == end - 1 or end - 1 not in there
        recent = {row for row in there if row >= end - WINDOW} if window else there
        assert recent <= set(held)
        solid = kept.known - lead if kept.known else 0
        assert set(range(solid)) <= set(held)
        assert kept.known <= end + lead
        there &= set(held)


def test_what_a_long_prompt_drops_is_not_computed() -> None:
    kept, _ = rows(WINDOW, 0)
    kept.pass_over(25, 5)
    assert kept.end == 0  # the sink is
    kept.slots.claim(5, FIRST, 0)
    kept.pass_over(25, 10)
    assert kept.end == 10
    kept.pass_over(25, 25)
    assert (kept.end, kept.known) == (20, SINK)
