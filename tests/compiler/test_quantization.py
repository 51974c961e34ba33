"""Quantised weights: rounding, and graphs that read them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from outrider.compiler.checkpoint import defer_decoder, load_decoder
from outrider.compiler.export import export_target
from outrider.compiler.inspect import weight_bytes
from outrider.compiler.lowering import lower
from outrider.compiler.models.decoder import Decoder
from outrider.compiler.models.eager import sequence_logits
from outrider.compiler.probes.choice import probed_ops
from outrider.compiler.quantization.calibration import calibrate
from outrider.compiler.quantization.form import QuantizedWeight, WeightSource
from outrider.compiler.quantization.graph import quantize
from outrider.compiler.quantization.rounding import round_to_nearest
from outrider.compiler.quantization.weight_form import WeightForm
from outrider.plans.errors import CheckpointError
from outrider.plans.manifest import RuleReport
from outrider.plugins.onnx_ops import DOMAIN
from outrider.plugins.reference import dequantize
from outrider.plugins.schema import CPU_DOMAIN
from outrider.tools.verify.quantized import PlanWeights
from tests.compiler.steps import run_engine, write_engine

CPU = "onnxruntime-cpu"
CAPACITY, TOKENS = 32, [5, 17, 200, 31, 31, 8, 90]


def numbers(weight: QuantizedWeight) -> NDArray[np.float32]:
    return dequantize(weight.integers, weight.scales, weight.minimums)


@given(seed=st.integers(0, 2**32 - 1), bits=st.sampled_from([4, 8]), size=st.sampled_from([1e-9, 1e-3, 1.0, 1e4, 1e7]))
def test_every_number_goes_to_the_nearest_step(seed: int, bits: int, size: float) -> None:
    rng = np.random.default_rng(seed)
    weight = (rng.normal(size=(6, 96)) * size).astype(np.float32)
    weight[1, 32:64] = 0
    made = round_to_nearest(weight, bits)
    low, high = (-8, 7) if bits == 4 else (-127, 127)
    assert made.integers.dtype == np.int8
    assert low <= made.integers.min() <= made.integers.max() <= high
    if size < 1e7:  # scales are stored as float16, unless one is too large
        assert np.array_equal(made.scales, made.scales.astype(np.float16).astype(np.float32))
    assert not made.scales[1, 1]
    assert not made.integers[1, 32:64].any()
    scales = made.scales[:, :, None].astype(np.float64)
    ends = np.sort(np.stack([low * scales, high * scales]), axis=0)
    within = np.clip(weight.reshape(6, 3, 32).astype(np.float64), ends[0], ends[1])
    off = np.abs(numbers(made).reshape(6, 3, 32) - within)
    assert (off <= np.abs(scales) * (0.5 + 1e-4)).all()  # half a step, and float32's rounding of some hundred steps


def test_scales_of_a_checkpoint_are_not_rounded() -> None:
    """A graph of fewer bits that cannot hold them is refused by the tensor's name; our own are made to fit."""
    scales = np.full((1, 1), 1 + 2.0**-10, np.float32)  # a number of float16, none of bfloat16
    made = QuantizedWeight(4, np.ones((1, 32), np.int8), scales)

    def tensors(origin: str, dtype: ir.DataType) -> list[ir.TensorProtocol]:
        source = WeightSource(4, (1, 32), False, lambda: made, origin=origin)
        return [ir.tensor(tensor.numpy(), dtype=tensor.dtype) for tensor in source.tensors(dtype)]

    assert len(tensors("a file: tensor 'q'", ir.DataType.FLOAT16)) == 2
    assert len(tensors("", ir.DataType.BFLOAT16)) == 2
    with pytest.raises(CheckpointError, match="a file: tensor 'q' has scales that bfloat16 does not hold exactly"):
        tensors("a file: tensor 'q'", ir.DataType.BFLOAT16)


# An odd number of zero points of 4 bits leaves half a byte.
@pytest.mark.parametrize(("bits", "blocks", "lookup"), [(4, 3, False), (4, 2, True), (8, 3, True), (8, 2, False)])
def test_zero_points_are_found_in_minimums(bits: int, blocks: int, lookup: bool) -> None:
    rng = np.random.default_rng(bits)
    scales = rng.normal(size=(6, blocks)).astype(np.float32)
    zeros = rng.integers(0, 1 << bits, scales.shape)
    integers = rng.integers(0, 1 << bits, (6, blocks * 32)).astype(np.uint8)
    made = QuantizedWeight(bits, integers, scales, -zeros.astype(np.float32) * scales)
    model = lowered_product(made, lookup)
    assert {node.domain for node in model.graph.node} == {"com.microsoft"}
    assert_product(model, made, lookup, rtol=1e-4)


