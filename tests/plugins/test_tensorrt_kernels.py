"""The kernels of TensorRT plugins on the contents of memory that engines and their builder leave there.

`test_cuda_kernels.py` and `test_drafting.py` compare their results with those of the ops.
"""

from __future__ import annotations

import multiprocessing
import shutil

import numpy as np
import pytest

from outrider.plugins.tensorrt.table import DISTINCT, PLUGINS
from tests.plugins.accept_step import equal_slots
from tests.plugins.tensorrt_stand_in import StandIn, attributes_of, poisoned, tensors_of

pytest.importorskip("cuda.bindings")  # a layer is built with its PTX
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="kernels are compiled for the CPU with g++")


@pytest.fixture(scope="module")
def stand_in(plugin_shells: StandIn) -> StandIn:
    return plugin_shells


@pytest.mark.parametrize(
    ("op", "name", "sound", "spoiled"),
    [("TreeExpand", "top_k", 11, 12), ("TreeExpand", "top_k", 1, 0), ("TreeRerank", "nodes", 9, 10)],
)
def test_more_children_or_nodes_than_there_are_is_refused(stand_in: StandIn, op, name, sound, spoiled) -> None:
    """A choice of 12 tokens of 11, or of 9 candidates of 8."""
    plugin = PLUGINS[op][0]
    for value in (sound, spoiled):
        outputs = stand_in.run(plugin, tensors_of(plugin.inputs), attributes_of(plugin) | {name: value})
        assert all(poisoned(array) == (value == spoiled) for array in outputs.values())


def test_each_row_that_is_sampled_reports_its_own_fault(stand_in: StandIn) -> None:
    logits = np.zeros((4, 8), np.float32)
    logits[1], logits[2] = np.nan, -np.inf
    tensors = {
        "logits": logits, "logit_indices": np.arange(4), "positions": np.arange(4), "branch": np.array([0, 0, 0, 9]),
        **vars(equal_slots(1, temperature=1.0)),
    }  # fmt: skip
    shares, choices = PLUGINS["Sample"]
    tensors |= stand_in.run(shares, tensors, {"purpose": 0})
    assert stand_in.run(choices, tensors, {"purpose": 0})["status"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("plugin", DISTINCT, ids=lambda plugin: plugin.name)
def test_a_builder_may_time_a_plugin_on_any_contents_of_memory(stand_in: StandIn, plugin) -> None:
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
        *(("BimMask", MASK, {"row_splits": splits}) for splits in ([-1, 5], [3, 2], [0, 6])),
        ("BimMask", MASK, {"past_length": [-1]}),
        ("BimMask", MASK, {"view": [0] * 41}),
        ("KvGather", MOVES, {}),
        ("KvGather", MOVES, {"source_count": [6]}),
        *(("KvGather", MOVES, {"row_splits": splits}) for splits in ([1, 2, 5], [0, 3, 2], [0, 2, 6])),
        ("KvGather", MOVES, {"source_base": [-1, 41]}),
        ("KvGather", MOVES, {"destination": [41, -1]}),
        ("TreeWalk", WALK, {}),
        *(("TreeWalk", WALK, {"next": places}) for places in ([-1, -1, 2, -1], [-1, -1, 4, -1], [-1, -2, -1, -1])),
        *(("TreeWalk", WALK, {"logit_indices": rows}) for rows in ([0, 1, 1, 2], [-1, 1, 2, 3], [1, 2, 3, 7])),
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
