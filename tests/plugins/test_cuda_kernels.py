"""The CUDA kernels give what the CPU kernels give, to the bit: run block by block on the CPU, and on a GPU (`-m gpu`).

The CPU kernels are compared with the references elsewhere; ops that have none, in test_drafting.py.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.plugins import native
from outrider.plugins.schema import Purpose
from tests.plugins.accept_step import POISON, draw_step, equal_slots, fault_on_the_cpu, fork, spoiled
from tests.plugins.emulator import Emulator
from tests.plugins.gpu import Gpu
from tests.plugins.tensorrt_stand_in import StandIn
from tests.plugins.test_races import noise_inputs, noise_outputs

FEW = settings(
    max_examples=max(20, settings.default.max_examples),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def compare(kernels: Emulator | Gpu, op: str, tensors, outputs, extents, **attributes: int) -> None:
    """Both kernels on the same inputs and poisoned outputs; twice on the device's, whose workspace is used again."""
    theirs = {name: array.copy() for name, array in outputs.items()}
    native.create(op, tensors | theirs, attributes)(*extents)
    ours = {name: array.copy() for name, array in outputs.items()}
    call = kernels.create(op, tensors | ours, attributes)
    for _ in range(2):
        for name, array in outputs.items():
            ours[name][...] = array
        assert call(*extents) == 0
        for name in outputs:
            np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)


@FEW
@given(data=st.data(), purpose=st.sampled_from(Purpose))
@pytest.mark.parametrize("op", ["Sample", "TreeAccept", "ChainAccept"])
def test_choices_and_walks(op_kernels, op, data, purpose, slots, logits_rows) -> None:
    tensors, outputs, (new, count) = draw_step(data, op, slots, logits_rows, least_trees=int(op != "TreeAccept"))
    attributes = {"purpose": int(purpose)} if op == "Sample" else {}
    if op == "TreeAccept" and isinstance(op_kernels, Emulator | Gpu):  # more room than trees; TensorRT makes its own
        outputs["accepted_count"] = np.full(5, POISON)
    if count:  # a step without rows launches nothing
        compare(op_kernels, op, tensors, outputs, (new, count), **attributes)


@FEW
@given(
    data=st.data(), depths=st.integers(1, 9), vocabulary=st.sampled_from([1, 4, 65]), purpose=st.sampled_from(Purpose)
)
def test_race_noise(op_kernels, data, depths, vocabulary, purpose, slots) -> None:
    branches = data.draw(st.integers(1, 40))
    drawn = data.draw(slots(branches))
    tips = np.array(data.draw(st.lists(st.integers(0, 2**40), min_size=branches, max_size=branches)))
    outputs = noise_outputs(branches, depths, vocabulary)
    compare(op_kernels, "RaceNoise", noise_inputs(tips, drawn), outputs, (), purpose=int(purpose))


def mask_step(rng, rows, places=0, view=0):
    """Tensors of BimMask, a bias with so much more room than the step needs, and extents."""
    capacity, new, past = 90, rng.integers(0, 9, rows), rng.integers(0, 40, rows)
    splits = np.concatenate(([0], np.cumsum(new)))
    parent = np.array([
        first + int(rng.integers(0, i)) if i and rng.random() < 0.8 else -1
        for n, first in zip(new, splits, strict=False) for i in range(n)
    ], np.int64)  # fmt: skip
    tensors = {
        "bim": rng.integers(-2, 3, (rows, capacity)), "past_length": past, "row_splits": splits,
        "branch": rng.integers(0, 3, splits[-1]), "parent": parent,
    }  # fmt: skip
    view, places = int((past + new).max()) + view, int(max(new.max(), 1)) + places
    return tensors, {"attn_bias": np.full((rows, 1, places, view), 0.5, np.float32)}, (len(parent), view, rows, places)


def move_step(rng, rows, dtype, head_dim, more=0):
    """Tensors of KvGather and a cache, which has `more` rows than the step."""
    new, base = rng.integers(0, 10, rows), rng.integers(0, 25, rows)
    splits = np.concatenate(([0], np.cumsum(new)))
    source = np.flatnonzero(rng.random(splits[-1]) < 0.6)
    own = {"row_splits": splits, "source_base": base, "destination": np.maximum(base - rng.integers(0, 3, rows), 0)}
    tensors = {name: np.concatenate((array, np.full(more, POISON))) for name, array in own.items()}
    tensors["source"] = np.concatenate((source, np.full(int(splits[-1]) - len(source), POISON)))
    tensors["source_count"] = np.array([len(source)])
    return tensors, {"kv": rng.normal(size=(4, rows + more, 2, 40, head_dim)).astype(dtype)}, (rows,)


