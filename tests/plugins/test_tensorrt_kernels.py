"""The kernels of TensorRT plugins, launched as TensorRT does, run on the CPU: they give what the CPU kernels give.

Those of drafting, of which the CPU has none, give what the references give.
"""

from __future__ import annotations

import multiprocessing
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.plans.sampling import Sampling
from outrider.plugins import native
from outrider.plugins.reference import SamplingSlots
from outrider.plugins.schema import Purpose
from outrider.plugins.schemas import SCHEMAS
from outrider.plugins.tensorrt import DISTINCT, PLUGINS
from tests.plugins.accept_step import equal_slots, fault_on_the_cpu, fork, spoiled
from tests.plugins.drafting import (
    BRANCHES,
    DOUBT,
    apart,
    check_expand,
    check_rerank,
    check_sample_is_the_reference,
    expand_inputs,
    noise_of,
    rerank_inputs,
    settings_of,
)
from tests.plugins.tensorrt_stand_in import StandIn, attributes_of, poisoned, tensors_of
from tests.plugins.test_cuda_kernels import FEW, POISON, accept_outputs, step_of
from tests.plugins.test_race_noise import noise_inputs, noise_outputs
from tests.plugins.test_tree_ops import candidates, grown

pytest.importorskip("cuda.bindings")  # a layer is built with its PTX
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="kernels are compiled for the CPU with g++")


@pytest.fixture(scope="module")
def stand_in(plugin_shells: StandIn) -> StandIn:
    return plugin_shells


def run_all(stand_in: StandIn, op: str, tensors, attributes):
    """The op's plugins, one after another: all tensors by name."""
    pool = dict(tensors)
    for plugin in PLUGINS[op]:
        pool |= stand_in.run(plugin, pool, {name: attributes[name] for name in plugin.attributes})
    return pool


def agree(stand_in: StandIn, op: str, tensors, outputs, extents, **attributes: int) -> None:
    """The op's plugins, one after another, against its CPU kernel."""
    theirs = {name: array.copy() for name, array in outputs.items()}
    schema = SCHEMAS[op]
    bound = {spec.name: (tensors | theirs)[spec.name] for spec in schema.tensors}
    native.create(op, bound, {spec.name: attributes[spec.name] for spec in schema.attributes})(*extents)
    given_ = tensors | {name: array.copy() for name, array in outputs.items()}  # KvGather's is an input too
    pool = run_all(stand_in, op, given_, attributes)
    for name, array in theirs.items():
        np.testing.assert_array_equal(pool[name], array, err_msg=name)
    assert not pool.get("status", np.zeros(1)).any()


def accepting(rng, op, trees, nodes, vocabulary, data, slots, logits_rows):
    """A step for Sample or an op that accepts: tensors, outputs and extents."""
    tensors, tree = step_of(
        rng, data.draw(slots(trees)), trees, nodes, vocabulary,
        lambda n: data.draw(logits_rows(n, vocabulary)), 0.4 if op == "TreeAccept" else 1.0,
    )  # fmt: skip
    count, new = len(tensors["logit_indices"]), len(tensors["branch"])
    outputs = {"committed": np.full(count, POISON)}
    if op != "Sample":
        outputs = accept_outputs(new, count, trees)
        tensors |= tree | {"slots": np.zeros(trees, np.int64)}
    if op == "ChainAccept":
        q = rng.dirichlet(np.full(vocabulary, 0.3), count).astype(np.float32)
        tensors |= {"draft_probs": q} | {
            name: rng.integers(0, 2, trees) for name in ("skip_sample_adjustment", "by_rejection")
        }
        outputs |= {"trials": np.full((count, 2), float(POISON))}
    return tensors, outputs, (new, count)


