"""BlockSummary, BlockSelect and PartialKvGather on a device: the CPU kernels, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.plugins import native
from outrider.plugins.cuda.launches import ELEMENTS
from tests.plugins.partial_caches import PartialCaches
from tests.plugins.test_cuda_kernels import FEW
from tests.plugins.test_partial_kv import caches

ml_dtypes = pytest.importorskip("ml_dtypes")

WRITTEN = {"BlockSummary": ("key_max", "key_min"), "BlockSelect": ("selected",)}
WRITTEN |= {"PartialKvGather": ("partial_kv", "resident")}
ANY = caches(("float32", "float16", ml_dtypes.bfloat16))


def bits(array: np.ndarray) -> np.ndarray:
    return array.view(f"u{array.itemsize}")


def compare(kernels, cache: PartialCaches, op: str, **attributes: int) -> None:
    """Both kernels on the same memory, twice on the device; what the CPU's wrote is left there."""
    before = {name: getattr(cache, name).copy() for name in WRITTEN[op]}
    ours = {name: array.copy() for name, array in before.items()}
    native.create(op, cache.tensors(op), cache.layout | attributes)()
    call = kernels.create(op, cache.tensors(op) | ours, cache.layout | attributes)
    for _ in range(2):
        for name, array in before.items():
            ours[name][...] = array
        assert call() == 0
        for name, array in ours.items():
            np.testing.assert_array_equal(bits(array), bits(getattr(cache, name)), err_msg=name)


def spoil(cache: PartialCaches, array: np.ndarray) -> None:
    for value in (np.nan, np.inf, -np.inf, -0.0, 0.0):
        array[cache.rng.random(array.shape) < 0.05] = value


@FEW
@given(cache=ANY, data=st.data(), spoiled=st.booleans())
def test_summaries(kernels, cache, data, spoiled) -> None:
    if spoiled:
        spoil(cache, cache.kv)
    cache.key_max[:], cache.key_min[:] = -77, 77  # of blocks that are said to be summarised, which stay so
    cache.summarised[0] = data.draw(st.integers(0, cache.key_max.shape[-1]))
    for covered in sorted(data.draw(st.lists(st.integers(0, cache.capacity), min_size=1, max_size=3))):
        cache.covered[0] = covered
        compare(kernels, cache, "BlockSummary")
        cache.summarised[0] = max(cache.summarised[0], cache.candidates(covered))


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16], ids=ELEMENTS[1:])
def test_every_number_of_two_bytes_is_summarised_as_on_the_cpu(kernels, dtype) -> None:
    cache = PartialCaches(layers=1, heads=1, head_dim=256, block_size=1, sink_blocks=0, capacity=257, dtype=dtype)
    bits(cache.kv)[0, 1, 0, :256] = np.arange(2**16).reshape(256, 256)
    cache.covered[0] = 257
    compare(kernels, cache, "BlockSummary")
    expected = cache.kv[0, 1, 0, :256].astype(np.float32)
    np.testing.assert_array_equal(cache.key_max[1, 0, 0, :, :256], expected.T)


@FEW
@given(
    cache=ANY,
    data=st.data(),
    reduction=st.integers(0, 2),
    most_queries=st.sampled_from([1, 2, 8]),
    spoiled=st.booleans(),
)
def test_selection(kernels, cache, data, reduction, most_queries, spoiled) -> None:
    cache.covered[0] = data.draw(st.integers(0, cache.capacity))
    cache.summary()()
    if spoiled:
        spoil(cache, cache.queries)
    cache.budget[0] = data.draw(st.integers(0, cache.retrieval))
    cache.keep(data.draw(st.integers(1, cache.new)))
    cache.keep_windows_in_reach()
    cache.selected[:] = -77
    compare(kernels, cache, "BlockSelect", reduction=reduction, most_queries=most_queries)


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("ties", [False, True])
def test_long_heads_many_queries_and_more_candidates_than_threads(fast_kernels, reduction, ties) -> None:
    cache = PartialCaches(
        layers=1, group=3, head_dim=70, block_size=1, retrieval=150, capacity=700, new=20, ties=ties
    )  # fmt: skip
    cache.covered[0] = 700
    cache.summary()()
    cache.keep(13)
    for budget in (0, 1, 149, 150):
        cache.budget[0] = budget
        compare(fast_kernels, cache, "BlockSelect", reduction=reduction, most_queries=11)


def test_scores_that_are_all_alike_or_no_numbers_leave_the_first_blocks(kernels) -> None:
    cache = PartialCaches(retrieval=4, capacity=97)
    cache.covered[0] = 97
    cache.summary()()
    cache.keep(2)
    cache.budget[0] = 4
    for value in (0.0, np.nan):
        cache.queries[:] = value
        compare(kernels, cache, "BlockSelect")
        assert (cache.selected == np.arange(4)).all()