@FEW
@given(
    seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 3), more=st.integers(0, 2),
    head_dim=st.sampled_from([1, 3, 8, 40]), dtype=st.sampled_from([np.float32, np.float16]),
)  # fmt: skip
def test_masks_and_moves(op_kernels, seed, rows, more, head_dim, dtype) -> None:
    rng = np.random.default_rng(seed)
    if isinstance(op_kernels, StandIn):  # in an engine a step has all rows of its cache
        more = 0
    tensors, outputs, extents = mask_step(rng, rows, more, int(rng.integers(0, 30)))
    if extents[1]:
        compare(op_kernels, "BimMask", tensors, outputs, extents)
    compare(op_kernels, "KvGather", *move_step(rng, rows, dtype, head_dim, more))


def test_slots_that_move_over_each_other_upwards_arrive_as_on_the_cpu(op_kernels) -> None:
    kv = np.arange(20, dtype=np.float32).reshape(1, 1, 1, 20, 1)
    tensors = {
        "source": np.arange(5), "source_count": np.array([5]), "row_splits": np.array([0, 5]),
        "source_base": np.array([3]), "destination": np.array([4]),
    }  # fmt: skip
    compare(op_kernels, "KvGather", tensors, {"kv": kv}, (1,))


@pytest.mark.parametrize(("bad", "fault"), [(np.nan, 1), (-np.inf, 2)])
def test_faults_are_reported_and_nothing_is_committed_there(op_kernels, bad, fault) -> None:
    tensors = {
        "logits": np.full((2, 70), bad, np.float32), "logit_indices": np.arange(2), "positions": np.arange(2),
        "branch": np.zeros(2, np.int64), **vars(equal_slots(1, temperature=1.0)),
    }  # fmt: skip
    tensors["logits"][0] = 0.5
    committed = np.full(2, POISON)
    assert op_kernels.create("Sample", tensors | {"committed": committed})(2, 2) == fault
    assert committed[0] >= 0
    assert committed[1] == POISON


@pytest.mark.parametrize(("bad", "fault"), [(np.nan, 1), (-np.inf, 2)])
@pytest.mark.parametrize("op", ["TreeAccept", "ChainAccept"])
def test_a_fault_counts_where_the_walk_visits(op_kernels, op, bad, fault) -> None:
    tensors, outputs = fork(op)
    tensors["logits"][2:] = bad
    compare(op_kernels, op, tensors, outputs, (4, 4))
    tensors["logits"][1] = bad
    assert op_kernels.create(op, tensors | outputs)(4, 4) == fault
    assert outputs["committed"].tolist() == [1, -1, -1, -1]


@pytest.mark.parametrize(("name", "index", "bad"), [("token_ids", 3, 8), ("draft_probs", (3, 0), np.nan)])
def test_drafts_are_checked_wherever_the_walk_goes(op_kernels, name, index, bad) -> None:
    tensors, outputs = fork("ChainAccept")
    tensors["logits"][1:] = np.nan  # reported where nothing else is wrong
    tensors[name][index] = bad
    assert op_kernels.create("ChainAccept", tensors | outputs)(4, 4) == 3


@FEW
@given(data=st.data())
@pytest.mark.parametrize("op", ["TreeAccept", "ChainAccept"])
def test_faults_are_those_of_the_cpu(op_kernels, op, data, slots, logits_rows) -> None:
    tensors, outputs, extents = draw_step(data, op, slots, logits_rows, vocabularies=(1, 2, 5, 65))
    tensors = spoiled(np.random.default_rng(data.draw(st.integers(0, 999))), tensors)
    theirs = {name: array.copy() for name, array in outputs.items()}
    fault = fault_on_the_cpu(op, tensors, theirs, extents, {})
    assert op_kernels.create(op, tensors | outputs)(*extents) == fault
    if not fault:
        for name, array in theirs.items():
            np.testing.assert_array_equal(outputs[name], array, err_msg=name)


def test_a_branch_out_of_range_is_a_fault(op_kernels) -> None:
    tensors = {
        "logits": np.zeros((1, 8), np.float32), "logit_indices": np.zeros(1, np.int64),
        "positions": np.zeros(1, np.int64), "branch": np.array([5]), **vars(equal_slots(1)),
    }  # fmt: skip
    assert op_kernels.create("Sample", tensors | {"committed": np.full(1, POISON)})(1, 1) == 3


def test_a_parent_that_does_not_descend_ends_the_climb(op_kernels) -> None:
    """A kernel that never ends would take the device with it."""
    tensors = {
        "bim": np.full((1, 8), -1), "past_length": np.zeros(1, np.int64), "row_splits": np.array([0, 3]),
        "branch": np.zeros(3, np.int64), "parent": np.array([2, 1, 2]),
    }  # fmt: skip
    bias = np.zeros((1, 1, 3, 8), np.float32)
    op_kernels.create("BimMask", tensors | {"attn_bias": bias})(3, 8, 1, 3)
    assert (bias[0, 0, :, :3] == 0).tolist() == np.eye(3, dtype=bool).tolist()