@FEW
@given(data=st.data(), vocabulary=st.sampled_from([1, 3, 65, 200]), purpose=st.sampled_from(Purpose))
@pytest.mark.parametrize("op", ["Sample", "TreeAccept", "ChainAccept"])
def test_choices_and_walks(stand_in, op, data, vocabulary, purpose, slots, logits_rows) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    trees, nodes = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 7))
    tensors, outputs, extents = accepting(rng, op, trees, nodes, vocabulary, data, slots, logits_rows)
    agree(stand_in, op, tensors, outputs, extents, purpose=int(purpose))


@FEW
@given(
    data=st.data(), depths=st.integers(1, 30), branches=st.integers(1, 4), vocabulary=st.sampled_from([1, 4, 65]),
    purpose=st.sampled_from(Purpose),
)  # fmt: skip
def test_race_noise(stand_in, data, depths, branches, vocabulary, purpose, slots) -> None:
    drawn: SamplingSlots = data.draw(slots(branches))
    heat = drawn.sampling[:, Sampling._fields.index("temperature")]
    heat[:] = np.maximum(heat, 0.1)  # else noise is not written
    tensors = noise_inputs(np.arange(branches) + 2**33, drawn)
    outputs = noise_outputs(branches, depths, vocabulary)
    agree(stand_in, "RaceNoise", tensors, outputs, (), depths=depths, V=vocabulary, purpose=int(purpose))


@FEW
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 3), dtype=st.sampled_from([np.float32, np.float16]))
def test_masks_and_moves(stand_in, seed, rows, dtype) -> None:
    rng = np.random.default_rng(seed)
    capacity, new, past = 60, rng.integers(0, 6, rows), rng.integers(0, 30, rows)
    splits = np.concatenate(([0], np.cumsum(new)))
    total = int(splits[-1])
    parent = np.arange(total) - 1
    parent[splits[:-1][new > 0]] = -1
    places, view = int(new.max()) + 1, int((past + new).max()) + int(rng.integers(1, 9))
    tensors = {
        "bim": rng.integers(-1, 3, (rows, capacity)), "past_length": past, "row_splits": splits,
        "branch": rng.integers(0, 3, total), "parent": parent,
        "places": np.zeros(places, np.int64), "view": np.zeros(view, np.int64),
    }  # fmt: skip
    bias = {"attn_bias": np.full((rows, 1, places, view), 0.5, np.float32)}
    agree(stand_in, "BimMask", tensors, bias, (total, view, rows, places))

    source = np.flatnonzero(rng.random(total) < 0.6)
    moves = {
        "source": np.concatenate((source, np.full(total - len(source), POISON))),
        "source_count": np.array([len(source)]), "row_splits": splits, "source_base": past,
        "destination": np.maximum(past - rng.integers(0, 3, rows), 0),
    }  # fmt: skip
    kv = rng.normal(size=(4, rows, 2, capacity, int(rng.choice([2, 8, 40])))).astype(dtype)
    agree(stand_in, "KvGather", moves, {"kv": kv}, (rows,))


@FEW
@given(data=st.data(), branches=BRANCHES, nodes=st.integers(1, 3), vocabulary=st.sampled_from([5, 65, 300]))
def test_drafting(stand_in, data, branches, nodes, vocabulary) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    logits, noise = apart(rng, (len(branches), nodes, vocabulary)), noise_of(rng, len(branches), vocabulary)
    top_k = data.draw(st.sampled_from([1, 3, 5]))
    score = -rng.exponential(size=(len(branches), nodes)).astype(np.float32)
    grow = expand_inputs(logits, score, branches, noise)
    children, frontier = PLUGINS["TreeExpand"]
    found = stand_in.run(children, grow, {"top_k": top_k, **DOUBT})
    found |= stand_in.run(frontier, found, {"top_k": top_k})
    check_expand(grow, found, top_k)

    sample = {"logits": logits, **settings_of(branches, noise)}
    check_sample_is_the_reference(sample, stand_in.run(PLUGINS["DraftSample"][0], sample, {}))


