"""TensorRT plugins without TensorRT: what they tell a builder agrees with the ops, and their kernels with the CPU's."""

from __future__ import annotations

import multiprocessing
import re
import shutil
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugins import native
from plugins.cuda import LAUNCHES, DeviceOp
from plugins.reference import SamplingSlots
from plugins.schema import Purpose
from plugins.schemas import SCHEMAS
from plugins.tensorrt import PLUGINS, Declined, compile_plugin, register_plugins
from plugins.tensorrt.expressions import INTEGERS, Size
from plugins.tensorrt.plugin import carried_as
from plugins.tensorrt.source import parameters
from tests.plugins.accept_step import equal_slots
from tests.plugins.emulator import Memory
from tests.plugins.tensorrt_stand_in import ALL, StandIn, poisoned
from tests.plugins.test_cuda_kernels import FEW, POISON, accept_outputs, step_of

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="kernels are compiled for the CPU with g++")
def test_every_op_is_a_plugin_or_says_why_not() -> None:
    assert set(PLUGINS) == set(SCHEMAS)
    declined = {op: entry.reason for op, entry in PLUGINS.items() if isinstance(entry, Declined)}
    assert set(declined) == set(SCHEMAS) - set(LAUNCHES)
    assert all(declined.values())
    assert len({plugin.id for plugin in ALL}) == len({plugin.kernel for plugin in ALL}) == len(ALL)


@pytest.mark.parametrize("op", LAUNCHES)
def test_the_plugins_of_an_op_take_its_inputs_and_give_its_outputs(op: str) -> None:
    first, last = PLUGINS[op][0], PLUGINS[op][-1]
    schema = SCHEMAS[op]
    assert first.inputs[: len(schema.inputs)] == schema.inputs
    assert [spec.name for spec in last.outputs[: len(schema.outputs)]] == [spec.name for spec in schema.outputs]
    assert {spec.name for spec in schema.attributes} <= set(first.attributes)
    ours, theirs = empty(last.outputs), empty(schema.outputs)
    for name, array in theirs.items():
        assert (ours[name].shape, ours[name].dtype) == (array.shape, array.dtype)
    made = {spec.name: spec for plugin in PLUGINS[op] for spec in plugin.outputs}
    for spec in last.inputs[: -1 if len(PLUGINS[op]) > 1 else 0]:
        assert spec in schema.inputs or spec == made[spec.name]


@pytest.mark.parametrize("op", LAUNCHES)
def test_scratch_that_is_an_output_is_as_big_as_the_device_ops(op: str) -> None:
    outputs = {spec.name: spec for plugin in PLUGINS[op] for spec in plugin.outputs}
    for name, scratch in dict(LAUNCHES[op].scratch or {}).items():
        if name != "counter":
            assert empty([outputs[name]])[name].nbytes == scratch.size(SIZES)
            assert not scratch.zeroed


def test_no_plugin_has_a_type_that_tensorrt_lacks() -> None:
    types = {dtype for plugin in ALL for spec in (*plugin.inputs, *plugin.outputs) for dtype in carried_as(spec)}
    assert types == {"int64", "float32", "float16", "bfloat16"}


@pytest.mark.parametrize("plugin", ALL, ids=lambda plugin: plugin.name)
def test_ptx_has_the_kernel_with_parameters_as_tensorrt_passes_them(plugin) -> None:
    pytest.importorskip("cuda.bindings")
    ptx = compile_plugin(plugin)
    (declared,) = re.findall(rf"\.visible \.entry {plugin.kernel}\((.*?)\)", ptx, re.DOTALL)
    widths = [int(bits) for bits in re.findall(r"\.param \.u(32|64)", declared)]
    assert widths == [64] * len(plugin.inputs) + [32] * len(plugin.arguments) + [64] * len(plugin.outputs)
    assert widths == [parameter.bits for parameter in parameters(plugin)]


@pytest.mark.parametrize("plugin", ALL, ids=lambda plugin: plugin.name)
def test_ptx_leaves_no_arithmetic_for_a_driver_to_contract(plugin) -> None:
    """Multiplications and additions without a rounding mode may become one operation when PTX is compiled further."""
    pytest.importorskip("cuda.bindings")
    ptx = compile_plugin(plugin)
    assert re.findall(r"\b(?:fma|mad|add|sub|mul)\.(?:ftz\.)?f(?:32|64)|\bfma\.\S+|\.ftz\b|\.approx\b", ptx) == []


