"""TensorRT plugins without TensorRT: what they tell a builder agrees with the ops, and their PTX with TensorRT's rules.

What their kernels compute is compared in test_tensorrt_kernels.py.
"""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest

from outrider.plans import names
from outrider.plugins.cuda import LAUNCHES, DeviceOp
from outrider.plugins.schema import EXPERT_OPS, QUANT_OPS
from outrider.plugins.schemas import SCHEMAS
from outrider.plugins.tensorrt import DISTINCT, PLUGINS, Declined, compile_plugin, register_plugins
from outrider.plugins.tensorrt import compile as compiling
from outrider.plugins.tensorrt.expressions import INTEGERS, Size
from outrider.plugins.tensorrt.plugin import SAME_SIZE, carried_as
from outrider.plugins.tensorrt.source import parameters
from tests.plugins.emulator import Memory
from tests.plugins.tensorrt_stand_in import SIZES, StandIn, attributes_of, tensors_of

pytest.importorskip("cuda.bindings")  # a layer is built with its PTX
every_plugin = pytest.mark.parametrize("plugin", DISTINCT, ids=lambda plugin: plugin.name)
every_kernel = pytest.mark.parametrize("op", [op for op, entry in PLUGINS.items() if not isinstance(entry, Declined)])
SHARES = {
    "Sample": "outrider_row_shares", "TreeAccept": "outrider_row_shares", "ChainAccept": "outrider_chain_shares",
}  # fmt: skip
BETWEEN_ENGINES = {"BlockSummary", "BlockSelect", "PartialKvGather"}


def inputs_of(plugin):
    return list(tensors_of(plugin.inputs).values())


def test_every_op_is_a_plugin_or_says_why_not() -> None:
    kin = {*QUANT_OPS, *EXPERT_OPS, "BiasedRoute"}  # of graphs alone, and told of beside another op
    assert set(PLUGINS) == set(SCHEMAS) | kin
    declined = {op: entry.reason for op, entry in PLUGINS.items() if isinstance(entry, Declined)}
    assert set(declined) == set(SCHEMAS) - set(LAUNCHES) | BETWEEN_ENGINES | kin
    assert all(declined.values())
    assert len({plugin.id for plugin in DISTINCT}) == len({plugin.kernel for plugin in DISTINCT}) == len(DISTINCT)


@every_kernel
def test_the_plugins_of_an_op_take_what_it_takes_and_give_what_it_gives(op: str) -> None:
    schema = SCHEMAS[op]
    assert set(schema.inputs) <= {spec for plugin in PLUGINS[op] for spec in plugin.inputs}
    attributes = {name: plugin.kind(name) for plugin in PLUGINS[op] for name in plugin.attributes}
    assert {spec.name: spec.kind for spec in schema.attributes}.items() <= attributes.items()
    theirs = tensors_of(schema.outputs)
    told = []
    for plugin in PLUGINS[op]:
        ours = tensors_of(plugin.outputs)
        promised = [name for name in ours if name in theirs]
        assert list(ours)[: len(promised)] == promised
        for name in promised:
            assert (ours[name].shape, ours[name].dtype) == (theirs[name].shape, theirs[name].dtype)
        told += promised
    assert told == list(theirs)


@every_kernel
def test_whatever_else_a_plugin_takes_an_earlier_one_gives_or_has_only_a_length(op: str) -> None:
    there = set(SCHEMAS[op].inputs)
    for plugin in PLUGINS[op]:
        for spec in set(plugin.inputs) - there:
            assert (spec.name, spec.dtype, len(spec.shape)) in {(n, "int64", 1) for n in ("places", "view", "slots")}
            assert spec.name not in plugin.launch.pointers
        there |= set(plugin.outputs)


@every_kernel
def test_scratch_is_an_output_as_big_as_the_device_ops_and_none_must_start_as_zeros(op: str) -> None:
    outputs = tensors_of(spec for plugin in PLUGINS[op] for spec in plugin.outputs)
    for name, scratch in LAUNCHES[op].scratch.items():
        if scratch.zeroed:
            assert name not in outputs
            assert all(name in plugin.stand_ins or name not in plugin.launch.pointers for plugin in PLUGINS[op])
        else:
            assert outputs[name].nbytes == scratch.size(SIZES)


