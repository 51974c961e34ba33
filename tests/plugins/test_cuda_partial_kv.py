"""BlockSummary, BlockSelect and PartialKvGather on a device: the CPU kernels, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugins import native
from plugins.cuda.launches import ELEMENTS
from tests.plugins.partial_arena import PartialArena
from tests.plugins.test_cuda_kernels import FEW
from tests.plugins.test_partial_kv import arenas

ml_dtypes = pytest.importorskip("ml_dtypes")

WRITTEN = {"BlockSummary": ("key_max", "key_min"), "BlockSelect": ("selected",)}
WRITTEN |= {"PartialKvGather": ("partial_kv", "resident")}
ANY = arenas(("float32", "float16", ml_dtypes.bfloat16))


def bits(array: np.ndarray) -> np.ndarray:
    return array.view(f"u{array.itemsize}")


def compare(kernels, arena: PartialArena, op: str, **attributes: int) -> None:
    """Both kernels on the same memory, twice on the device; what the CPU's wrote is left there."""
    before = {name: getattr(arena, name).copy() for name in WRITTEN[op]}
    ours = {name: array.copy() for name, array in before.items()}
    native.create(op, arena.tensors(op), arena.layout | attributes)()
    call = kernels.create(op, arena.tensors(op) | ours, arena.layout | attributes)
    for _ in range(2):
        for name, array in before.items():
            ours[name][...] = array
        assert call() == 0
        for name, array in ours.items():
            np.testing.assert_array_equal(bits(array), bits(getattr(arena, name)), err_msg=name)


def spoil(arena: PartialArena, array: np.ndarray) -> None:
    for value in (np.nan, np.inf, -np.inf, -0.0, 0.0):
        array[arena.rng.random(array.shape) < 0.05] = value


@FEW
@given(arena=ANY, data=st.data(), spoiled=st.booleans())
def test_summaries(kernels, arena, data, spoiled) -> None:
    if spoiled:
        spoil(arena, arena.kv)
    arena.key_max[:], arena.key_min[:] = -77, 77  # of blocks that are said to be summarised, which stay so
    arena.summarised[0] = data.draw(st.integers(0, arena.key_max.shape[-1]))
    for covered in sorted(data.draw(st.lists(st.integers(0, arena.capacity), min_size=1, max_size=3))):
        arena.covered[0] = covered
        compare(kernels, arena, "BlockSummary")
        arena.summarised[0] = max(arena.summarised[0], arena.candidates(covered))


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16], ids=ELEMENTS[1:])
def test_every_number_of_two_bytes_is_summarised_as_on_the_cpu(kernels, dtype) -> None:
    arena = PartialArena(layers=1, heads=1, head_dim=256, block_size=1, sink_blocks=0, capacity=257, dtype=dtype)
    bits(arena.kv)[0, 1, 0, :256] = np.arange(2**16).reshape(256, 256)
    arena.covered[0] = 257
    compare(kernels, arena, "BlockSummary")
    expected = arena.kv[0, 1, 0, :256].astype(np.float32)
    np.testing.assert_array_equal(arena.key_max[1, 0, 0, :, :256], expected.T)


@FEW
@given(
    arena=ANY,
    data=st.data(),
    reduction=st.integers(0, 2),
    most_queries=st.sampled_from([1, 2, 8]),
    spoiled=st.booleans(),
)
def test_selection(kernels, arena, data, reduction, most_queries, spoiled) -> None:
    arena.covered[0] = data.draw(st.integers(0, arena.capacity))
    arena.summary()()
    if spoiled:
        spoil(arena, arena.queries)
    arena.budget[0] = data.draw(st.integers(0, arena.retrieval))
    arena.keep(data.draw(st.integers(1, arena.new)))
    arena.selected[:] = -77
    compare(kernels, arena, "BlockSelect", reduction=reduction, most_queries=most_queries)


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("ties", [False, True])
def test_long_heads_many_queries_and_more_candidates_than_threads(kernels, reduction, ties) -> None:
    arena = PartialArena(
        layers=1, group=3, head_dim=70, block_size=1, retrieval=150, capacity=700, new=20, ties=ties
    )  # fmt: skip
    arena.covered[0] = 700
    arena.summary()()
    arena.keep(13)
    for budget in (0, 1, 149, 150):
        arena.budget[0] = budget
        compare(kernels, arena, "BlockSelect", reduction=reduction, most_queries=11)


