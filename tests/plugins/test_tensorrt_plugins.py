"""TensorRT plugins without TensorRT: their descriptions agree with the ops, and their PTX with TensorRT's rules.

What their kernels compute is compared in test_tensorrt_kernels.py.
"""

from __future__ import annotations

import re
import sys

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
from tests.plugins.tensorrt_stand_in import StandIn, attributes_of, tensors_of

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
