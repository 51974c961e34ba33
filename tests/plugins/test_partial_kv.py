"""BlockSummary, BlockSelect, PartialKvGather: the kernels of the CPU are the references, and those of devices are the
CPU's, bit for bit."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.plugins import native
from outrider.plugins.cuda.launches import ELEMENTS
from outrider.plugins.ops.block_select import block_select
from outrider.plugins.ops.block_summary import block_summary
from outrider.plugins.ops.partial_kv_gather import partial_kv_gather
from tests.plugins.conftest import GPU, kernels_of
from tests.plugins.partial_caches import PartialCaches
from tests.plugins.test_cuda_kernels import FEW
from tests.properties import cheap


@st.composite
def caches(draw, dtypes=("float32", "float16", "int8")):
    layers = draw(st.integers(1, 3))
    return PartialCaches(
        seed=draw(st.integers(0, 2**32 - 1)),
        layers=layers,
        windows=draw(st.lists(st.sampled_from([0, 1, 5, 11]), min_size=layers, max_size=layers)),
        heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 3)),
        head_dim=draw(st.sampled_from([1, 3, 8])),
        block_size=draw(st.sampled_from([1, 2, 4])),
        sink_blocks=draw(st.integers(0, 2)),
        window_blocks=draw(st.integers(1, 3)),
        retrieval=draw(st.integers(1, 5)),
        capacity=draw(st.sampled_from([24, 97, 330])),
        rows=(rows := draw(st.integers(1, 3))),
        row=draw(st.integers(0, rows - 1)),
        dtype=draw(st.sampled_from(dtypes)),
        ties=draw(st.booleans()),
    )


def spoil(cache: PartialCaches, array: np.ndarray) -> None:
    """Make some numbers extreme; of int8, the scales of some slots NaN."""
    if array.dtype == np.int8:
        scales = array[..., -4:]
        scales[cache.rng.random(scales.shape[:-1]) < 0.05] = np.array([np.nan], np.float32).view(np.int8)
        return
    for value in (np.nan, np.inf, -np.inf, -0.0, 0.0):
        array[cache.rng.random(array.shape) < 0.05] = value


@pytest.fixture(scope="module", params=["cpu", "emulated", "ptx", GPU])
def any_kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    return None if request.param == "cpu" else kernels_of(request, tmp_path_factory)


def drawn_for(kernels, data) -> PartialCaches:
    return data.draw(caches(("float32", "float16", "int8" if kernels is None else ml_dtypes.bfloat16)))


def bits(array: np.ndarray) -> np.ndarray:
    return array.view(f"u{array.itemsize}")


def compare(kernels, cache: PartialCaches, op: str, **attributes: int) -> None:
    """Run the CPU's kernel, and where there are others these on the same memory, twice."""
    before = {name: getattr(cache, name).copy() for name in WRITTEN[op]}
    ours = {name: array.copy() for name, array in before.items()}
    native.create(op, cache.tensors(op), cache.layout | attributes)()
    if kernels is None:
        return
    call = kernels.create(op, cache.tensors(op) | ours, cache.layout | attributes)
    for _ in range(2):
        for name, array in before.items():
            ours[name][...] = array
        assert call() == 0
        for name, array in ours.items():
            np.testing.assert_array_equal(bits(array), bits(getattr(cache, name)), err_msg=name)


@FEW
@given(data=st.data(), spoiled=st.booleans())
def test_summaries_grow_block_by_block_and_are_those_of_all_at_once(any_kernels, data, spoiled):
    cache = drawn_for(any_kernels, data)
    if spoiled:
        spoil(cache, cache.kv)
    cache.key_max[:], cache.key_min[:] = -77, 77  # of blocks that count as summarised, which stay so
    cache.summarised[0] = first = data.draw(st.integers(0, cache.key_max.shape[-1]))
    most, least = cache.key_max.copy(), cache.key_min.copy()
    lengths = sorted(data.draw(st.lists(st.integers(0, cache.capacity), min_size=1, max_size=4)))
    for covered in lengths:
        cache.covered[0] = covered
        compare(any_kernels, cache, "BlockSummary")
        cache.summarised[0] = max(cache.summarised[0], cache.candidates(covered))
    expected = {"key_max": most, "key_min": least, "summarised": np.array([first])}
    block_summary(cache.tensors("BlockSummary") | expected, **cache.layout)
    np.testing.assert_array_equal(cache.key_max, most)
    np.testing.assert_array_equal(cache.key_min, least)