def test_minimums_between_steps_keep_the_body() -> None:
    made = QuantizedWeight(
        4, np.zeros((4, 32), np.uint8), np.ones((4, 1), np.float32), np.full((4, 1), -0.5, np.float32)
    )
    assert {node.op_type for node in lowered_product(made, lookup=False).graph.node} == {"AsymmetricQuantMatMul"}


@pytest.mark.parametrize(
    ("backend", "lookup", "minimums"),
    [("tensorrt", False, True), ("tensorrt", True, False), ("tensorrt-rtx", False, False)],
)
def test_a_drafters_weights_are_numbers_on_tensorrt_and_a_targets_stay_integers(
    backend: str, lookup: bool, minimums: bool
) -> None:
    rng = np.random.default_rng(8)
    scales, integers = rng.normal(size=(6, 2)).astype(np.float32), rng.integers(0, 100, (6, 64))
    signs = integers.astype(np.uint8 if minimums else np.int8)
    made = QuantizedWeight(8, signs, scales, scales * 3 if minimums else None)
    model = lowered_product(made, lookup, backend, "head")
    assert {node.op_type for node in model.graph.node} == {"Gather" if lookup else "MatMul"}
    assert len(model.graph.initializer) == 1
    assert_product(model, made, lookup)
    kept = {node.domain for node in lowered_product(made, lookup, backend, "target").graph.node}
    assert kept == {DOMAIN}


def assert_product(model: onnx.ModelProto, made: QuantizedWeight, lookup: bool, rtol: float = 1e-5) -> None:
    rng, (rows, columns) = np.random.default_rng(9), made.integers.shape
    x = rng.integers(0, rows, (1, 4)) if lookup else rng.normal(size=(1, 4, columns)).astype(np.float32)
    (found,) = ort.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    np.testing.assert_allclose(found, numbers(made)[x] if lookup else x @ numbers(made).T, rtol=rtol, atol=1e-4)


def lowered_product(
    made: QuantizedWeight, lookup: bool, backend: str = "onnxruntime-cuda", engine: str = "target"
) -> onnx.ModelProto:
    source = WeightSource(made.bits, made.integers.shape, made.minimums is not None, lambda: made)  # type: ignore[arg-type]
    parts = [
        ir.Value(name=f"w.{t.part}", shape=t.shape, type=ir.TensorType(t.dtype), const_value=t)
        for t in source.tensors(ir.DataType.FLOAT)
    ]
    kind, shape = (ir.DataType.INT64, [1, "N"]) if lookup else (ir.DataType.FLOAT, [1, "N", made.integers.shape[1]])
    x = ir.Value(name="x", shape=ir.Shape(shape), type=ir.TensorType(kind))
    op = "AsymmetricQuantGather" if lookup else "AsymmetricQuantMatMul"
    node = ir.node(op, [x, *parts], domain=DOMAIN)
    out = node.outputs[0]
    out.name, out.type, out.shape = "out", ir.TensorType(ir.DataType.FLOAT), ir.Shape([1, "N", "M"])
    graph = ir.Graph([x], [out], nodes=[node], initializers=parts, opset_imports={"": 24, DOMAIN: 1}, name="one")
    model = ir.Model(graph, ir_version=11)
    lower(engine, model, backend, 1)
    return ir.to_proto(model)


# A whole model.


@pytest.fixture
def decoder(toy_recipe: Path) -> Decoder:
    return load_decoder(toy_recipe.parent / "target", "float32", None)


def engine(decoder: Decoder, folder: Path, form: WeightForm, target: str = CPU) -> tuple[Path, dict[str, RuleReport]]:
    graph = export_target(decoder, CAPACITY)
    reports = [quantize("target", graph, form), *lower("target", graph, target, 1)]
    write_engine(graph, folder)
    return folder / "target.onnx", {report.rule: report for report in reports}


def logits(path: Path, decoder: Decoder) -> NDArray[Any]:
    c, n = decoder.config, len(TOKENS)
    hidden = np.triu(np.ones((n, n), bool), 1)
    bias = np.where(hidden, np.finfo(np.float32).min, np.float32(0))[None, None]
    inputs: dict[str, Any] = {
        "row_splits": np.array([0, n]),
        "token_ids": np.array(TOKENS), "positions": np.arange(n), "attn_bias": bias,
        "past_length": np.zeros(1, np.int64), "logit_indices": np.arange(n),
    }  # fmt: skip
    for layer in range(c.num_layers):
        for kind in "kv":
            inputs[f"{kind}_cache.{layer}"] = np.zeros((1, c.num_kv_heads, CAPACITY, c.head_dim), np.float32)
    return run_engine(path, inputs)["logits"]


