"""Experts of a layer: the module, its graph, its weights quantised, and its tensors in a checkpoint."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from outrider.compiler.deferred import StackedTensor, defer, deferred, rebind
from outrider.compiler.export.tracing import name_inputs, trace
from outrider.compiler.lowering import lower
from outrider.compiler.models.experts import Experts
from outrider.compiler.models.experts_config import ClampedUnit, ExpertsConfig
from outrider.compiler.quantization.graph import quantize
from outrider.compiler.quantization.rounding import round_to_nearest
from outrider.compiler.quantization.weight_form import WeightForm
from outrider.compiler.slots import EXPERT, check_tensors, fill, slots
from outrider.compiler.tensor_source import Stored
from outrider.compiler.weights import Weights
from outrider.plans.errors import CheckpointError
from outrider.plugins.reference import Expert, clamped_unit, gated_unit, mixture_of_experts, quant_matmul, route
from tests.cpu_session import cpu_session

HIDDEN, CPU = 64, "onnxruntime-cpu"
PLAIN = ExpertsConfig(count=6, top_k=2, size=32, normalise=True)
CONFIGS = {
    "normalised": PLAIN,
    "not normalised": ExpertsConfig(count=6, top_k=3, size=96, normalise=False),
    "clamped": ExpertsConfig(count=5, top_k=2, size=64, normalise=True, clamped=ClampedUnit(1.702, 7.0)),
    "odd": ExpertsConfig(count=3, top_k=2, size=20, normalise=True),
}


def experts(config: ExpertsConfig = PLAIN, seed: int = 0) -> Experts:
    torch.manual_seed(seed)
    made = Experts(config, HIDDEN)
    for name, parameter in made.named_parameters():
        nn.init.normal_(parameter, std=1.0 if "bias" in name else 0.2)
    return made.requires_grad_(False).eval()


def tokens(count: int = 50) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(1)) * 2


def graph_of(module: Experts) -> ir.Model:
    model = trace(
        module,
        inputs={"x": torch.zeros(1, 3, HIDDEN)},
        dynamic={"x": {1: torch.export.Dim.DYNAMIC}},
        outputs={"y": (1, "N", HIDDEN)},
    )
    name_inputs(model, {"x": (1, "N", HIDDEN)})
    return model


def run(model: ir.Model, x: Tensor, folder: Path) -> np.ndarray:
    ir.save(model, folder / "experts.onnx")
    (found,) = cpu_session(folder / "experts.onnx").run(None, {"x": x[None].numpy()})
    return found[0]


@pytest.mark.parametrize("target", [CPU, "tensorrt-rtx"])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_graph_computes_what_the_module_does(name, target, tmp_path: Path) -> None:
    module = experts(CONFIGS[name])
    model = graph_of(module)
    lower("target", model, target, 1)
    kinds = {node.op_type for node in model.graph}
    assert len(kinds) == len(list(model.graph)) == 2
    assert (kinds == {"Route", "MixtureOfExperts"}) == (target == CPU or module.config.clamped is None)
    torch.testing.assert_close(torch.from_numpy(run(model, tokens(), tmp_path)), module(tokens()), rtol=1e-4, atol=1e-4)


def test_experts_of_odd_sizes_are_not_quantised() -> None:
    report = quantize("target", graph_of(experts(CONFIGS["odd"])), WeightForm(4, None))
    assert report.declined == {"sizes of experts are no multiples of 32": 3}


@pytest.mark.parametrize(("name", "bits"), [("normalised", 8), ("not normalised", 4), ("clamped", 4), ("clamped", 8)])
def test_quantised_experts_are_the_references(name, bits, tmp_path: Path) -> None:
    """Each expert's matrices are rounded on their own, and the router is not."""
    c, module = CONFIGS[name], experts(CONFIGS[name])
    model = graph_of(module)
    report = quantize("target", model, WeightForm(bits, None))
    assert (report.applied, report.declined) == (3, {})
    lower("target", model, CPU, 1)
    assert [node.op_type for node in model.graph] == ["Route", "QuantMixtureOfExperts"]
    x = tokens().numpy()
    own = {name: parameter.numpy() for name, parameter in module.named_parameters()}

    def product(which: str, e: int, rows: np.ndarray) -> np.ndarray:
        weight = round_to_nearest(np.ascontiguousarray(own[which][e].T), bits)
        found = quant_matmul(rows, weight.integers, weight.scales)
        return found if c.clamped is None else found + own[f"{which}_bias"][e]

    weights = route(x, own["router"], own.get("router_bias"), top_k=c.top_k, normalise=c.normalise)
    each = [Expert(*(partial(product, which, e) for which in ("gate", "up", "down"))) for e in range(c.count)]
    unit = gated_unit if c.clamped is None else partial(clamped_unit, alpha=c.clamped.alpha, limit=c.clamped.limit)
    np.testing.assert_array_equal(run(model, tokens(), tmp_path), mixture_of_experts(x, weights, each, unit))