@FEW
@given(cache=ANY, data=st.data(), kept=st.sampled_from([0.0, 0.5, 1.0]))
def test_gathering(kernels, cache, data, kept) -> None:
    sink = cache.layout["sink_blocks"] * cache.layout["block_size"]
    cache.partial_kv[:] = -7  # what is said to be there stays so
    for covered in sorted(data.draw(st.lists(st.integers(sink, cache.capacity), min_size=1, max_size=3))):
        cache.covered[0] = covered
        cache.choose(min(cache.candidates(covered), data.draw(st.integers(0, cache.retrieval))))
        there = cache.rng.random(cache.resident.shape) < kept
        cache.resident[there] = np.broadcast_to(cache.selected, there.shape)[there]
        compare(kernels, cache, "PartialKvGather")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("head_dim", [1, 2, 40, 128])
def test_gathering_moves_lanes_of_every_width(kernels, dtype, head_dim) -> None:
    cache = PartialCaches(head_dim=head_dim, block_size=4, capacity=50, dtype=dtype)
    cache.covered[0] = 50
    cache.choose(3)
    cache.resident[:, :, :, 1] = cache.selected[:, :, 1]
    compare(kernels, cache, "PartialKvGather")


@pytest.mark.parametrize(
    ("op", "name", "index", "value"),
    [
        ("BlockSummary", "covered", 0, -1),
        ("BlockSummary", "covered", 0, 25),
        ("BlockSummary", "covered", 0, 2**40),
        ("BlockSummary", "summarised", 0, -1),
        ("BlockSummary", "row", 0, 2),
        ("BlockSummary", "layer_windows", 0, -1),
        ("BlockSelect", "layer_windows", 0, -1),
        ("BlockSelect", "layer_windows", 0, 8),
        ("BlockSelect", "row", 0, -1),
        ("PartialKvGather", "row", 0, 2),
        ("BlockSelect", "covered", 0, -1),
        ("BlockSelect", "covered", 0, 2**40),
        ("BlockSelect", "kept_count", 0, 0),
        ("BlockSelect", "kept_count", 0, 5),
        ("BlockSelect", "kept_indices", 1, 4),
        ("BlockSelect", "kept_indices", 0, -1),
        ("BlockSelect", "budget", 0, 4),
        ("BlockSelect", "budget", 0, -1),
        ("PartialKvGather", "covered", 0, 1),
        ("PartialKvGather", "covered", 0, 25),
        ("PartialKvGather", "covered", 0, -(2**40)),
        ("PartialKvGather", "selected", (0, 0, 1), 9),
        ("PartialKvGather", "selected", (0, 0, 0), -2),
        ("PartialKvGather", "selected", (0, 0, 2), 2**40),
    ],
)
def test_what_lies_outside_is_not_followed(kernels, op, name, index, value) -> None:
    cache = PartialCaches(layers=1, heads=1, block_size=2, sink_blocks=1, window_blocks=1, retrieval=3, capacity=24)
    cache.covered[0], cache.budget[0] = 22, 2
    cache.keep(2)
    cache.choose(2)
    getattr(cache, name)[index] = value
    with pytest.raises(ValueError, match=r"must be in|there are|do not reach"):
        native.create(op, cache.tensors(op), cache.layout)()
    tensors = cache.tensors(op)
    before = {written: tensors[written].copy() for written in WRITTEN[op]}
    assert kernels.create(op, tensors, cache.layout)() == 0
    for written, array in before.items():
        np.testing.assert_array_equal(tensors[written], array)


def test_a_head_that_selects_otherwise_than_the_first_stays_as_it_is(kernels) -> None:
    cache = PartialCaches(layers=1, heads=2)
    cache.covered[0] = 22
    cache.choose(2)
    cache.selected[0, 1] = [1, -1, -1]
    cache.resident[:] = -5
    assert kernels.create("PartialKvGather", cache.tensors("PartialKvGather"), cache.layout)() == 0
    np.testing.assert_array_equal(cache.resident[1, 0, 0], cache.selected[0, 0])
    assert (cache.resident[1, 0, 1] == -5).all()
    assert (cache.partial_kv[:, 1, 1] == 0).all()


def test_a_cache_that_is_too_small_is_not_filled(kernels) -> None:
    cache = PartialCaches(layers=1, heads=1, room=5)
    cache.covered[0] = 22
    cache.choose(3)
    assert kernels.create("PartialKvGather", cache.tensors("PartialKvGather"), cache.layout)() == 0
    assert (cache.partial_kv == 0).all()
    assert (cache.resident == -1).all()


def test_more_candidates_than_there_is_room_for_are_neither_summarised_nor_selected(kernels) -> None:
    cache = PartialCaches()
    cache.covered[0], cache.budget[0] = 24, 2
    cache.keep(1)
    cache.key_max, cache.key_min = np.zeros((2, 2, 2, 2, 4, 9), np.float32)  # of ten
    for op in ("BlockSummary", "BlockSelect"):
        assert kernels.create(op, cache.tensors(op), cache.layout)() == 0
    assert (cache.key_max == 0).all()
    assert (cache.selected == -1).all()