@pytest.mark.parametrize("bits", [4, 8])
def test_weight_only_logits_are_those_of_the_rounded_weights(decoder: Decoder, tmp_path: Path, bits: int) -> None:
    """Weight-only operators round no activations, so that PyTorch with rounded weights is the same model."""
    form = WeightForm(bits, 8)
    path, reports = engine(decoder, tmp_path / "one", form, "onnxruntime-cuda")
    assert reports["Quantize"].applied == 3 * 7 + 1
    # q, k and v are one product; the tied embedding is looked up in as well
    assert reports["BlockQuantized"].applied == 3 * 5 + 2
    packed = weight_bytes(onnx.load(path, load_external_data=False).graph)
    assert {"int4", "int8"} & set(packed) == {f"int{bits}", "int8"}
    assert not reports["BlockQuantized"].declined
    PlanWeights(form).give(decoder)
    wanted = sequence_logits(decoder, TOKENS).numpy()
    np.testing.assert_allclose(logits(path, decoder), wanted, atol=2e-4)


def test_a_bodys_logits_are_those_of_searched_weights(toy_recipe: Path, tmp_path: Path) -> None:
    """The graph has the integers and the folded norms; both oracles get the same numbers."""
    form, checkpoint = WeightForm(4, 4), toy_recipe.parent / "target"
    found = defer_decoder(checkpoint)
    weights = PlanWeights(form, searched=calibrate(found, [[(37 * i) % 299 + 1 for i in range(90)]], form))
    path, reports = engine(found, tmp_path / "one", form, "onnxruntime-cuda")
    assert reports["Quantize"].applied == 3 * 7 + 1
    decoder, theirs = load_decoder(checkpoint), AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    plain = sequence_logits(decoder, TOKENS)
    weights.give(decoder)
    weights.give(theirs)
    wanted = sequence_logits(decoder, TOKENS)
    assert (wanted - plain).abs().max() > 0.1
    np.testing.assert_allclose(logits(path, decoder), wanted.numpy(), atol=2e-4)
    with torch.no_grad():
        torch.testing.assert_close(theirs(torch.tensor([TOKENS])).logits[0], wanted, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(("bits", "head"), [(4, 8), (8, 8), (4, 4), (8, None)])
def test_the_cpus_logits_differ_by_the_rounding_of_activations(
    decoder: Decoder, tmp_path: Path, bits: int, head: int | None
) -> None:
    form = WeightForm(bits, head)
    path, reports = engine(decoder, tmp_path / "one", form)
    assert reports["Quantize"].applied == 3 * 7 + (head is not None)
    assert reports["PackQuantized"].applied == 3 * 4 + (head is not None)
    if head:  # the tied embedding is stored once
        graph = onnx.load(path, load_external_data=False).graph
        (lookup,) = (node for node in graph.node if node.op_type == "QuantGather")
        product = [node for node in graph.node if node.op_type == "QuantMatMul" and node.input[1] == lookup.input[1]]
        assert [node.domain for node in (lookup, *product)] == [CPU_DOMAIN] * 2
    PlanWeights(form).give(decoder)
    wanted = sequence_logits(decoder, TOKENS).numpy()
    own = np.abs(logits(path, decoder) - wanted).max() / wanted.std()
    assert own < 0.4  # random weights amplify: it is 0.08 to 0.2, and another product's weights give 4 and more


def test_units_with_biases_are_our_own_as_well(decoder: Decoder, tmp_path: Path) -> None:
    """What computes in floats after quantised products has one order of sums: nothing is left to ONNX Runtime."""
    torch.manual_seed(1)
    biased = Decoder(replace(decoder.config, mlp_bias=True, qkv_bias=True)).eval()
    for parameter in biased.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    path, reports = engine(biased, tmp_path / "one", WeightForm(8, 8))
    assert reports["GatedUnitOfProduct"].applied == 3
    graph = ir.load(path).graph
    ours = {op.node.op_type for op in probed_ops({"target": ir.load(path)})}
    assert ours == {"QuantMatMul", "BranchAttention", "RmsNorm", "GatedUnit"}
    assert sum(node.op_type == "GatedUnit" for node in graph) == 3
    PlanWeights(WeightForm(8, 8)).give(biased)
    wanted = sequence_logits(biased, TOKENS).numpy()
    assert np.abs(logits(path, biased) - wanted).max() < 0.1 * wanted.std()