@pytest.mark.parametrize(("name", "bits"), [("normalised", 4), ("clamped", 8)])
def test_the_body_has_the_same_quantised_weights(name, bits, tmp_path: Path) -> None:
    model = graph_of(experts(CONFIGS[name]))
    quantize("target", model, WeightForm(bits, None))
    packed = model.clone()
    lower("target", packed, CPU, 1)
    lower("target", model, "tensorrt-rtx", 1)
    found, wanted = (run(each, tokens(), tmp_path) for each in (model, packed))
    assert np.abs(found - wanted).max() < 0.02 * np.abs(wanted).max()  # the kernel quantises tokens too


@pytest.mark.parametrize("name", ["normalised", "clamped"])
def test_a_drafters_experts_are_floats_for_tensorrt(name, tmp_path: Path) -> None:
    model = graph_of(experts(CONFIGS[name]))
    quantize("draft", model, WeightForm(4, None))
    whole = model.clone()
    lower("draft", model, "tensorrt-rtx", 1)
    lower("target", whole, "tensorrt-rtx", 1)
    assert not any("Quant" in node.op_type for node in model.graph)
    assert any("Quant" in node.op_type for node in whole.graph)
    found, wanted = (run(each, tokens(), tmp_path) for each in (model, whole))
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-3)


def stored_name(parameter: str) -> str:
    if parameter == "router":
        return "mlp.gate.weight"
    return f"mlp.experts.{EXPERT}.{parameter}_proj.weight"


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[Experts, Path]:
    module = experts()
    tensors = {"mlp.gate.weight": module.router.T.contiguous()}
    for e in range(PLAIN.count):
        for name in ("gate", "up", "down"):
            tensors[f"mlp.experts.{e}.{name}_proj.weight"] = getattr(module, name)[e].T.contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    return module, tmp_path


def test_tensors_of_experts_are_stacked(checkpoint) -> None:
    module, folder = checkpoint
    weights, wanted = Weights(folder), slots(module, stored_name)
    check_tensors(weights, folder, folder, "experts", wanted)
    for name, values in fill(weights, wanted, "float32").items():
        assert torch.equal(values, getattr(module, name)), name
    with torch.device("meta"):
        unread = Experts(PLAIN, HIDDEN)
    defer(unread, weights, wanted, "float32")
    stored = deferred(unread)
    assert {name for name, each in stored.items() if isinstance(each, StackedTensor)} == {"gate", "up", "down"}
    assert all(torch.equal(each.read(), getattr(module, name)) for name, each in stored.items())
    rebind(unread, weights)


def test_what_is_missing_or_too_much_is_named(checkpoint) -> None:
    module, folder = checkpoint
    weights, wanted = Weights(folder), slots(module, stored_name)
    held = dict(weights.found)
    weights.found = {name: each for name, each in held.items() if name != "mlp.experts.3.up_proj.weight"}
    with pytest.raises(CheckpointError, match=r"'mlp.experts.3.up_proj.weight' is missing.*\[32, 64\]"):
        check_tensors(weights, folder, folder, "experts", wanted)
    weights.found = held | {"mlp.experts.6.up_proj.weight": held["mlp.experts.0.up_proj.weight"]}
    with pytest.raises(CheckpointError, match=r"'mlp.experts.6.up_proj.weight' is unexpected"):
        check_tensors(weights, folder, folder, "experts", wanted)
    packed = Stored(folder, (32, 64), "GPTQ int4", packed=True)
    weights.found = held | {"mlp.experts.2.gate_proj.weight": packed}
    with pytest.raises(
        CheckpointError, match=r"'mlp.experts.2.gate_proj.weight' .*GPTQ int4, and experts are not read"
    ):
        check_tensors(weights, folder, folder, "experts", wanted)
