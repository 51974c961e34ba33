"""KvGather: the kernel is the reference, compaction equals fancy indexing on a copy of each row; what a slot holds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from outrider.plans.buffers import DType
from outrider.plans.kv_slots import SCALE_BYTES, slot_size
from outrider.plugins import native
from outrider.plugins.ops.kv_gather import kv_gather
from outrider.plugins.reference import from_slots, to_slots
from tests.properties import cheap

CAPACITY = 32


class Gather:
    """The op bound to a KV cache of distinct numbers, with room for more tokens and rows than the step has."""

    def __init__(self, source, new, base, destination, *, spare=0, dtype="float32", shape=(3, 2, CAPACITY, 3)):
        planes, *slots = shape
        rows = len(new)
        self.rows = rows
        cache = (planes, rows + spare, *slots)
        self.kv = np.arange(np.prod(cache)).reshape(cache).astype(dtype)
        self.source, self.count = np.full(max(sum(new), len(source)) + spare, -1, np.int64), np.array([len(source)])
        self.source[: len(source)] = source
        self.splits = np.zeros(rows + spare + 1, np.int64)
        self.splits[1 : rows + 1] = np.cumsum(new)
        self.base, self.destination = np.zeros((2, rows + spare), np.int64)
        self.base[:rows], self.destination[:rows] = base, destination
        moves = {"source": self.source, "source_count": self.count, "row_splits": self.splits}
        moves |= {"source_base": self.base, "destination": self.destination}
        self.op = native.create("KvGather", {"kv": self.kv} | moves)

    def run(self):
        self.op(self.rows)

    def expected(self):
        kv, rows = self.kv.copy(), self.rows
        source = self.source[: self.count[0]]
        kv_gather(kv, source, self.splits[: rows + 1], self.base[:rows], self.destination[:rows])
        return kv


@st.composite
def gathers(draw):
    """Any tokens in any order: repeated, descending, of rows in turn, so that moves feed each other."""
    new = draw(st.lists(st.integers(0, 8), min_size=1, max_size=4))
    base, destination = ([draw(st.integers(0, 20)) for _ in new] for _ in range(2))
    source = draw(st.lists(st.integers(0, sum(new) - 1), max_size=12)) if sum(new) else []
    dtype = draw(st.sampled_from(["float32", "float16", "int8"]))
    return Gather(source, new, base, destination, spare=draw(st.integers(0, 2)), dtype=dtype)


@cheap
@given(gather=gathers())
def test_kernel_equals_reference_also_where_moves_feed_each_other(gather):
    expected = gather.expected()
    gather.run()
    np.testing.assert_array_equal(gather.kv, expected)


@cheap
@given(
    rows=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=5),
    spare=st.integers(0, 2),
    data=st.data(),
)
def test_compaction_equals_fancy_indexing_on_a_copy_of_each_row(rows, spare, data):
    new, base, lower = zip(*rows, strict=True)
    source = sorted(data.draw(st.sets(st.integers(0, sum(new) - 1)))) if sum(new) else []
    gather = Gather(source, new, base, np.maximum(0, np.subtract(base, lower)), spare=spare)
    expected, source = gather.kv.copy(), np.array(source, np.int64)
    for row in range(gather.rows):
        first, end = gather.splits[row : row + 2]
        kept = source[(source >= first) & (source < end)] - first
        to = gather.destination[row]
        expected[:, row, :, to : to + len(kept)] = gather.kv[:, row][:, :, gather.base[row] + kept]
    gather.run()
    np.testing.assert_array_equal(gather.kv, expected)


def test_a_run_moved_up_over_itself_repeats_its_first_slot_as_the_rule_says():
    gather = Gather([0, 1, 2], [3], [0], [1], shape=(1, 1, 5, 1))
    gather.run()
    assert gather.kv.ravel().tolist() == [0, 0, 0, 0, 4]


def test_bfloat16_is_moved():
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    gather = Gather([3], [4], [0], [0], shape=(1, 1, 4, 2), dtype=bfloat16)
    gather.run()
    assert gather.kv.astype(np.float32).ravel().tolist() == [6, 7, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("dtype", ["float64", "int16"])
def test_dtypes_that_no_cache_has_are_refused(dtype):
    with pytest.raises(TypeError, match=f"'kv' .* float32 or float16 or bfloat16 or int8 .*found {dtype}"):
        Gather([0], [1], [0], [0], dtype=dtype)


@pytest.mark.parametrize(
    ("rows", "change", "sentence"),
    [
        (3, {}, r"extent R is 3, but the bound buffers hold 0 to 2"),
        (2, {"count": (0, 7)}, r"source_count\[0\] is 7; it must be in 0\.\.6"),
        (2, {"count": (0, -1)}, r"source_count\[0\] is -1"),
        (2, {"splits": (0, 1)}, r"row_splits\[0\] is 1; it must be in 0\.\.0"),
        (2, {"splits": (2, 1)}, r"row_splits\[2\] is 1; it must be in 2\.\.6"),
        (2, {"splits": (2, 7)}, r"row_splits\[2\] is 7; it must be in 2\.\.6"),
        (1, {}, r"source\[1\] is 3; it must be in 0\.\.1"),
        (0, {}, r"source\[0\] is 0; it must be in 0\.\.-1"),
        (2, {"source": (3, -1)}, r"source\[3\] is -1; it must be in 0\.\.5"),
        (2, {"base": (1, 33)}, r"source_base\[1\] is 33; it must be in 0\.\.32"),
        (2, {"base": (1, 29)}, r"source\[3\] is 5; it must be in 2\.\.4"),
        (2, {"destination": (1, 30)}, r"destination\[1\] is 30; it must be in 0\.\.29"),
        (2, {"destination": (0, -1)}, r"destination\[0\] is -1"),
        (2, {"destination": (1, 2**63 - 1)}, r"destination\[1\] is 9223372036854775807; it must be in 0\.\.32"),
    ],
)
def test_numbers_outside_the_step_or_the_cache_are_refused_and_nothing_moves(rows, change, sentence):
    gather = Gather([0, 3, 4, 5], [2, 4], [4, 4], [0, 0])
    before = gather.kv.copy()
    for name, (index, value) in change.items():
        getattr(gather, name)[index] = value
    with pytest.raises(ValueError, match=f"KvGather: {sentence}"):
        gather.op(rows)
    np.testing.assert_array_equal(gather.kv, before)


NUMBERS = arrays.arrays(np.float32, (5, 24), elements=st.floats(-(2.0**60), 2.0**60, width=32))


@cheap
@given(numbers=NUMBERS)
def test_int8_rounds_each_number_by_half_a_step_at_most(numbers) -> None:
    found = from_slots(to_slots(numbers, np.int8))
    largest = np.abs(numbers).max(axis=-1, keepdims=True)
    step = largest.astype(np.float64) / 127
    error = np.abs(found.astype(np.float64) - numbers)
    assert (error <= np.maximum(0.5001 * step, 2.0**-100)).all()
    assert ((np.abs(found).max(axis=-1) >= 0.999999 * largest[:, 0]) | (largest[:, 0] < 2.0**-100)).all()


def test_a_slot_of_int8_ends_with_its_scale() -> None:
    slot = to_slots(np.array([254.0, -127.0, 1.0, 3.0, 5.0], np.float32), np.int8)
    assert slot[:5].tolist() == [127, -64, 0, 2, 2]  # in steps of 2: -63.5, 0.5, 1.5 and 2.5 go to the even neighbour
    assert slot[5:].view(np.float32) == 2
    assert len(slot) == slot_size(DType.INT8, 5) == 5 + SCALE_BYTES


@pytest.mark.parametrize("spoiled", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_makes_its_slot_no_number(spoiled) -> None:
    found = from_slots(to_slots(np.array([[1, spoiled], [1, 2]], np.float32), np.int8))
    assert np.isnan(found[0]).all()
    assert np.isfinite(found[1]).all()