def test_a_summary_is_of_the_keys_between_sink_and_window():
    cache = PartialCaches(layers=1, heads=1, head_dim=1, block_size=2, sink_blocks=1, window_blocks=2, capacity=16)
    cache.kv[0, 1, 0, :, 0] = [9, 9, 3, -4, 5, 6, 7, 7, 9, 9, 9, 9, 9, 9, 9, 9]
    cache.covered[0] = 11  # the sink is 0 and 1; the window 6 to 10, two whole blocks and what begins a third
    cache.summary()()
    assert cache.key_max[1, 0, 0, 0].tolist() == [3, 6, 0, 0, 0]
    assert cache.key_min[1, 0, 0, 0].tolist() == [-4, 5, 0, 0, 0]


@FEW
@given(
    data=st.data(), reduction=st.integers(0, 2), most_queries=st.sampled_from([1, 2, 8]), spoiled=st.booleans()
)  # fmt: skip
def test_selection_is_the_reference(any_kernels, data, reduction, most_queries, spoiled):
    cache = drawn_for(any_kernels, data)
    cache.covered[0] = data.draw(st.integers(0, cache.capacity))
    cache.summary()()
    if spoiled:
        spoil(cache, cache.queries)
    cache.budget[0] = data.draw(st.integers(0, cache.retrieval))
    cache.keep(data.draw(st.integers(1, cache.new)))
    cache.keep_windows_in_reach()
    cache.selected[:] = -77
    compare(any_kernels, cache, "BlockSelect", reduction=reduction, most_queries=most_queries)
    attributes = cache.layout | {"reduction": reduction, "most_queries": most_queries}
    expected = block_select(cache.tensors("BlockSelect"), **attributes)
    np.testing.assert_array_equal(cache.selected, expected)


@cheap
@given(cache=caches(), data=st.data())
def test_a_layer_with_a_window_finds_all_that_it_sees_in_one_piece_and_in_order(cache, data):
    """Of the slots that the gather fills, the last ones hold the very tokens that the full cache ends with."""
    cache.covered[0] = covered = data.draw(st.integers(0, cache.capacity))
    candidates = cache.candidates(covered)
    cache.budget[0] = min(candidates, cache.retrieval)
    cache.keep_windows_in_reach()
    cache.keep(1)
    cache.select(0, 8)()
    cache.resident[:] = -1
    if covered < cache.layout["sink_blocks"] * cache.layout["block_size"]:
        return
    cache.gather()()
    count = int(cache.budget[0])
    filled = covered - (candidates - count) * cache.layout["block_size"]
    row = cache.row[0]
    for layer, window in enumerate(cache.layer_windows):
        seen = min(int(window) - 1, covered)  # and the token after them all
        if seen > 0:
            planes = slice(2 * layer, 2 * layer + 2)
            np.testing.assert_array_equal(
                cache.partial_kv[planes, row, :, filled - seen : filled],
                cache.kv[planes, row, :, covered - seen : covered],
            )
        assert (np.diff(cache.selected[layer, :, :count], axis=-1) > 0).all()


def test_a_budget_that_does_not_reach_a_window_is_refused_unless_every_block_is_taken():
    cache = PartialCaches(windows=[0, 8], block_size=2, sink_blocks=1, window_blocks=1, retrieval=5, capacity=60)
    cache.keep(1)
    cache.covered[0], cache.budget[0] = 40, 2
    sentence = "2 blocks and the window do not reach the last 8 tokens, which layer 1 sees"
    with pytest.raises(ValueError, match=sentence):
        cache.select(0, 8)()
    assert (cache.selected == -1).all()
    cache.covered[0] = 8  # two candidates
    cache.select(0, 8)()
    assert cache.selected[1].tolist() == [[0, 1, -1, -1, -1]] * 2


@pytest.mark.parametrize(("reduction", "chosen"), [(0, [0]), (1, [1]), (2, [2])])
def test_reductions_differ_as_they_say(reduction, chosen):
    cache = PartialCaches(layers=1, heads=1, group=1, head_dim=1, block_size=1, sink_blocks=0, window_blocks=1, new=3)
    cache.covered[0] = 4
    cache.kv[0, 1, 0, :3, 0] = [1, 2, 3]
    cache.summary()()
    cache.key_max[1, 0, 0, 0, :3] = cache.key_min[1, 0, 0, 0, :3] = [-9, -4, 3]
    cache.queries[0, :, 0] = [-1, 1.5, 0.5]  # 9 4 -3, -13.5 -6 4.5, -4.5 -2 1.5: most 9, sums -9 -4 3, last 1.5
    if reduction == 1:
        cache.queries[0, :, 0] = [-1, 1, 0]
        cache.key_max[1, 0, 0, 0, :3] = [-9, 5, 3]  # sums 0, 9, 0 where the two summaries of block 1 part
    cache.keep(3)
    cache.budget[0] = 1
    cache.select(reduction, 8)()
    assert cache.selected[0, 0].tolist()[:1] == chosen


