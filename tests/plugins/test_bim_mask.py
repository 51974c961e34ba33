"""BimMask: the kernel is the reference, and the reference is the definition of visibility."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins import native
from plugins.reference import bim_mask

LOWEST = np.finfo(np.float32).min
POISON = np.float32(7)


class Mask:
    """The op bound to buffers that hold `new` tokens and `view` keys."""

    def __init__(self, bim, past, branch, parent, view):
        self.branch, self.parent = np.array(branch, np.int64), np.array(parent, np.int64)
        self.bim, self.past = np.array(bim, np.int64), np.array([past])
        self.bias = np.full((1, 1, len(self.branch), view), POISON)
        self.op = native.create(
            "BimMask",
            {
                "bim": self.bim,
                "past_length": self.past,
                "branch": self.branch,
                "parent": self.parent,
                "attn_bias": self.bias,
            },
        )

    def run(self, new, view):
        self.op(new, view)
        return self.bias.reshape(-1)[: new * view].reshape(1, 1, new, view)

    def expected(self, new, view):
        return bim_mask(self.bim, int(self.past[0]), self.branch[:new], self.parent[:new], view)


@st.composite
def masks(draw):
    new, past = draw(st.integers(0, 20)), draw(st.integers(0, 40))
    bim = draw(st.lists(st.integers(-2, 3), min_size=past, max_size=past + 5).filter(lambda b: len(b) >= past))
    branch = draw(st.lists(st.integers(-1, 3), min_size=new, max_size=new))
    parent = [draw(st.integers(-1, i - 1)) for i in range(new)]
    return Mask(bim, past, branch, parent, past + new + draw(st.integers(0, 6)))


@settings(max_examples=200, deadline=None)
@given(mask=masks(), data=st.data())
def test_kernel_equals_reference(mask, data):
    new = data.draw(st.integers(0, len(mask.branch)))
    view = data.draw(st.integers(int(mask.past[0]) + new, mask.bias.shape[-1]))
    np.testing.assert_array_equal(mask.run(new, view), mask.expected(new, view))
    assert (mask.bias.reshape(-1)[new * view :] == POISON).all()


@settings(max_examples=60, deadline=None)
@given(mask=masks())
def test_reference_is_the_definition(mask):
    past, new, view = int(mask.past[0]), len(mask.branch), mask.bias.shape[-1]
    bias = mask.expected(new, view)[0, 0]
    for i in range(new):
        lineage, node = set(), i
        while node >= 0:
            lineage.add(node)
            node = int(mask.parent[node])
        for key in range(view):
            visible = mask.bim[key] in (-1, mask.branch[i]) if key < past else key - past in lineage
            assert bias[i, key] == (0 if visible else LOWEST)


@pytest.mark.parametrize("shape", ["chain", "star", "two_chains_interleaved"])
def test_long_steps_equal_reference(shape):
    new, past = 300, 1000
    rows = np.arange(new)
    parent = {"chain": rows - 1, "star": np.minimum(rows, 1) - 1, "two_chains_interleaved": np.maximum(rows - 2, -1)}
    branch = rows % 2 if shape == "two_chains_interleaved" else np.zeros(new, np.int64)
    bim = np.random.default_rng(0).integers(-2, 2, 2000)
    mask = Mask(bim, past, branch, parent[shape], 2048)
    np.testing.assert_array_equal(mask.run(new, 1408), mask.expected(new, 1408))


def test_a_prefill_is_causal():
    mask = Mask([0] * 8, 0, [0] * 5, np.arange(5) - 1, 5)
    np.testing.assert_array_equal(mask.run(5, 5)[0, 0] == 0, np.tril(np.ones((5, 5), bool)))


def test_branches_do_not_see_each_other_nor_empty_slots():
    mask = Mask([-1, 0, 1, -2], 4, [0, 1], [-1, -1], 6)
    assert (mask.run(2, 6)[0, 0] == 0).astype(int).tolist() == [[1, 1, 0, 0, 1, 0], [1, 0, 1, 0, 0, 1]]


@pytest.mark.parametrize(
    ("change", "extents", "sentence"),
    [
        ({}, (3, 9), r"extent N is 3, but the bound buffers hold 0 to 2"),
        ({}, (2, 10), r"extent T is 10"),
        ({}, (2, -1), r"extent T is -1"),
        ({}, (2, 4), r"extent T is 4, but 3 committed and 2 new keys must be in view"),
        ({"past": 9}, (2, 9), r"past_length\[0\] is 9; it must be in 0\.\.8"),
        ({"past": -1}, (2, 9), r"past_length\[0\] is -1"),
        ({"parent": 1}, (2, 9), r"parent\[1\] is 1; it must be in -1\.\.0"),
        ({"parent": -2}, (2, 9), r"parent\[1\] is -2"),
        ({"branch": -2}, (2, 9), r"branch\[1\] is -2"),
    ],
)
def test_values_out_of_range_are_refused(change, extents, sentence):
    mask = Mask([-1] * 8, 3, [0, 0], [-1, 0], 9)
    for name, value in change.items():
        getattr(mask, name)[-1] = value
    with pytest.raises(ValueError, match=f"BimMask: {sentence}"):
        mask.op(*extents)
    assert (mask.bias == POISON).all()