def test_what_does_not_compile_is_told_with_the_compilers_words() -> None:
    pytest.importorskip("cuda.bindings")
    with pytest.raises(RuntimeError, match=r"outrider_draws_plugin does not compile for compute_1.*architecture"):
        compile_plugin(PLUGINS["Draws"][0], "compute_1")


@needs_compiler
@pytest.mark.parametrize("op", LAUNCHES)
def test_launches_are_those_of_the_device_op(stand_in: StandIn, op: str) -> None:
    plugin, schema = PLUGINS[op][0], SCHEMAS[op]
    attributes = attributes_of(plugin)
    tensors = {name: Memory(array) for name, array in empty(schema.tensors).items()}
    device = DeviceOp(op, tensors, attributes, lambda name, size, zeroed: 0)
    blocks, threads, values = device.values(*(SIZES[extent] for extent in schema.extents))
    launched = stand_in.run(plugin, empty(plugin.inputs), attributes)
    assert (launched.blocks, launched.threads) == (blocks, threads)
    numbers = dict(
        zip(device.launch.numbers, (value.value for value in values[-len(device.launch.numbers) :]), strict=True)
    )
    for name, number in numbers.items():
        assert launched.arguments[{"trees": "B"}.get(name, name)] == number, name
    for name in launched.arguments.keys() - numbers.keys():
        assert launched.arguments[name] == SIZES[name]


def test_formulas_know_products_and_quotients_rounded_up() -> None:
    a, b = Size("a"), Size("b")
    for sizes in ({"a": 1, "b": 1}, {"a": 5, "b": 3}, {"a": 64, "b": 4}):
        assert (-(-a * b // 4)).value(sizes, INTEGERS) == -(-sizes["a"] * sizes["b"] // 4)
        assert (3 * a * b).value(sizes, INTEGERS) == 3 * sizes["a"] * sizes["b"]
    for refused in (lambda: a // 2, lambda: a + b, lambda: min(a, b)):
        with pytest.raises(TypeError):
            refused()


def test_only_kv_gather_writes_where_it_reads() -> None:
    stand_in = StandIn()
    for plugin in ALL:
        inputs = list(empty(plugin.inputs).values())
        descriptors, outputs = stand_in.describe(plugin, inputs, attributes_of(plugin))
        assert [output.alias for output in outputs] == (
            [descriptors[0]] if plugin.name == "KvGather" else [None] * len(outputs)
        )


def test_a_type_that_is_not_the_plugins_is_refused() -> None:
    inputs = list(empty(PLUGINS["CoupledDraws"][0].inputs).values())
    inputs[3] = inputs[3].astype(np.float32)
    with pytest.raises(ValueError, match=r"outrider::CoupledDraws takes temperature as int64 \(the bits of float64\)"):
        StandIn().describe(PLUGINS["CoupledDraws"][0], inputs, {"depths": 2})


def test_a_rank_that_is_not_the_plugins_is_refused() -> None:
    inputs = [*empty(PLUGINS["BimMask"][0].inputs).values()]
    inputs[0] = inputs[0][0]
    with pytest.raises(ValueError, match=r"outrider::BimMask takes inputs of ranks \[2, 1"):
        StandIn().describe(PLUGINS["BimMask"][0], inputs, {})


def test_kv_gather_is_built_for_a_fixed_head_dim() -> None:
    stand_in, (plugin,) = StandIn(), PLUGINS["KvGather"]
    descriptors, outputs = stand_in.describe(plugin, list(empty(plugin.inputs).values()), {})
    descriptors[0].shape = (-1, -1, -1, -1, -1)
    with pytest.raises(ValueError, match="fixed head_dim: axis 4 of kv"):
        stand_in.implemented[plugin.id](*descriptors, outputs, 0)


def test_an_attribute_that_is_missing_is_named() -> None:
    with pytest.raises(ValueError, match="outrider::Draws is built for fixed depths, purpose; missing: depths"):
        PLUGINS["Draws"][0].plan({"purpose": 0})


def test_without_tensorrt_registering_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(ImportError, match=r"TensorRT 10\.15 or later, whose package `tensorrt` cannot be loaded"):
        register_plugins()


def test_tensorrt_accepts_every_plugin() -> None:
    """Where it is installed."""
    trtp = pytest.importorskip("tensorrt.plugin")
    register_plugins()
    assert all(hasattr(trtp.op.outrider, plugin.name) for plugin in ALL)
