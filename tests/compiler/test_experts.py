"""Experts of a layer: the module, its graph, its weights quantised, and its tensors in a checkpoint, one for each
expert, or those of a layer together as floats or in MXFP4."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from outrider.compiler import fused_tensors
from outrider.compiler.checkpoint import defer_decoder, load_decoder
from outrider.compiler.deferred import StackedTensor, deferred
from outrider.compiler.export import export_target
from outrider.compiler.export.tracing import name_inputs, trace
from outrider.compiler.fused_tensors import from_mxfp4
from outrider.compiler.lowering import lower
from outrider.compiler.models.config import WeightType
from outrider.compiler.models.eager import sequence_logits
from outrider.compiler.models.experts import Experts
from outrider.compiler.models.experts_config import ClampedUnit, ExpertsConfig
from outrider.compiler.opening import stores_integers
from outrider.compiler.quantization.graph import quantize
from outrider.compiler.quantization.rounding import round_to_nearest
from outrider.compiler.quantization.weight_form import WeightForm
from outrider.plugins.ops.mixture_of_experts import Expert, mixture_of_experts
from outrider.plugins.ops.route import route
from outrider.plugins.reference import clamped_unit, gated_unit, quant_matmul
from tests.conftest import call_before
from tests.cpu_session import cpu_session

from .conftest import MakeCheckpoint
from .formats.packed import SETTINGS, mxfp4_parts, pack_experts, rounded
from .test_checkpoint import refused

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


@pytest.fixture
def separate(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> Path:
    """A checkpoint that stores each expert by itself."""
    sizes = {"moe_intermediate_size": 32, "num_experts": 6, "num_experts_per_tok": 2}
    make_checkpoint("qwen3_moe", head_dim=16, **sizes)
    return tmp_path


def test_tensors_of_experts_are_stacked(separate: Path) -> None:
    loaded, stored = load_decoder(separate).state_dict(), deferred(defer_decoder(separate))
    products = {f"layers.{i}.experts.{each}" for i in (0, 1) for each in ("gate", "up", "down")}
    assert {name for name, each in stored.items() if isinstance(each, StackedTensor)} == products
    assert all(torch.equal(each.read(), loaded[name]) for name, each in stored.items())


def test_what_is_missing_or_too_much_is_named(separate: Path) -> None:
    expert = "model.layers.1.mlp.experts.{}.up_proj.weight"
    wrong(separate, {expert.format(3): None}, f"'{expert.format(3)}' is missing", "[32, 32]")
    wrong(separate, {expert.format(6): torch.zeros(32, 32)}, f"'{expert.format(6)}' is unexpected")


FILE = "model.safetensors"
EXPERTS = "model.layers.1.mlp.experts"
UP, DOWN = f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"
SIZES = {
    "head_dim": 16, "intermediate_size": 64, "sliding_window": 20, "num_local_experts": 5, "num_experts_per_tok": 4,
    "dtype": torch.bfloat16,
}  # fmt: skip


@pytest.fixture
def floats(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> Path:
    make_checkpoint("gpt_oss", **SIZES)
    tensors = load_file(tmp_path / FILE)
    for name in tensors:
        if name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = rounded(tensors[name].transpose(1, 2)).transpose(1, 2).bfloat16().contiguous()
    save_file(tensors, tmp_path / FILE)
    return tmp_path


@pytest.fixture
def mxfp4(floats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model as it is published."""
    folder = tmp_path_factory.mktemp("mxfp4")
    shutil.copytree(floats, folder, dirs_exist_ok=True)
    pack_experts(folder)
    return folder


