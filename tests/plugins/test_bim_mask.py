"""BimMask and WindowBias: kernel and body are the references, and these are the definitions of visibility."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.plugins import native
from outrider.plugins.ops.bim_mask import bim_mask
from outrider.plugins.ops.window_bias import window_bias
from tests.plugins.onnx_node import FLOAT, body_session
from tests.properties import cheap

LOWEST = np.finfo(np.float32).min

POISON = np.float32(7)


class Mask:
    """The op bound to buffers that hold the step, with room for `spare` more of everything."""

    def __init__(self, bim, past, new, branch, parent, view, places=None, spare=0):
        rows = len(new)
        self.extents = (sum(new), view, rows, max(new, default=0) if places is None else places)
        self.bim = np.full((rows + spare, np.shape(bim)[1]), -1, np.int64)
        self.bim[:rows] = bim
        self.past, self.splits = np.zeros(rows + spare, np.int64), np.zeros(rows + spare + 1, np.int64)
        self.past[:rows], self.splits[1 : rows + 1] = past, np.cumsum(new)
        self.branch, self.parent = np.zeros((2, sum(new) + spare), np.int64)
        self.branch[: sum(new)], self.parent[: sum(new)] = branch, parent
        self.bias = np.full((rows + spare, 1, self.extents[3] + spare, view + spare), POISON)
        tensors = {"bim": self.bim, "past_length": self.past, "row_splits": self.splits, "branch": self.branch}
        self.op = native.create("BimMask", tensors | {"parent": self.parent, "attn_bias": self.bias})

    def run(self):
        self.op(*self.extents)
        _, view, rows, places = self.extents
        return self.bias.reshape(-1)[: rows * places * view].reshape(rows, 1, places, view)

    def expected(self):
        new, view, rows, places = self.extents
        splits = self.splits[: rows + 1]
        return bim_mask(self.bim, self.past[:rows], splits, self.branch[:new], self.parent[:new], view, places)


@st.composite
def masks(draw):
    """Ragged rows, some of them empty, trees of several branches, with places and keys to spare."""
    new = draw(st.lists(st.integers(0, 9), max_size=5))
    past = [draw(st.integers(0, 20)) for _ in new]
    capacity = max(past, default=0) + draw(st.integers(0, 3))
    bim = draw(st.lists(st.integers(-2, 3), min_size=len(new) * capacity, max_size=len(new) * capacity))
    first = np.cumsum([0, *new])
    parent = []
    for start, count in zip(first.tolist(), new, strict=False):
        earlier = [draw(st.integers(-1, s - 1)) for s in range(count)]
        parent += [-1 if p < 0 else start + p for p in earlier]
    branch = draw(st.lists(st.integers(-1, 3), min_size=len(parent), max_size=len(parent)))
    view = max((p + n for p, n in zip(past, new, strict=True)), default=0) + draw(st.integers(0, 4))
    places = max(new, default=0) + draw(st.integers(0, 2))
    bim = np.reshape(bim, (len(new), capacity))
    return Mask(bim, past, new, branch, parent, view, places, spare=draw(st.integers(0, 2)))


@cheap
@given(mask=masks())
def test_kernel_equals_reference_and_writes_nothing_after_its_part(mask):
    bias = mask.run()
    np.testing.assert_array_equal(bias, mask.expected())
    assert (mask.bias.reshape(-1)[bias.size :] == POISON).all()


@cheap
@given(mask=masks())
def test_reference_is_the_definition(mask):
    _, view, rows, places = mask.extents
    bias = mask.expected()
    for row in range(rows):
        first, end, past = int(mask.splits[row]), int(mask.splits[row + 1]), int(mask.past[row])
        for place in range(places):
            token = first + place
            slots, node = set(), token if token < end else -1
            while node >= 0:
                slots.add(past + node - first)
                node = int(mask.parent[node])
            for key in range(view):
                if token >= end:
                    visible = key == 0
                elif key < past:
                    visible = mask.bim[row, key] in (-1, mask.branch[token])
                else:
                    visible = key in slots
                assert bias[row, 0, place, key] == (0 if visible else LOWEST)


@pytest.mark.parametrize("shape", ["chain", "star", "two_chains_interleaved"])
def test_long_steps_equal_reference(shape):
    rows, new, past = 3, 300, 1000
    s = np.arange(new)
    parent = {"chain": s - 1, "star": np.minimum(s, 1) - 1, "two_chains_interleaved": np.maximum(s - 2, -1)}[shape]
    parents = [np.where(parent < 0, -1, parent + row * new) for row in range(rows)]
    branch = s % 2 if shape == "two_chains_interleaved" else np.zeros(new, np.int64)
    bim = np.random.default_rng(0).integers(-2, 2, (rows, 2000))
    past_length = past - np.arange(rows)
    mask = Mask(bim, past_length, [new] * rows, np.tile(branch, rows), np.concatenate(parents), 1408, spare=5)
    np.testing.assert_array_equal(mask.run(), mask.expected())


@pytest.mark.parametrize("extents", [(0, 0, 2, 3), (0, 5, 2, 0), (0, 5, 0, 3)])
def test_a_part_without_elements_is_written_nowhere(extents):
    mask = Mask(np.zeros((2, 4)), [0, 0], [0, 0], [], [], 5, places=3)
    mask.op(*extents)
    assert (mask.bias == POISON).all()


ROWS_STEP = (4, 9, 2, 3)  # tokens 0 of row 0 and 1..3 of row 1


@pytest.mark.parametrize(
    ("change", "extents", "sentence"),
    [
        ({}, (5, 9, 2, 3), r"extent N is 5, but the bound buffers hold 0 to 4"),
        ({}, (4, 10, 2, 3), r"extent T is 10"),
        ({}, (4, 9, 3, 3), r"extent R is 3, but the bound buffers hold 0 to 2"),
        ({}, (4, 9, 2, 4), r"extent S is 4, but the bound buffers hold 0 to 3"),
        ({}, (4, 9, 2, 2), r"extent S is 2, but row 1 has 3 new tokens"),
        ({}, (4, 5, 2, 3), r"extent T is 5, but 3 committed and 3 new keys of row 1 must be in view"),
        ({}, (3, 9, 2, 3), r"row_splits\[2\] is 4; it must be in 1\.\.3"),
        ({}, (4, 9, 1, 3), r"row_splits\[1\] is 1, but the last split must be N, 4"),
        ({"splits": (0, 1)}, ROWS_STEP, r"row_splits\[0\] is 1; it must be in 0\.\.0"),
        ({"splits": (1, 5)}, ROWS_STEP, r"row_splits\[1\] is 5; it must be in 0\.\.4"),
        ({"splits": (2, 0)}, ROWS_STEP, r"row_splits\[2\] is 0; it must be in 1\.\.4"),
        ({"past": (1, 9)}, ROWS_STEP, r"past_length\[1\] is 9; it must be in 0\.\.8"),
        ({"past": (0, -1)}, ROWS_STEP, r"past_length\[0\] is -1"),
        ({"parent": (3, 3)}, ROWS_STEP, r"parent\[3\] is 3; it must be in -1\.\.2"),
        ({"parent": (0, -2)}, ROWS_STEP, r"parent\[0\] is -2"),
        ({"parent": (2, 0)}, ROWS_STEP, r"parent\[2\] is 0, a token of another row; the tokens of row 1 start at 1"),
        ({"branch": (3, -2)}, ROWS_STEP, r"branch\[3\] is -2"),
    ],
)
def test_values_out_of_range_are_refused_and_nothing_is_written(change, extents, sentence):
    mask = Mask([[-1] * 8] * 2, [0, 3], [1, 3], [0] * 4, [-1, -1, 1, 2], 9)
    for name, (index, value) in change.items():
        getattr(mask, name)[index] = value
    with pytest.raises(ValueError, match=f"BimMask: {sentence}"):
        mask.op(*extents)
    assert (mask.bias == POISON).all()


@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 70)),
    window=st.sampled_from([1, 2, 7, 64, 1000]),
    density=st.sampled_from([0.0, 0.2, 0.9, 1.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_last_visible_keys_stay_visible(shape, window, density, seed) -> None:
    rows, places, view = shape
    visible = np.random.default_rng(seed).random((rows, 1, places, view)) < density
    bias = np.where(visible, np.float32(0), LOWEST)
    found = window_bias(bias, window)
    assert found.dtype == np.float32
    for before, after in zip(bias.reshape(-1, view), found.reshape(-1, view), strict=True):
        kept = np.flatnonzero(before == 0)[-window:]
        np.testing.assert_array_equal(np.flatnonzero(after == 0), kept)
        assert set(after[after != 0].tolist()) <= {float(LOWEST)}
    body = body_session("WindowBias", (("attn_bias", FLOAT, 4),), (("window_bias", FLOAT, 4),), window=window)
    np.testing.assert_array_equal(body.run(None, {"attn_bias": bias})[0], found)
