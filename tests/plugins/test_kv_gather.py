"""KvGather: the kernel is the reference, and compaction equals fancy indexing on a copy."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins import native
from plugins.reference import kv_gather


class Gather:
    """The op bound to an arena of distinct numbers."""

    def __init__(self, source, base, destination, *, shape=(4, 2, 32, 3), dtype="float32", capacity=None):
        self.kv = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
        self.source = np.zeros(capacity or max(len(source), 1), np.int64)
        self.source[: len(source)] = source
        self.count, self.base, self.destination = np.array([len(source)]), np.array([base]), np.array([destination])
        self.op = native.create(
            "KvGather",
            {
                "kv": self.kv,
                "source": self.source,
                "source_count": self.count,
                "source_base": self.base,
                "destination": self.destination,
            },
        )


@st.composite
def gathers(draw):
    base, destination = draw(st.integers(0, 20)), draw(st.integers(0, 20))
    source = draw(st.lists(st.integers(-base, 31 - base), max_size=12))
    return Gather(source, base, destination, dtype=draw(st.sampled_from(["float32", "float16"])))


@settings(max_examples=200, deadline=None)
@given(gather=gathers())
def test_kernel_equals_reference_also_where_moves_feed_each_other(gather):
    expected = gather.kv.copy()
    source = gather.source[: gather.count[0]]
    kv_gather(expected, source, int(gather.base[0]), int(gather.destination[0]))
    gather.op()
    np.testing.assert_array_equal(gather.kv, expected)


@settings(max_examples=100, deadline=None)
@given(rows=st.sets(st.integers(0, 15), max_size=16), base=st.integers(0, 16), lower=st.integers(0, 16))
def test_compaction_equals_fancy_indexing_on_a_copy(rows, base, lower):
    source, destination = sorted(rows), max(0, base - lower)
    gather = Gather(source, base, destination)
    before = gather.kv.copy()
    gather.op()
    expected = before.copy()
    expected[:, :, destination : destination + len(source)] = before[:, :, base + np.array(source, np.int64)]
    np.testing.assert_array_equal(gather.kv, expected)


def test_a_run_moved_up_over_itself_repeats_its_first_row_as_the_rule_says():
    gather = Gather([0, 1, 2], 0, 1, shape=(1, 1, 5, 1))
    gather.op()
    assert gather.kv.ravel().tolist() == [0, 0, 0, 0, 4]


def test_an_accepted_chain_moves_nothing():
    gather = Gather(range(6), 10, 10)
    before = gather.kv.copy()
    gather.op()
    np.testing.assert_array_equal(gather.kv, before)


def test_bfloat16_is_moved():
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    gather = Gather([3], 0, 0, shape=(1, 1, 4, 2), dtype=bfloat16)
    gather.op()
    assert gather.kv.astype(np.float32).ravel().tolist() == [6, 7, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("dtype", ["float64", "int32", "int16", "int8"])
def test_dtypes_that_are_no_model_precision_are_refused(dtype):
    with pytest.raises(TypeError, match=f"'kv' .* float32 or float16 or bfloat16 .*found {dtype}"):
        Gather([0], 0, 0, dtype=dtype)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"count": 5}, r"source_count\[0\] is 5; it must be in 0\.\.4"),
        ({"count": -1}, r"source_count\[0\] is -1"),
        ({"base": 33}, r"source_base\[0\] is 33; it must be in 0\.\.32"),
        ({"base": 31}, r"source\[3\] is 3; it must be in -31\.\.0"),
        ({"destination": 29}, r"destination\[0\] is 29; it must be in 0\.\.28"),
        ({"destination": -1}, r"destination\[0\] is -1"),
        ({"source": -1}, r"source\[3\] is -1"),
    ],
)
def test_rows_outside_the_arena_are_refused_and_nothing_moves(change, sentence):
    gather = Gather([0, 0, 0, 3], 0, 4)
    before = gather.kv.copy()
    for name, value in change.items():
        getattr(gather, name)[-1] = value
    with pytest.raises(ValueError, match=f"KvGather: {sentence}"):
        gather.op()
    np.testing.assert_array_equal(gather.kv, before)