@every_kernel
def test_launches_are_those_of_the_device_op(op: str) -> None:
    """Of the first plugin, whose kernel does only the first part of a choice, in as many blocks as the device op."""
    plugin, schema = PLUGINS[op][0], SCHEMAS[op]
    attributes = attributes_of(plugin)
    memory = {name: Memory(array) for name, array in tensors_of(schema.tensors).items()}
    device = DeviceOp(op, memory, attributes, lambda name, size, zeroed: 0)
    blocks, threads, values = device.values(*(SIZES[extent] for extent in schema.extents))
    layer = StandIn().build(plugin, inputs_of(plugin), attributes)
    kernel = SHARES.get(op, device.launch.kernel)
    assert (layer.kernel, layer.blocks, layer.threads) == (f"{kernel}_plugin", blocks, threads)
    numbers = [value.value for value in values[len(device.launch.pointers) :]]
    own = {SAME_SIZE.get(name, name): n for name, n in zip(device.launch.numbers, numbers, strict=True)}
    arguments = dict(zip(plugin.arguments, layer.arguments, strict=True))
    assert op in SHARES or set(own) <= set(arguments)
    assert arguments == {name: own.get(name, SIZES.get(name)) for name in arguments}
    assert set(arguments) - set(own) <= set(plugin.extra)


@pytest.mark.parametrize("op", ["Sample", "TreeAccept", "ChainAccept"])
def test_a_row_of_logits_is_shared_out_and_then_chosen_from_by_one_block(op: str) -> None:
    shares, choices = PLUGINS[op][:2]
    for vocabulary, blocks in ((1, 1), (1024, 1), (1025, 2), (128_000, 125), (152_064, 149)):
        sizes = {"M": 3, "V": vocabulary}
        launch = shares.launch_for(attributes_of(shares))
        assert launch.blocks.value(sizes, INTEGERS) == 3 * blocks
        assert choices.launch_for(attributes_of(choices)).blocks.value(sizes, INTEGERS) == 3
        assert shares.output_shapes(sizes, INTEGERS) == [(3, blocks, 19)]


@every_plugin
def test_outputs_have_the_shapes_that_the_schemas_say(plugin) -> None:
    _, outputs = StandIn().describe(plugin, inputs_of(plugin), attributes_of(plugin))
    for output, array in zip(outputs, tensors_of(plugin.outputs).values(), strict=True):
        assert tuple(dim.number for dim in output.shape_expr) == array.shape


def test_a_float_is_baked_in_as_its_bits() -> None:
    plugin = PLUGINS["TreeExpand"][0]
    layer = StandIn().build(plugin, inputs_of(plugin), attributes_of(plugin))
    bits = dict(zip(plugin.arguments, layer.arguments, strict=True))
    assert np.array([bits["doubt"]], np.int32).view(np.float32).item() == np.float32(0.3)


def test_a_frontier_is_a_block_for_each_tree() -> None:
    frontier = PLUGINS["TreeExpand"][1]
    layer = StandIn().build(frontier, inputs_of(frontier), attributes_of(frontier))
    assert (layer.blocks, layer.arguments) == (SIZES["trees"], (SIZES["candidates"], SIZES["top_k"]))


def test_a_walk_is_one_warp() -> None:
    for op in ("TreeAccept", "ChainAccept"):
        walk = PLUGINS[op][-1]
        layer = StandIn().build(walk, inputs_of(walk), {})
        assert (layer.blocks, layer.threads) == (1, 32)
        assert layer.arguments == (SIZES[names.LOGITS], SIZES["B"], SIZES[names.NEW])


