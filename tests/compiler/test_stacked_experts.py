"""Experts of a checkpoint that stores those of a layer together: as floats, and in MXFP4."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from outrider.compiler.checkpoint import defer_decoder, load_decoder
from outrider.compiler.deferred import StackedTensor, deferred
from outrider.compiler.export import export_target
from outrider.compiler.fused_tensors import from_mxfp4
from outrider.compiler.models.config import WeightType
from outrider.compiler.models.eager import sequence_logits
from outrider.compiler.opening import stores_integers
from outrider.compiler.quantization.graph import quantize
from outrider.compiler.quantization.weight_form import WeightForm
from outrider.plans.errors import CheckpointError

from .conftest import MakeCheckpoint
from .formats.mxfp4 import SETTINGS, pack_experts, packed, rounded

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


def refused(path: Path, *parts: str, dtype: WeightType = "float32") -> None:
    with pytest.raises(CheckpointError) as error:
        load_decoder(path, dtype)
    for part in parts:
        assert part in str(error.value)


def test_every_byte_is_what_transformers_makes_of_it() -> None:
    scales = torch.arange(100, 116, dtype=torch.uint8).repeat(2, 1)
    blocks = torch.arange(2 * 16 * 16).remainder(256).to(torch.uint8).view(2, 16, 16)
    theirs = convert_moe_packed_tensors(blocks[None], scales[None], dtype=torch.float32)[0].T
    assert torch.equal(from_mxfp4(blocks, scales), theirs)
    numbers = rounded(torch.randn(8, 96, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(from_mxfp4(*packed(numbers)), numbers)


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

    def noted(blocks: Tensor, scales: Tensor) -> Tensor:
        read.append(tuple(blocks.shape))
        return from_mxfp4(blocks, scales)

    monkeypatch.setattr("outrider.compiler.fused_tensors.from_mxfp4", noted)
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
