"""The CUDA kernels give what the CPU kernels give, to the bit: run block by block on the CPU, and on a GPU (`-m gpu`).

The CPU kernels are compared with the references elsewhere; ops that have none, in test_cuda_drafting.py.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.plugins import native
from outrider.plugins.cuda import LAUNCHES
from outrider.plugins.schema import Purpose
from outrider.plugins.schemas import SCHEMAS
from tests.plugins.accept_step import depth_of, equal_slots, fault_on_the_cpu, forest, fork, spoiled
from tests.plugins.emulator import Emulator
from tests.plugins.gpu import Gpu
from tests.plugins.test_race_noise import noise_inputs, noise_outputs

POISON = -77
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


def test_every_op_but_attention_has_a_launch_that_agrees_with_its_schema() -> None:
    assert set(LAUNCHES) == set(SCHEMAS) - {"BranchAttention", "MixtureOfExperts", "Route", "WindowBias"}
    for name, launch in LAUNCHES.items():
        tensors = {spec.name for spec in SCHEMAS[name].tensors}
        assert tensors <= set(launch.pointers)
        assert set(launch.pointers) - tensors <= {*launch.scratch, "status"}


def step_of(rng, slots_, trees, nodes, vocabulary, logits_of, straight):
    token_ids, parent, branch, logit_indices = forest(rng, trees, 3, nodes, vocabulary, straight)
    logits = logits_of(len(logit_indices))
    for row in logit_indices.tolist():  # often a token that may be chosen
        if parent[row] in logit_indices and rng.random() < 0.7:
            token_ids[row] = int(logits[np.searchsorted(logit_indices, parent[row])].argmax())
    tensors = {
        "logits": logits, "logit_indices": logit_indices, "positions": 2**33 + depth_of(parent), "branch": branch,
        **vars(slots_),
    }  # fmt: skip
    return tensors, {"token_ids": token_ids, "parent": parent}


def accept_outputs(new: int, count: int, trees: int) -> dict[str, np.ndarray]:
    sizes = {"committed": count, "accepted_count": trees, "kept_indices": new, "kept_count": 1}
    return {name: np.full(size, POISON) for name, size in sizes.items()}


@FEW
@given(data=st.data(), vocabulary=st.sampled_from([1, 3, 64, 65, 300]), purpose=st.sampled_from(Purpose))
def test_sample(kernels, data, vocabulary, purpose, slots, logits_rows) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    trees = data.draw(st.integers(1, 3))
    tensors, _ = step_of(
        rng, data.draw(slots(trees)), trees, 3, vocabulary, lambda n: data.draw(logits_rows(n, vocabulary)), 1.0
    )
    count, new = len(tensors["logit_indices"]), len(tensors["branch"])
    compare(kernels, "Sample", tensors, {"committed": np.full(count, POISON)}, (new, count), purpose=int(purpose))


@FEW
@given(data=st.data(), vocabulary=st.sampled_from([1, 2, 5, 64, 200]), nodes=st.integers(1, 12))
def test_tree_accept(kernels, data, vocabulary, nodes, slots, logits_rows) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    trees = data.draw(st.integers(0, 3))
    tensors, tree = step_of(
        rng, data.draw(slots(max(trees, 1))), trees, nodes, vocabulary,
        lambda n: data.draw(logits_rows(n, vocabulary)), 0.4,
    )  # fmt: skip
    count, new = len(tensors["logit_indices"]), len(tensors["branch"])
    if count == 0:
        return  # a step without rows launches nothing
    compare(kernels, "TreeAccept", tensors | tree, accept_outputs(new, count, trees + 2), (new, count))


@FEW
@given(data=st.data(), vocabulary=st.sampled_from([1, 2, 64, 65, 200]), gamma=st.integers(0, 6))
def test_chain_accept(kernels, data, vocabulary, gamma, slots, logits_rows) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    trees = data.draw(st.integers(1, 3))
    tensors, chains = step_of(
        rng, data.draw(slots(trees)), trees, gamma + 1, vocabulary, lambda n: data.draw(logits_rows(n, vocabulary)), 1.0
    )
    count, new = len(tensors["logit_indices"]), len(tensors["branch"])
    q = rng.dirichlet(np.full(vocabulary, 0.3), count).astype(np.float32)
    for place, row in enumerate(tensors["logit_indices"].tolist()):
        q[place] *= rng.choice([0.0, 1e-9, 0.5, 1.0])
        if rng.random() < 0.5:
            q[place, chains["token_ids"][row]] = rng.choice([1e-6, 0.3, 1.0])
    drafted = {"draft_probs": q} | {
        name: rng.integers(0, 2, trees) for name in ("skip_sample_adjustment", "by_rejection")
    }
    outputs = accept_outputs(new, count, trees) | {"trials": np.full((count, 2), float(POISON))}
    compare(kernels, "ChainAccept", tensors | chains | drafted, outputs, (new, count))


@FEW
@given(
    data=st.data(), depths=st.integers(1, 9), vocabulary=st.sampled_from([1, 4, 65]), purpose=st.sampled_from(Purpose)
)
def test_race_noise(kernels, data, depths, vocabulary, purpose, slots) -> None:
    branches = data.draw(st.integers(1, 40))
    drawn = data.draw(slots(branches))
    tips = np.array(data.draw(st.lists(st.integers(0, 2**40), min_size=branches, max_size=branches)))
    outputs = noise_outputs(branches, depths, vocabulary)
    compare(kernels, "RaceNoise", noise_inputs(tips, drawn), outputs, (), purpose=int(purpose))


@FEW
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 3), padding=st.integers(0, 70))
def test_bim_mask(kernels, seed, rows, padding) -> None:
    rng = np.random.default_rng(seed)
    capacity = 90
    new = rng.integers(0, 9, rows)
    past = rng.integers(0, 40, rows)
    splits = np.concatenate(([0], np.cumsum(new)))
    parents = [
        first + int(rng.integers(-1, i)) if i else -1 for n, first in zip(new, splits, strict=False) for i in range(n)
    ]
    parent = np.array(parents, np.int64)
    for r in range(rows):  # before the row's first token: committed
        own = slice(splits[r], splits[r + 1])
        parent[own] = np.where(parent[own] < splits[r], -1, parent[own])
    tensors = {
        "bim": rng.integers(-2, 3, (rows, capacity)), "past_length": past, "row_splits": splits,
        "branch": rng.integers(0, 3, splits[-1]), "parent": parent,
    }  # fmt: skip
    view, places = int((past + new).max()) + padding % 30, int(max(new.max(), 1)) + padding % 3
    outputs = {"attn_bias": np.full((rows, 1, places, view), 0.5, np.float32)}
    if view:
        compare(kernels, "BimMask", tensors, outputs, (int(splits[-1]), view, rows, places))


@FEW
@given(
    seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 3), head_dim=st.sampled_from([1, 3, 8, 40]),
    dtype=st.sampled_from([np.float32, np.float16]), more=st.integers(0, 2),
)  # fmt: skip
def test_kv_gather(kernels, seed, rows, head_dim, dtype, more) -> None:
    """`more`: rows of the cache that the step does not have."""
    rng = np.random.default_rng(seed)
    capacity, new = 40, rng.integers(0, 10, rows)
    splits = np.concatenate(([0], np.cumsum(new)))
    source = np.flatnonzero(rng.random(splits[-1]) < 0.6)
    padded = np.concatenate((source, np.full(int(splits[-1]) - len(source) + 1, POISON)))
    base = rng.integers(0, 25, rows)
    tensors = {
        "source": padded, "source_count": np.array([len(source)]), "row_splits": splits, "source_base": base,
        "destination": np.maximum(base - rng.integers(0, 3, rows), 0),
    }  # fmt: skip
    kv = rng.normal(size=(4, rows + more, 2, capacity, head_dim)).astype(dtype)
    for name in ("source_base", "destination"):
        tensors[name] = np.concatenate((tensors[name], np.full(more, POISON)))
    tensors["row_splits"] = np.concatenate((splits, np.full(more, POISON)))
    compare(kernels, "KvGather", tensors, {"kv": kv}, (rows,))


def test_slots_that_move_over_each_other_upwards_arrive_as_on_the_cpu(kernels) -> None:
    kv = np.arange(20, dtype=np.float32).reshape(1, 1, 1, 20, 1)
    tensors = {
        "source": np.arange(5), "source_count": np.array([5]), "row_splits": np.array([0, 5]),
        "source_base": np.array([3]), "destination": np.array([4]),
    }  # fmt: skip
    compare(kernels, "KvGather", tensors, {"kv": kv}, (1,))


@pytest.mark.parametrize("filters", [{}, {"top_k": 50}, {"top_p": 0.9}, {"top_p": 0.999, "top_k": 3000}])
def test_a_big_vocabulary(fast_kernels, filters) -> None:
    rng = np.random.default_rng(1)
    tensors = {
        "logits": (rng.normal(size=(2, 50_257)) * 2).astype(np.float32), "logit_indices": np.arange(2),
        "positions": np.arange(2) + 9, "branch": np.zeros(2, np.int64),
        **vars(equal_slots(1, temperature=0.8, **filters)),
    }  # fmt: skip
    compare(fast_kernels, "Sample", tensors, {"committed": np.full(2, POISON)}, (2, 2))


@pytest.mark.parametrize(("bad", "fault"), [(np.nan, 1), (-np.inf, 2)])
def test_faults_are_told_and_nothing_is_committed_there(kernels, bad, fault) -> None:
    tensors = {
        "logits": np.full((2, 70), bad, np.float32), "logit_indices": np.arange(2), "positions": np.arange(2),
        "branch": np.zeros(2, np.int64), **vars(equal_slots(1, temperature=1.0)),
    }  # fmt: skip
    tensors["logits"][0] = 0.5
    committed = np.full(2, POISON)
    assert kernels.create("Sample", tensors | {"committed": committed})(2, 2) == fault
    assert committed[0] >= 0
    assert committed[1] == POISON


@pytest.mark.parametrize(("bad", "fault"), [(np.nan, 1), (-np.inf, 2)])
@pytest.mark.parametrize("op", ["TreeAccept", "ChainAccept"])
def test_a_fault_counts_where_the_walk_comes_to(kernels, op, bad, fault) -> None:
    tensors, outputs = fork(op)
    tensors["logits"][2:] = bad
    compare(kernels, op, tensors, outputs, (4, 4))
    tensors["logits"][1] = bad
    assert kernels.create(op, tensors | outputs)(4, 4) == fault
    assert outputs["committed"].tolist() == [1, -1, -1, -1]


@pytest.mark.parametrize(("name", "index", "bad"), [("token_ids", 3, 8), ("draft_probs", (3, 0), np.nan)])
def test_what_was_drafted_is_looked_at_wherever_the_walk_goes(kernels, name, index, bad) -> None:
    tensors, outputs = fork("ChainAccept")
    tensors["logits"][1:] = np.nan  # which is told where nothing else is wrong
    tensors[name][index] = bad
    assert kernels.create("ChainAccept", tensors | outputs)(4, 4) == 3


@FEW
@given(data=st.data(), vocabulary=st.sampled_from([1, 2, 5, 65]), nodes=st.integers(1, 9))
@pytest.mark.parametrize("op", ["TreeAccept", "ChainAccept"])
def test_faults_are_those_of_the_cpu(kernels, op, data, vocabulary, nodes, slots, logits_rows) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    trees = data.draw(st.integers(1, 3))
    tensors, tree = step_of(
        rng, data.draw(slots(trees)), trees, nodes, vocabulary,
        lambda n: data.draw(logits_rows(n, vocabulary)), 0.4 if op == "TreeAccept" else 1.0,
    )  # fmt: skip
    count, new = len(tensors["logit_indices"]), len(tensors["branch"])
    tensors, outputs = tensors | tree, accept_outputs(new, count, trees)
    if op == "ChainAccept":
        q = rng.dirichlet(np.full(vocabulary, 0.3), count).astype(np.float32)
        tensors |= {"draft_probs": q} | {
            name: rng.integers(0, 2, trees) for name in ("skip_sample_adjustment", "by_rejection")
        }
        outputs |= {"trials": np.full((count, 2), float(POISON))}
    tensors = spoiled(rng, tensors)
    theirs = {name: array.copy() for name, array in outputs.items()}
    fault = fault_on_the_cpu(op, tensors, theirs, (new, count), {})
    assert kernels.create(op, tensors | outputs)(new, count) == fault
    if not fault:
        for name, array in theirs.items():
            np.testing.assert_array_equal(outputs[name], array, err_msg=name)


def test_a_branch_out_of_range_is_a_fault(kernels) -> None:
    tensors = {
        "logits": np.zeros((1, 8), np.float32), "logit_indices": np.zeros(1, np.int64),
        "positions": np.zeros(1, np.int64), "branch": np.array([5]), **vars(equal_slots(1)),
    }  # fmt: skip
    assert kernels.create("Sample", tensors | {"committed": np.full(1, POISON)})(1, 1) == 3


def test_a_parent_that_does_not_descend_ends_the_climb(kernels) -> None:
    """Whatever an engine wrote: a kernel that never ends would take the device with it."""
    tensors = {
        "bim": np.full((1, 8), -1), "past_length": np.zeros(1, np.int64), "row_splits": np.array([0, 3]),
        "branch": np.zeros(3, np.int64), "parent": np.array([2, 1, 2]),
    }  # fmt: skip
    bias = np.zeros((1, 1, 3, 8), np.float32)
    kernels.create("BimMask", tensors | {"attn_bias": bias})(3, 8, 1, 3)
    assert (bias[0, 0, :, :3] == 0).tolist() == np.eye(3, dtype=bool).tolist()
