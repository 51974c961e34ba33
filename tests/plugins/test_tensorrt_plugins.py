"""TensorRT plugins without TensorRT: their descriptions agree with the ops, their PTX with TensorRT's rules, and their
kernels stand what engines and their builder leave in memory. `test_cuda_kernels.py` and `test_drafting.py` compare the
kernels' results with those of the ops."""

from __future__ import annotations

import multiprocessing
import re
import sys

import numpy as np
import pytest

from outrider.plugins.onnx_ops.layers import LAYER_BODIES
from outrider.plugins.ops import OPS
from outrider.plugins.schema import EXPERT_OPS, QUANT_OPS
from outrider.plugins.tensorrt import compile as compiling
from outrider.plugins.tensorrt.compile import compile_plugin
from outrider.plugins.tensorrt.plugin import Declined
from outrider.plugins.tensorrt.registration import register_plugins
from outrider.plugins.tensorrt.source import parameters
from outrider.plugins.tensorrt.table import DISTINCT, PLUGINS
from tests.plugins.accept_step import equal_slots
from tests.plugins.tensorrt_stand_in import StandIn, attributes_of, poisoned, tensors_of

pytest.importorskip("cuda.bindings")  # a layer is built with its PTX
every_plugin = pytest.mark.parametrize("plugin", DISTINCT, ids=lambda plugin: plugin.name)
BETWEEN_ENGINES = {"BlockSummary", "BlockSelect", "PartialKvGather"}


def inputs_of(plugin):
    return list(tensors_of(plugin.inputs).values())


def test_every_op_is_a_plugin_or_says_why_not() -> None:
    alone = {*QUANT_OPS, *EXPERT_OPS, "BiasedRoute", *LAYER_BODIES}  # of graphs, without a schema here
    assert set(PLUGINS) == set(OPS) | alone
    declined = {op: entry.reason for op, entry in PLUGINS.items() if isinstance(entry, Declined)}
    assert set(declined) == {name for name, op in OPS.items() if op.launch is None} | BETWEEN_ENGINES | alone
    assert all(declined.values())
    assert len({plugin.id for plugin in DISTINCT}) == len({plugin.kernel for plugin in DISTINCT}) == len(DISTINCT)


@every_plugin
def test_outputs_have_the_schemas_shapes_and_only_kv_gather_writes_where_it_reads(plugin) -> None:
    known, outputs = StandIn().describe(plugin, inputs_of(plugin), attributes_of(plugin))
    for output, array in zip(outputs, tensors_of(plugin.outputs).values(), strict=True):
        assert tuple(dim.number for dim in output.shape_expr) == array.shape
    expected = known[:1] if plugin.name == "KvGather" else [None] * len(outputs)
    assert [output.alias for output in outputs] == expected


def test_ptx_is_for_the_oldest_gpu_and_driver_and_the_same_every_time() -> None:
    """A driver 580 is of CUDA 13.0, whose PTX is 9.0; it refuses any newer."""
    ptx = compile_plugin(PLUGINS["Sample"][0])
    assert ".target sm_75\n" in ptx
    assert not ptx.endswith("\0")
    (version,) = re.findall(r"^\.version (\d+)\.(\d+)$", ptx, re.MULTILINE)
    assert tuple(map(int, version)) <= (9, 0)
    compiling.compile_ptx.cache_clear()
    assert compile_plugin(PLUGINS["Sample"][0]) == ptx


def test_inputs_attributes_and_ptx_that_do_not_fit_are_refused() -> None:
    def described(op, change):
        (plugin,) = PLUGINS[op]
        inputs = tensors_of(plugin.inputs)
        StandIn().describe(plugin, list((inputs | change(inputs)).values()), attributes_of(plugin))

    def without_slot_size():
        stand_in, (plugin,) = StandIn(), PLUGINS["KvGather"]
        known, outputs = stand_in.describe(plugin, inputs_of(plugin), {})
        known[0].shape = (-1, -1, -1, -1, -1)
        stand_in.implemented[plugin.id](*known, outputs, 0)

    (noise,) = PLUGINS["RaceNoise"]
    for run, sentence in (
        (
            lambda: described("RaceNoise", lambda inputs: {"sampling": inputs["sampling"].astype("float32")}),
            r"outrider::RaceNoise takes sampling as int64 \(the bits of float64\)",
        ),
        (
            lambda: described("BimMask", lambda inputs: {"bim": inputs["bim"][0]}),
            r"outrider::BimMask takes inputs of ranks \[2, 1.*not \[1, 1",
        ),
        (without_slot_size, "outrider::KvGather needs a fixed slot_size: axis 4 of kv"),
        (
            lambda: noise.launch_for({"purpose": 0}),
            "RaceNoise is built for fixed depths, V, purpose; missing: depths, V",
        ),
        (lambda: compiling._for_every_driver(".version 9.1\n.target sm_75\n"), r"NVRTC makes PTX 9.1, .*pip install"),
        (lambda: compile_plugin(noise, "compute_1"), r"outrider_race_noise_plugin does not compile .*: .*architecture"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=sentence):
            run()


@every_plugin
def test_ptx_has_the_kernel_with_parameters_as_tensorrt_passes_them(plugin) -> None:
    (declared,) = re.findall(rf"\.visible \.entry {plugin.kernel}\((.*?)\)", compile_plugin(plugin), re.DOTALL)
    widths = [int(bits) for bits in re.findall(r"\.param \.u(32|64)", declared)]
    assert widths == [64] * len(plugin.inputs) + [32] * len(plugin.arguments) + [64] * len(plugin.outputs)
    assert widths == [parameter.bits for parameter in parameters(plugin)]


@pytest.mark.parametrize("name", ["RowShares", "RowChoice", "ChainShares"])
def test_logits_are_loaded_16_bytes_at_once(name: str) -> None:
    (plugin,) = (plugin for plugin in DISTINCT if plugin.name == name)
    assert "ld.global.v4.f32" in compile_plugin(plugin)


@every_plugin
def test_ptx_leaves_no_arithmetic_for_a_driver_to_contract(plugin) -> None:
    """Multiplications and additions without a rounding mode may become one operation when PTX is compiled further."""
    loose = r"\b(?:fma|mad|add|sub|mul)\.f(?:32|64)\b|\bfma\.\S+|\.ftz\b|\.approx\b"
    assert re.findall(loose, compile_plugin(plugin)) == []


def test_without_tensorrt_registering_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(ImportError, match=r"TensorRT 10\.15 or later, whose package `tensorrt` cannot be loaded"):
        register_plugins()


def test_tensorrt_accepts_every_plugin() -> None:
    """Where it is installed."""
    trtp = pytest.importorskip("tensorrt.plugin")
    register_plugins()
    assert all(hasattr(trtp.op.outrider, plugin.name) for plugin in DISTINCT)


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