@FEW
@given(shape=candidates(), trees=st.integers(1, 3), zeros=st.sampled_from([0.0, 0.4, 1.0]))
def test_reranking(stand_in, shape, trees, zeros) -> None:
    k, depth, nodes, seed = shape
    inputs = rerank_inputs(grown(k, depth, trees, seed, zeros))
    check_rerank(inputs, stand_in.run(PLUGINS["TreeRerank"][0], inputs, {"nodes": nodes}), nodes)


@pytest.mark.parametrize(
    ("op", "name", "sound", "spoiled"),
    [("TreeExpand", "top_k", 11, 12), ("TreeExpand", "top_k", 1, 0), ("TreeRerank", "nodes", 9, 10)],
)
def test_more_than_there_are_is_not_looked_for(stand_in: StandIn, op, name, sound, spoiled) -> None:
    """A choice of 12 tokens of 11, or of 9 candidates of 8."""
    plugin = PLUGINS[op][0]
    for value in (sound, spoiled):
        outputs = stand_in.run(plugin, tensors_of(plugin.inputs), attributes_of(plugin) | {name: value})
        assert all(poisoned(array) == (value == spoiled) for array in outputs.values())


def test_each_row_that_is_sampled_tells_its_own_fault(stand_in: StandIn) -> None:
    logits = np.zeros((4, 8), np.float32)
    logits[1], logits[2] = np.nan, -np.inf
    tensors = {
        "logits": logits, "logit_indices": np.arange(4), "positions": np.arange(4), "branch": np.array([0, 0, 0, 9]),
        **vars(equal_slots(1, temperature=1.0)),
    }  # fmt: skip
    assert run_all(stand_in, "Sample", tensors, {"purpose": 0})["status"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(("bad", "fault"), [(np.nan, 1), (-np.inf, 2)])
@pytest.mark.parametrize("op", ["TreeAccept", "ChainAccept"])
def test_a_fault_counts_where_the_walk_comes_to(stand_in: StandIn, op, bad, fault) -> None:
    tensors, outputs = fork(op)
    tensors |= {"slots": np.zeros(1, np.int64)}
    tensors["logits"][2:] = bad
    agree(stand_in, op, tensors, outputs, (4, 4), purpose=0)
    tensors["logits"][1] = bad
    pool = run_all(stand_in, op, tensors, {"purpose": 0})
    assert (pool["status"].tolist(), pool["committed"].tolist()) == ([fault], [1, -1, -1, -1])


@FEW
@given(data=st.data(), vocabulary=st.sampled_from([1, 2, 5, 65]), nodes=st.integers(1, 7))
@pytest.mark.parametrize("op", ["TreeAccept", "ChainAccept"])
def test_faults_are_those_of_the_cpu(stand_in, op, data, vocabulary, nodes, slots, logits_rows) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    trees = data.draw(st.integers(1, 3))
    tensors, outputs, extents = accepting(rng, op, trees, nodes, vocabulary, data, slots, logits_rows)
    tensors = spoiled(rng, tensors)
    bound = {spec.name: tensors[spec.name] for spec in SCHEMAS[op].inputs}
    fault = fault_on_the_cpu(op, bound, outputs, extents, {})
    pool = run_all(stand_in, op, tensors, {"purpose": 0})
    assert pool["status"].tolist() == [fault]
    if not fault:
        for name, array in outputs.items():
            np.testing.assert_array_equal(pool[name], array, err_msg=name)


@pytest.mark.parametrize("plugin", DISTINCT, ids=lambda plugin: plugin.name)
def test_a_builder_may_time_a_plugin_on_whatever_memory_holds(stand_in: StandIn, plugin) -> None:
    """In a process of its own: a kernel that leaves its tensors would take this one with it."""
    rng = np.random.default_rng(0)
    contents = [lambda shape, value=value: np.full(shape, value, np.int64) for value in (0, 1, -1, 2**62, -(2**63))]
    for low, high in [(-(2**63), 2**63 - 1), (-3, 9), (0, 5)] * 20:
        contents.append(lambda shape, low=low, high=high: rng.integers(low, high, shape))

    def run() -> None:
        for content in contents:
            tensors = tensors_of(
                plugin.inputs,
                lambda shape, dtype: content(shape).view(dtype)[..., : shape[-1]].copy(),  # noqa: B023
            )
            outputs = stand_in.run(plugin, tensors, attributes_of(plugin))
            assert set(outputs.get("status", np.zeros(1)).tolist()) <= {0, 1, 2, 3}

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join(120)
    process.kill()
    assert process.exitcode == 0


MASK = {
    "bim": np.full((1, 40), -1), "past_length": np.array([3]), "row_splits": np.array([0, 5]),
    "branch": np.zeros(5, np.int64), "parent": np.arange(5) - 1, "places": np.zeros(6, np.int64),
    "view": np.zeros(40, np.int64),
}  # fmt: skip
MOVES = {
    "kv": np.arange(2 * 40.0, dtype=np.float32).reshape(1, 2, 1, 40, 1), "source": np.array([1, 3, 4, -1, -1]),
    "source_count": np.array([3]), "row_splits": np.array([0, 2, 5]), "source_base": np.array([9, 9]),
    "destination": np.array([8, 7]),
}  # fmt: skip
WALK = tensors_of(PLUGINS["TreeAccept"][-1].inputs) | {"logit_indices": np.arange(4), "next": np.full(4, -1)}


@pytest.mark.parametrize(
    ("op", "sound", "spoiled"),
    [
        ("BimMask", MASK, {}),
        ("BimMask", MASK, {"row_splits": [-1, 5]}),
        ("BimMask", MASK, {"row_splits": [3, 2]}),
        ("BimMask", MASK, {"row_splits": [0, 6]}),
        ("BimMask", MASK, {"past_length": [-1]}),
        ("BimMask", MASK, {"view": [0] * 41}),
        ("KvGather", MOVES, {}),
        ("KvGather", MOVES, {"source_count": [6]}),
        ("KvGather", MOVES, {"row_splits": [1, 2, 5]}),
        ("KvGather", MOVES, {"row_splits": [0, 3, 2]}),
        ("KvGather", MOVES, {"row_splits": [0, 2, 6]}),
        ("KvGather", MOVES, {"source_base": [-1, 41]}),
        ("KvGather", MOVES, {"destination": [41, -1]}),
        ("TreeWalk", WALK, {}),
        ("TreeWalk", WALK, {"next": [-1, -1, 2, -1]}),
        ("TreeWalk", WALK, {"next": [-1, -1, 4, -1]}),
        ("TreeWalk", WALK, {"next": [-1, -2, -1, -1]}),
        ("TreeWalk", WALK, {"logit_indices": [0, 1, 1, 2]}),
        ("TreeWalk", WALK, {"logit_indices": [-1, 1, 2, 3]}),
        ("TreeWalk", WALK, {"logit_indices": [1, 2, 3, 7]}),
    ],
)
def test_indices_that_lead_astray_are_not_followed(stand_in: StandIn, op, sound, spoiled) -> None:
    (plugin,) = (plugin for plugin in DISTINCT if plugin.name == op)
    tensors = {name: np.array(spoiled.get(name, array), array.dtype) for name, array in sound.items()}
    outputs = stand_in.run(plugin, tensors, {})
    if op == "TreeWalk":
        assert outputs.pop("status").tolist() == [3 if spoiled else 0]
    for name, array in outputs.items():
        untouched = (array == sound["kv"]).all() if name == "kv" else poisoned(array)
        assert untouched == bool(spoiled)


def test_rows_that_do_not_ascend_are_a_fault(stand_in: StandIn) -> None:
    for op in ("TreeAccept", "ChainAccept"):
        _, choices, walk = PLUGINS[op]
        given_ = tensors_of((*choices.inputs, *walk.inputs))
        found = stand_in.run(choices, given_, attributes_of(choices))
        outputs = stand_in.run(walk, given_ | found, {})
        assert outputs.pop("status").tolist() == [3]
        assert all(poisoned(array) for array in (*found.values(), *outputs.values()))
