"""BlockSummary, BlockSelect, PartialKvGather: the kernels are the references, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.plugins import native
from outrider.plugins.reference import block_select, block_summary, partial_kv_gather
from outrider.plugins.reference.partial_kv import blocks_in_reach
from tests.plugins.partial_caches import PartialCaches
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


def spoil(cache: PartialCaches) -> None:
    """Make some numbers NaN, or the scales of some slots."""
    if cache.kv.dtype == np.int8:
        scales = cache.kv[..., -4:]
        scales[cache.rng.random(scales.shape[:-1]) < 0.05] = np.array([np.nan], np.float32).view(np.int8)
    else:
        cache.kv[cache.rng.random(cache.kv.shape) < 0.05] = np.nan


@cheap
@given(cache=caches(), data=st.data(), spoiled=st.booleans())
def test_summaries_grow_block_by_block_and_are_those_of_all_at_once(cache, data, spoiled):
    if spoiled:
        spoil(cache)
    lengths = sorted(data.draw(st.lists(st.integers(0, cache.capacity), min_size=1, max_size=4)))
    op = cache.summary()
    for covered in lengths:
        cache.covered[0] = covered
        op()
        cache.summarised[0] = max(cache.summarised[0], cache.candidates(covered))
    most, least = np.zeros_like(cache.key_max), np.zeros_like(cache.key_min)
    block_summary(cache.kv, cache.layer_windows, cache.row[0], lengths[-1], 0, most, least, **cache.layout)
    np.testing.assert_array_equal(cache.key_max, most)
    np.testing.assert_array_equal(cache.key_min, least)


def test_a_summary_is_of_the_keys_between_sink_and_window():
    cache = PartialCaches(layers=1, heads=1, head_dim=1, block_size=2, sink_blocks=1, window_blocks=2, capacity=16)
    cache.kv[0, 1, 0, :, 0] = [9, 9, 3, -4, 5, 6, 7, 7, 9, 9, 9, 9, 9, 9, 9, 9]
    cache.covered[0] = 11  # the sink is 0 and 1; the window 6 to 10, two whole blocks and what begins a third
    cache.summary()()
    assert cache.key_max[1, 0, 0, 0].tolist() == [3, 6, 0, 0, 0]
    assert cache.key_min[1, 0, 0, 0].tolist() == [-4, 5, 0, 0, 0]
    assert not cache.key_max[0].any()  # of the other row


@cheap
@given(
    cache=caches(),
    data=st.data(),
    reduction=st.integers(0, 2),
    most_queries=st.sampled_from([1, 2, 8]),
    spoiled=st.booleans(),
)
def test_selection_is_the_reference(cache, data, reduction, most_queries, spoiled):
    cache.covered[0] = covered = data.draw(st.integers(0, cache.capacity))
    cache.summary()()
    if spoiled:
        cache.queries[cache.rng.random(cache.queries.shape) < 0.05] = np.nan
        cache.queries[cache.rng.random(cache.queries.shape) < 0.05] = np.inf
    cache.budget[0] = budget = data.draw(st.integers(0, cache.retrieval))
    kept = cache.keep(data.draw(st.integers(1, cache.new)))
    cache.keep_windows_in_reach()
    cache.select(reduction, most_queries)()
    expected = block_select(
        cache.queries, kept, cache.key_max, cache.key_min, cache.layer_windows, cache.row[0], covered, budget,
        cache.retrieval, **cache.layout, reduction=reduction, most_queries=most_queries,
    )  # fmt: skip
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


def test_of_a_layer_with_a_window_only_blocks_in_reach_change_as_the_context_grows():
    cache = PartialCaches(windows=[0, 8], block_size=2, sink_blocks=1, window_blocks=1, retrieval=5, capacity=60)
    cache.keep(1)
    cache.budget[0] = 5
    chosen = []
    for covered in (40, 50):
        cache.covered[0] = covered
        cache.summary()()
        cache.select(0, 8)()
        chosen.append(cache.selected[1].tolist())
    assert blocks_in_reach(8, 2, 1) == 3  # 7 tokens before the query: 2 in the window, 5 in 3 blocks
    assert chosen == [[[0, 1, 15, 16, 17]] * 2, [[0, 1, 20, 21, 22]] * 2]


def test_summaries_of_layers_with_windows_are_left_alone():
    cache = PartialCaches(windows=[3, 0], block_size=2)
    cache.key_max[:] = 99
    cache.covered[0] = 24
    cache.summary()()
    assert (cache.key_max[1, 0] == 99).all()
    assert (cache.key_max[1, 1] < 99).all()


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


@cheap
@given(cache=caches(), data=st.data())
def test_gathering_is_the_reference_and_copies_only_what_is_not_there(cache, data):
    sink = cache.layout["sink_blocks"] * cache.layout["block_size"]
    gather = cache.gather()
    cache.resident[:] = -1
    for covered in sorted(data.draw(st.lists(st.integers(sink, cache.capacity), min_size=1, max_size=3))):
        cache.covered[0] = covered
        count = min(cache.candidates(covered), data.draw(st.integers(0, cache.retrieval)))
        cache.choose(count)
        gather()
        expected = np.zeros_like(cache.partial_kv)
        filled = partial_kv_gather(cache.kv, cache.row[0], covered, cache.selected, expected, **cache.layout)
        row = cache.row[0]
        np.testing.assert_array_equal(cache.partial_kv[:, row, :, :filled], expected[:, row, :, :filled])
        others = np.arange(cache.kv.shape[1]) != row
        assert not cache.partial_kv[:, others].any()
        np.testing.assert_array_equal(cache.resident[row], cache.selected)
        assert (cache.resident[others] == -1).all()
    if cache.selected[0, 0, 0] >= 0:  # what is said to be there is not copied
        first = slice(sink, sink + cache.layout["block_size"])
        cache.partial_kv[:, row, :, first] = 7
        gather()
        assert (cache.partial_kv[:, row, :, first] == 7).all()


def test_bfloat16_is_summarised_and_gathered():
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    cache = PartialCaches(layers=1, heads=1, head_dim=2, block_size=2, sink_blocks=1, window_blocks=1, dtype=bfloat16)
    cache.covered[0] = 8
    cache.summary()()
    keys = cache.kv[0, 1, 0, 2:6].astype(np.float32)
    np.testing.assert_array_equal(cache.key_max[1, 0, 0, :, :2], keys.reshape(2, 2, 2).max(1).T)
    cache.choose(1)
    cache.gather()()
    np.testing.assert_array_equal(cache.partial_kv[:, 1, 0, :2], cache.kv[:, 1, 0, :2])


def _spoil(cache: PartialCaches, name: str, index: tuple[int, ...], value: int) -> None:
    getattr(cache, name)[index] = value


@pytest.mark.parametrize(
    ("op", "change", "sentence"),
    [
        ("summary", ("covered", (0,), 25), r"covered\[0\] is 25; it must be in 0\.\.24"),
        ("summary", ("summarised", (0,), -1), r"summarised\[0\] is -1"),
        ("summary", ("row", (0,), 2), r"row\[0\] is 2; it must be in 0\.\.1"),
        ("select", ("row", (0,), -1), r"row\[0\] is -1"),
        ("gather", ("row", (0,), 2), r"row\[0\] is 2"),
        ("select", ("covered", (0,), -1), r"covered\[0\] is -1"),
        ("select", ("kept_count", (0,), 0), r"kept_count\[0\] is 0; it must be in 1\.\.4"),
        ("select", ("kept_indices", (1,), 4), r"kept_indices\[1\] is 4; it must be in 0\.\.3"),
        ("select", ("budget", (0,), 4), r"budget\[0\] is 4; it must be in 0\.\.3"),
        ("select", ("layer_windows", (0,), -1), r"layer_windows\[0\] is -1"),
        ("summary", ("layer_windows", (0,), -1), r"layer_windows\[0\] is -1"),
        ("gather", ("covered", (0,), 1), r"covered\[0\] is 1; it must be in 2\.\.24"),
        ("gather", ("selected", (0, 1, 0), -1), r"selected\[3\] is -1"),
        ("gather", ("selected", (0, 0, 1), 9), r"selected\[1\] is 9; it must be in 0\.\.8"),
        ("gather", ("selected", (0, 1, 2), 0), r"selected\[5\] is 0; it must be in -1\.\.-1"),
    ],
)
def test_what_lies_outside_is_refused_and_nothing_is_written(op, change, sentence):
    cache = PartialCaches(layers=1, heads=2, block_size=2, sink_blocks=1, window_blocks=1, retrieval=3, capacity=24)
    cache.covered[0] = 22
    cache.budget[0] = 2
    cache.keep(2)
    cache.choose(2)
    written = {name: getattr(cache, name) for name in ("key_max", "key_min", "partial_kv", "resident")}
    before = {name: array.copy() for name, array in written.items()}
    _spoil(cache, *change)
    with pytest.raises(ValueError, match=sentence):
        (cache.select(0, 8) if op == "select" else getattr(cache, op)())()
    for name, array in written.items():
        np.testing.assert_array_equal(array, before[name])


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
    with pytest.raises(ValueError, match="a slot of kv must have 8 elements of int8 for 4 numbers"):
        native.create("BlockSummary", cache.tensors("BlockSummary") | {"kv": cache.kv.astype(np.int8)}, cache.layout)
    tensors = cache.tensors("BlockSummary") | {"kv": cache.kv[:2]}
    with pytest.raises(ValueError, match="two planes for each layer"):
        native.create("BlockSummary", tensors, cache.layout)