def test_scores_that_are_all_alike_or_no_numbers_leave_the_first_blocks(kernels) -> None:
    arena = PartialArena(retrieval=4, capacity=97)
    arena.covered[0] = 97
    arena.summary()()
    arena.keep(2)
    arena.budget[0] = 4
    for value in (0.0, np.nan):
        arena.queries[:] = value
        compare(kernels, arena, "BlockSelect")
        assert (arena.selected == np.arange(4)).all()


@FEW
@given(arena=ANY, data=st.data(), kept=st.sampled_from([0.0, 0.5, 1.0]))
def test_gathering(kernels, arena, data, kept) -> None:
    sink = arena.layout["sink_blocks"] * arena.layout["block_size"]
    arena.partial_kv[:] = -7  # what is said to be there stays so
    for covered in sorted(data.draw(st.lists(st.integers(sink, arena.capacity), min_size=1, max_size=3))):
        arena.covered[0] = covered
        arena.choose(min(arena.candidates(covered), data.draw(st.integers(0, arena.retrieval))))
        there = arena.rng.random(arena.resident.shape) < kept
        arena.resident[there] = np.broadcast_to(arena.selected, there.shape)[there]
        compare(kernels, arena, "PartialKvGather")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("head_dim", [1, 2, 40, 128])
def test_gathering_moves_lanes_of_every_width(kernels, dtype, head_dim) -> None:
    arena = PartialArena(head_dim=head_dim, block_size=4, capacity=50, dtype=dtype)
    arena.covered[0] = 50
    arena.choose(3)
    arena.resident[:, :, :, 1] = arena.selected[:, :, 1]
    compare(kernels, arena, "PartialKvGather")


@pytest.mark.parametrize(
    ("op", "name", "index", "value"),
    [
        ("BlockSummary", "covered", 0, -1),
        ("BlockSummary", "covered", 0, 25),
        ("BlockSummary", "covered", 0, 2**40),
        ("BlockSummary", "summarised", 0, -1),
        ("BlockSummary", "row", 0, 2),
        ("BlockSelect", "row", 0, -1),
        ("PartialKvGather", "row", 0, 2),
        ("BlockSelect", "covered", 0, -1),
        ("BlockSelect", "covered", 0, 2**40),
        ("BlockSelect", "kept_count", 0, 0),
        ("BlockSelect", "kept_count", 0, 5),
        ("BlockSelect", "kept_rows", 1, 4),
        ("BlockSelect", "kept_rows", 0, -1),
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
    arena = PartialArena(layers=1, heads=1, block_size=2, sink_blocks=1, window_blocks=1, retrieval=3, capacity=24)
    arena.covered[0], arena.budget[0] = 22, 2
    arena.keep(2)
    arena.choose(2)
    getattr(arena, name)[index] = value
    with pytest.raises(ValueError, match=r"must be in|there are"):
        native.create(op, arena.tensors(op), arena.layout)()
    tensors = arena.tensors(op)
    before = {written: tensors[written].copy() for written in WRITTEN[op]}
    assert kernels.create(op, tensors, arena.layout)() == 0
    for written, array in before.items():
        np.testing.assert_array_equal(tensors[written], array)


def test_a_head_that_selects_otherwise_than_the_first_stays_as_it_is(kernels) -> None:
    arena = PartialArena(layers=1, heads=2)
    arena.covered[0] = 22
    arena.choose(2)
    arena.selected[0, 1] = [1, -1, -1]
    arena.resident[:] = -5
    assert kernels.create("PartialKvGather", arena.tensors("PartialKvGather"), arena.layout)() == 0
    np.testing.assert_array_equal(arena.resident[1, 0, 0], arena.selected[0, 0])
    assert (arena.resident[1, 0, 1] == -5).all()
    assert (arena.partial_kv[:, 1, 1] == 0).all()


def test_an_arena_that_is_too_small_is_not_filled(kernels) -> None:
    arena = PartialArena(layers=1, heads=1, room=5)
    arena.covered[0] = 22
    arena.choose(3)
    assert kernels.create("PartialKvGather", arena.tensors("PartialKvGather"), arena.layout)() == 0
    assert (arena.partial_kv == 0).all()
    assert (arena.resident == -1).all()


def test_more_candidates_than_there_is_room_for_are_neither_summarised_nor_selected(kernels) -> None:
    arena = PartialArena()
    arena.covered[0], arena.budget[0] = 24, 2
    arena.keep(1)
    arena.key_max, arena.key_min = np.zeros((2, 2, 2, 2, 4, 9), np.float32)  # of ten
    for op in ("BlockSummary", "BlockSelect"):
        assert kernels.create(op, arena.tensors(op), arena.layout)() == 0
    assert (arena.key_max == 0).all()
    assert (arena.selected == -1).all()