def test_formulas_know_products_and_quotients_rounded_up() -> None:
    a, b = Size("a"), Size("b")
    for sizes in ({"a": 1, "b": 1}, {"a": 5, "b": 3}, {"a": 64, "b": 4}):
        assert (-(-a * b // 4)).value(sizes, INTEGERS) == -(-sizes["a"] * sizes["b"] // 4)
        assert (3 * a * b).value(sizes, INTEGERS) == 3 * sizes["a"] * sizes["b"]
    for refused in (lambda: a // 2, lambda: a + b, lambda: min(a, b)):
        with pytest.raises(TypeError):
            refused()


def test_no_plugin_has_a_type_that_tensorrt_lacks() -> None:
    types = {dtype for plugin in DISTINCT for spec in (*plugin.inputs, *plugin.outputs) for dtype in carried_as(spec)}
    assert types == {"int64", "float32", "float16", "bfloat16", "int8"}


def test_only_kv_gather_writes_where_it_reads() -> None:
    stand_in = StandIn()
    for plugin in DISTINCT:
        known, outputs = stand_in.describe(plugin, inputs_of(plugin), attributes_of(plugin))
        expected = known[:1] if plugin.name == "KvGather" else [None] * len(outputs)
        assert [output.alias for output in outputs] == expected


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


def test_ptx_is_for_the_oldest_gpu_and_the_same_every_time() -> None:
    ptx = compile_plugin(PLUGINS["Sample"][0])
    assert ".target sm_75\n" in ptx
    assert not ptx.endswith("\0")
    compiling.compile_ptx.cache_clear()
    assert compile_plugin(PLUGINS["Sample"][0]) == ptx


def test_ptx_is_no_newer_than_the_oldest_driver_takes() -> None:
    """A driver 580 is of CUDA 13.0, whose PTX is 9.0; it refuses any newer."""
    (version,) = re.findall(r"^\.version (\d+)\.(\d+)$", compile_plugin(PLUGINS["Sample"][0]), re.MULTILINE)
    assert tuple(map(int, version)) <= (9, 0)


def test_newer_ptx_is_refused() -> None:
    assert compiling._for_every_driver(".version 9.0\n.target sm_75\n") == ".version 9.0\n.target sm_75\n"
    for version in ("9.1", "9.5", "10.0"):
        with pytest.raises(RuntimeError, match=rf"NVRTC makes PTX {version}, .*pip install"):
            compiling._for_every_driver(f".version {version}\n.target sm_75\n")


def test_what_does_not_compile_is_told_with_the_compilers_words() -> None:
    with pytest.raises(
        RuntimeError, match=r"outrider_race_noise_plugin does not compile for compute_1: .*architecture"
    ):
        compile_plugin(PLUGINS["RaceNoise"][0], "compute_1")


def test_a_type_that_is_not_the_plugins_is_refused() -> None:
    (plugin,) = PLUGINS["RaceNoise"]
    tensors = tensors_of(plugin.inputs)
    tensors["sampling"] = tensors["sampling"].astype("float32")
    with pytest.raises(ValueError, match=r"outrider::RaceNoise takes sampling as int64 \(the bits of float64\)"):
        StandIn().describe(plugin, list(tensors.values()), {"depths": 2, "V": 9, "purpose": 0})


def test_a_rank_that_is_not_the_plugins_is_refused() -> None:
    (plugin,) = PLUGINS["BimMask"]
    first, *others = inputs_of(plugin)
    with pytest.raises(ValueError, match=r"outrider::BimMask takes inputs of ranks \[2, 1.*not \[1, 1"):
        StandIn().describe(plugin, [first[0], *others], {})


def test_kv_gather_is_built_for_a_fixed_slot_size() -> None:
    stand_in, (plugin,) = StandIn(), PLUGINS["KvGather"]
    known, outputs = stand_in.describe(plugin, inputs_of(plugin), {})
    known[0].shape = (-1, -1, -1, -1, -1)
    with pytest.raises(ValueError, match="outrider::KvGather needs a fixed slot_size: axis 4 of kv"):
        stand_in.implemented[plugin.id](*known, outputs, 0)


def test_an_attribute_that_is_missing_is_named() -> None:
    with pytest.raises(
        ValueError, match="outrider::RaceNoise is built for fixed depths, V, purpose; missing: depths, V"
    ):
        PLUGINS["RaceNoise"][0].launch_for({"purpose": 0})


def test_without_tensorrt_registering_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(ImportError, match=r"TensorRT 10\.15 or later, whose package `tensorrt` cannot be loaded"):
        register_plugins()


def test_tensorrt_accepts_every_plugin() -> None:
    """Where it is installed."""
    trtp = pytest.importorskip("tensorrt.plugin")
    register_plugins()
    assert all(hasattr(trtp.op.outrider, plugin.name) for plugin in DISTINCT)