@FEW
@given(data=st.data())
def test_gathering_is_the_reference_and_copies_only_what_is_not_there(any_kernels, data):
    cache = drawn_for(any_kernels, data)
    sink = cache.layout["sink_blocks"] * cache.layout["block_size"]
    for covered in sorted(data.draw(st.lists(st.integers(sink, cache.capacity), min_size=1, max_size=3))):
        cache.covered[0] = covered
        count = min(cache.candidates(covered), data.draw(st.integers(0, cache.retrieval)))
        cache.choose(count)
        compare(any_kernels, cache, "PartialKvGather")
        expected = np.zeros_like(cache.partial_kv)
        filled = partial_kv_gather(cache.tensors("PartialKvGather") | {"partial_kv": expected}, **cache.layout)
        row = cache.row[0]
        np.testing.assert_array_equal(cache.partial_kv[:, row, :, :filled], expected[:, row, :, :filled])
        others = np.arange(cache.kv.shape[1]) != row
        assert not cache.partial_kv[:, others].any()
        np.testing.assert_array_equal(cache.resident[row], cache.selected)
        assert (cache.resident[others] == -1).all()
    if cache.selected[0, 0, 0] >= 0:  # what is said to be there is not copied
        first = slice(sink, sink + cache.layout["block_size"])
        cache.partial_kv[:, row, :, first] = 7
        compare(any_kernels, cache, "PartialKvGather")
        assert (cache.partial_kv[:, row, :, first] == 7).all()


OUTSIDE = [
    ("BlockSummary", "covered", 0, 25, r"covered\[0\] is 25; it must be in 0\.\.24"),
    ("BlockSummary", "covered", 0, -1, "must be in"),
    ("BlockSummary", "covered", 0, 2**40, "must be in"),
    ("BlockSummary", "summarised", 0, -1, r"summarised\[0\] is -1"),
    ("BlockSummary", "row", 0, 2, r"row\[0\] is 2; it must be in 0\.\.1"),
    ("BlockSummary", "layer_windows", 0, -1, r"layer_windows\[0\] is -1"),
    ("BlockSelect", "layer_windows", 0, -1, r"layer_windows\[0\] is -1"),
    ("BlockSelect", "layer_windows", 0, 8, "do not reach"),
    ("BlockSelect", "row", 0, -1, r"row\[0\] is -1"),
    ("BlockSelect", "covered", 0, -1, r"covered\[0\] is -1"),
    ("BlockSelect", "covered", 0, 2**40, "there are 10 blocks"),
    ("BlockSelect", "kept_count", 0, 0, r"kept_count\[0\] is 0; it must be in 1\.\.4"),
    ("BlockSelect", "kept_count", 0, 5, "must be in"),
    ("BlockSelect", "kept_indices", 1, 4, r"kept_indices\[1\] is 4; it must be in 0\.\.3"),
    ("BlockSelect", "kept_indices", 0, -1, "must be in"),
    ("BlockSelect", "budget", 0, 4, r"budget\[0\] is 4; it must be in 0\.\.3"),
    ("BlockSelect", "budget", 0, -1, "must be in"),
    ("PartialKvGather", "row", 0, 2, r"row\[0\] is 2"),
    ("PartialKvGather", "covered", 0, 1, r"covered\[0\] is 1; it must be in 2\.\.24"),
    ("PartialKvGather", "covered", 0, -(2**40), "must be in"),
    ("PartialKvGather", "selected", (0, 0, 1), 9, r"selected\[1\] is 9; it must be in 0\.\.8"),
    ("PartialKvGather", "selected", (0, 0, 0), -2, "must be in"),
    ("PartialKvGather", "selected", (0, 0, 2), 2**40, r"selected\[2\] is .*; it must be in 0\.\.8"),
]

"""Op, name, index and value of a number in a `small_cache`, and what the op on the CPU says of it."""

WRITTEN = {"BlockSummary": ("key_max", "key_min"), "BlockSelect": ("selected",)}