def test_every_byte_is_what_transformers_makes_of_it() -> None:
    scales = torch.arange(100, 116, dtype=torch.uint8).repeat(2, 1)
    blocks = torch.arange(2 * 16 * 16).remainder(256).to(torch.uint8).view(2, 16, 16)
    theirs = convert_moe_packed_tensors(blocks[None], scales[None], dtype=torch.float32)[0].T
    assert torch.equal(from_mxfp4(blocks, scales), theirs)
    numbers = rounded(torch.randn(8, 96, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(from_mxfp4(*mxfp4_parts(numbers)), numbers)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mxfp4_is_the_same_model_as_its_floats(floats: Path, mxfp4: Path, dtype: WeightType) -> None:
    wanted, found = (load_decoder(path, dtype).state_dict() for path in (floats, mxfp4))
    assert wanted.keys() == found.keys()
    assert all(torch.equal(found[name], values) for name, values in wanted.items())
    stored = load_file(floats / FILE)
    assert torch.equal(found["layers.1.experts.up"], stored[UP][..., 1::2].to(found["embedding"].dtype))
    assert not stores_integers(mxfp4)


def test_experts_are_read_late_and_one_at_a_time(mxfp4: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[int, ...]] = []
    call_before(monkeypatch, fused_tensors, "from_mxfp4", lambda blocks, _: read.append(tuple(blocks.shape)))
    wanted, unread = load_decoder(mxfp4).state_dict(), deferred(defer_decoder(mxfp4))
    products = {name for name, each in unread.items() if isinstance(each, StackedTensor) and "bias" not in name}
    assert products == {f"layers.{i}.experts.{each}" for i in (0, 1) for each in ("gate", "up", "down")}
    read.clear()
    for name, each in unread.items():
        assert torch.equal(each.read(), wanted[name])
    assert set(read) == {(64, 1, 16), (32, 2, 16)}
    assert len(read) == 2 * 5 * 3


def test_transformers_reads_the_same_from_mxfp4(mxfp4: Path) -> None:
    same_as_transformers(mxfp4, list(range(1, 60)), quantization_config=Mxfp4Config(dequantize=True))


@pytest.mark.parametrize("form", [None, WeightForm(4, 8)])
def test_graphs_have_the_same_weights(floats: Path, mxfp4: Path, form: WeightForm | None) -> None:
    found = []
    for path in (floats, mxfp4):
        graph = export_target(defer_decoder(path), 32)
        quantize("target", graph, form)
        found.append({name: value.const_value for name, value in graph.graph.initializers.items()})
    assert found[0].keys() == found[1].keys()
    for name, values in found[0].items():
        assert values is not None
        np.testing.assert_array_equal(values.numpy(), found[1][name].numpy())  # type: ignore[union-attr]


def test_absent_keys_stand_for_what_transformers_has(floats: Path) -> None:
    config = floats / "config.json"
    absent = {"rope_parameters", "layer_types", "sliding_window", "attention_bias", "swiglu_alpha", "swiglu_limit"}
    config.write_text(
        json.dumps({key: value for key, value in json.loads(config.read_text()).items() if key not in absent})
    )
    same_as_transformers(floats, [each % 97 for each in range(180)])


def same_as_transformers(folder: Path, ids: list[int], **how: object) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **how).eval()
    with torch.no_grad():
        wanted = theirs(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(sequence_logits(load_decoder(folder), ids), wanted, rtol=0, atol=1e-4)


def wrong(path: Path, changes: dict[str, Tensor | None], *said: str, dtype: WeightType = "float32") -> None:
    """Loading fails with a sentence that holds every part, where tensors are replaced, or removed."""
    whole = load_file(path / FILE)
    save_file({name: tensor for name, tensor in (whole | changes).items() if tensor is not None}, path / FILE)
    refused(path, *said, dtype=dtype)
    save_file(whole, path / FILE)


def test_tensors_of_experts_are_named(floats: Path) -> None:
    whole = load_file(floats / FILE)
    wrong(floats, {UP: None}, f"'{UP}[0].gate'", "is missing", "gpt_oss")
    turned = f"{floats / FILE}: tensor '{UP}' has shape [5, 128, 32]"
    wrong(floats, {UP: whole[UP].transpose(1, 2).contiguous()}, turned, "asks for [5, 32, 128]")
    few = whole[f"{DOWN}_bias"][:4].contiguous()
    wrong(floats, {f"{DOWN}_bias": few}, f"tensor '{DOWN}_bias' has shape [4, 32]", "asks for [5, 32]")
    odd = whole[DOWN].clone().index_fill_(0, torch.tensor([3]), float("nan"))
    wrong(floats, {DOWN: odd}, f"tensor '{DOWN}[3].down' holds values that are not finite")
    sinks = "model.layers.1.self_attn.sinks"
    wrong(floats, {sinks: None}, f"'{sinks}' is missing")


def test_tensors_of_mxfp4_are_named(mxfp4: Path) -> None:
    whole, blocks, scales = load_file(mxfp4 / FILE), f"{UP}_blocks", f"{UP}_scales"
    wrong(mxfp4, {scales: None}, f"tensor '{scales}' is missing beside '{blocks}'")
    wrong(mxfp4, {blocks: None}, f"tensor '{blocks}' is missing beside '{scales}'")
    half = whole[blocks][:, :64].contiguous()
    wrong(mxfp4, {blocks: half}, f"tensor '{blocks}' has shape [5, 64, 1, 16]", "asks for [5, 128, 1, 16]")
    wrong(mxfp4, {scales: whole[scales].float()}, f"tensor '{scales}' is stored as F32", "bytes (U8)")
    wrong(mxfp4, {UP: torch.zeros(5, 32, 128)}, f"'{blocks}' stands beside '{UP}'")
    for scale, dtype in ((255, "float32"), (147, "float16")):
        said = f"'{UP}[0].gate' holds values that are not finite in {dtype}"
        wrong(mxfp4, {scales: torch.full_like(whole[scales], scale)}, said, dtype=dtype)  # type: ignore[arg-type]


def test_no_other_model_is_read_in_mxfp4(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    make_checkpoint("qwen3")
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": SETTINGS}))
    refused(tmp_path, "MXFP4 checkpoint (quantization_config), which is not read")