WRITTEN |= {"PartialKvGather": ("partial_kv", "resident")}


def small_cache(name: str, index: int | tuple[int, ...], value: int) -> PartialCaches:
    """A cache of which all ops can be run, but for one number."""
    cache = PartialCaches(layers=1, heads=1, block_size=2, sink_blocks=1, window_blocks=1, retrieval=3, capacity=24)
    cache.covered[0], cache.budget[0] = 22, 2
    cache.keep(2)
    cache.choose(2)
    getattr(cache, name)[index] = value
    return cache


@pytest.mark.parametrize(("op", "name", "index", "value", "sentence"), OUTSIDE)
def test_numbers_outside_their_range_are_refused_and_nothing_is_written(op, name, index, value, sentence):
    cache = small_cache(name, index, value)
    before = {written: getattr(cache, written).copy() for written in WRITTEN[op]}
    with pytest.raises(ValueError, match=sentence):
        native.create(op, cache.tensors(op), cache.layout)()
    for written, array in before.items():
        np.testing.assert_array_equal(getattr(cache, written), array)


def test_a_cache_that_is_too_small_and_layouts_that_are_none_are_refused():
    cache = PartialCaches(layers=1, heads=1, block_size=2, sink_blocks=1, window_blocks=1, retrieval=3, room=5)
    cache.covered[0] = 22
    cache.choose(3)
    with pytest.raises(ValueError, match="10 tokens exceed the partial cache's 5 slots"):
        cache.gather()()
    with pytest.raises(ValueError, match=r"window_blocks\[0\] is 0"):
        PartialCaches(window_blocks=0).summary()
    with pytest.raises(ValueError, match=r"reduction\[0\] is 3"):
        PartialCaches().select(3, 8)
    cache = PartialCaches(layers=2)
    for kv, words in (
        (cache.kv.astype(np.int8), "a slot of kv must have 8 elements of int8 for 4 numbers"),
        (cache.kv[:2], "two planes for each layer"),
    ):
        with pytest.raises(ValueError, match=words):
            native.create("BlockSummary", cache.tensors("BlockSummary") | {"kv": kv}, cache.layout)


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16], ids=ELEMENTS[1:])
def test_every_number_of_two_bytes_is_summarised_as_on_the_cpu(kernels, dtype) -> None:
    cache = PartialCaches(layers=1, heads=1, head_dim=256, block_size=1, sink_blocks=0, capacity=257, dtype=dtype)
    bits(cache.kv)[0, 1, 0, :256] = np.arange(2**16).reshape(256, 256)
    cache.covered[0] = 257
    compare(kernels, cache, "BlockSummary")
    expected = cache.kv[0, 1, 0, :256].astype(np.float32)
    np.testing.assert_array_equal(cache.key_max[1, 0, 0, :, :256], expected.T)


@pytest.mark.parametrize(("reduction", "ties"), [(0, False), (1, True), (2, True)])
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


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("head_dim", [1, 2, 40, 128])
def test_gathering_moves_lanes_of_every_width(kernels, dtype, head_dim) -> None:
    cache = PartialCaches(head_dim=head_dim, block_size=4, capacity=50, dtype=dtype)
    cache.covered[0] = 50
    cache.choose(3)
    cache.resident[:, :, :, 1] = cache.selected[:, :, 1]
    compare(kernels, cache, "PartialKvGather")


@pytest.mark.parametrize(("op", "name", "index", "value"), [case[:4] for case in OUTSIDE])
def test_numbers_outside_their_range_are_not_followed(kernels, op, name, index, value) -> None:
    cache = small_cache(name, index, value)
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


def test_caches_without_enough_room_are_left_alone(kernels) -> None:
    cache = PartialCaches(layers=1, heads=1, room=5)
    cache.covered[0] = 22
    cache.choose(3)
    assert kernels.create("PartialKvGather", cache.tensors("PartialKvGather"), cache.layout)() == 0
    assert (cache.partial_kv == 0).all()
    assert (cache.resident == -1).all()
    cache = PartialCaches()
    cache.covered[0], cache.budget[0] = 24, 2
    cache.keep(1)
    cache.key_max, cache.key_min = np.zeros((2, 2, 2, 2, 4, 9), np.float32)  # of ten
    for op in ("BlockSummary", "BlockSelect"):
        assert kernels.create(op, cache.tensors(op), cache.layout)() == 0
    assert (cache.key_max == 0).all()
    assert (cache.selected == -1).all()
