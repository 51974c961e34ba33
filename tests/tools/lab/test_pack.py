"""Heads written with few bits: what the files hold, by the package that made the format, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from outrider.compiler.block_checkpoint import stored_block_name
from outrider.compiler.models.block import BlockHead
from outrider.compiler.models.block_config import Markov
from outrider.compiler.models.eagle3 import Eagle3Head
from outrider.compiler.slots import slots
from outrider.plugins.quant_layout import fits_half
from outrider.tools.lab.reference import export, pack
from outrider.tools.lab.reference.compressed import FLOAT, compress
from outrider.tools.lab.reference.dspark import BlockGeometry
from outrider.tools.lab.reference.eagle3 import HeadGeometry
from outrider.tools.lab.reference.export import check_size, write_block, write_eagle3
from tests.compiler.block_heads import load_block
from tests.compiler.eagle3_heads import WIDE, load_eagle3, target_config
from tests.compiler.eagle3_heads import write_eagle3 as write_random_eagle3

TARGET = target_config(hidden=32)
Captured = pytest.CaptureFixture[str]


def random_eagle3() -> Eagle3Head:
    """All projections have a multiple of 32 inputs."""
    torch.manual_seed(0)
    geometry = HeadGeometry(hidden=64, intermediate=96, heads=2, kv_heads=1, head_dim=32, draft_vocab=50)
    head = Eagle3Head(geometry.config(TARGET))
    for parameter in head.parameters():
        nn.init.normal_(parameter)
    head.target_ids.copy_(torch.arange(50))
    return head


def random_block(rank: int = 32) -> BlockHead:
    torch.manual_seed(1)
    geometry = BlockGeometry(layers=2, intermediate=64, heads=2, kv_heads=1, head_dim=16, block_size=4)
    config = replace(geometry.config(TARGET, mask_token_id=3), markov=Markov("vanilla", rank))
    head = BlockHead(config)
    for parameter in head.parameters():
        nn.init.normal_(parameter)
    head.target_ids.copy_(torch.arange(TARGET.vocab_size))
    return head


def decoded(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder by the package compressed-tensors, in float32."""
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    (scheme,) = QuantizationConfig.model_validate(settings).config_groups.values()
    tensors = load_file(folder / "model.safetensors")
    found = {name: tensor for name, tensor in tensors.items() if not name.rpartition(".")[2].startswith("weight_")}
    for name in tensors:
        if name.endswith(".weight_packed"):
            module = name.removesuffix(".weight_packed")
            parts = {last: tensors[f"{module}.{last}"] for last in ("weight_packed", "weight_scale", "weight_shape")}
            assert parts["weight_scale"].dtype == torch.bfloat16
            wide = {last: part.float() if part.is_floating_point() else part for last, part in parts.items()}
            found[f"{module}.weight"] = PackedQuantizationCompressor.decompress(wide, scheme)["weight"]
    return found


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_a_written_head_is_read_as_its_format_says_and_rounded_to_the_nearest_step(
    kind: str, bits: int, tmp_path: Path
) -> None:
    head: Eagle3Head | BlockHead
    if kind == "eagle3":
        head = random_eagle3()
        write_eagle3(head, 256, tmp_path, bits)
        names = {slot.parameter: name for name, slot in slots(head, lambda p: export._HEAD_NAMES.get(p, p)).items()}
        again: Eagle3Head | BlockHead = load_eagle3(tmp_path, TARGET)
    else:
        head = random_block()
        write_block(head, TARGET, tmp_path, bits)
        names = {slot.parameter: name for name, slot in slots(head, stored_block_name).items()}
        again = load_block(tmp_path, TARGET)
    theirs, read = decoded(tmp_path), dict(again.named_parameters())
    packed = 0
    for name, parameter in head.named_parameters():
        table = name.rpartition(".")[2] == "embedding"
        stored = theirs[names[name]].float()
        lies = table or parameter.ndim != 2  # as the file has it; projections lie the other way round
        assert torch.equal(read[name], stored if lies else stored.T), name
        before = parameter.detach() if lies else parameter.detach().T
        if parameter.ndim != 2 or (table and bits == 4):
            assert torch.equal(stored, before.bfloat16().float()), name
            continue
        packed += 1
        groups, off = before.reshape(len(before), -1, 32), (stored - before).reshape(len(before), -1, 32)
        # Half a step, and what bfloat16 rounds of a scale. With 4 bits the largest may be a whole step off: no +8.
        share = 0.505 / 127 if bits == 8 else 1.05 / 8
        assert (off.abs() <= share * groups.abs().amax(2, keepdim=True)).all(), name
    assert packed == (9 if kind == "eagle3" else 1 + 2 * 7 + 2) + (bits == 8)
    if isinstance(again, Eagle3Head):  # which is written again as it was
        write_eagle3(again, 256, tmp_path / "again", bits)
        assert (tmp_path / "again/model.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()
    text = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert (text["quant_method"], text["format"], text["ignore"]) == ("compressed-tensors", "pack-quantized", [])
    assert text["config_groups"]["group_0"]["targets"] == ["Linear", "Embedding"][: 1 + (bits == 8)]


def test_float16_holds_every_scale() -> None:
    """Also of numbers so small that bfloat16 has more exponents for them: a plan keeps two bytes for each."""
    weight = torch.randn(40, 256, generator=torch.Generator().manual_seed(0))
    made = compress({"fc.weight": weight * torch.logspace(-9, 3, 40)[:, None]}, 8)
    scales = made.tensors["fc.weight_scale"].float().numpy()
    assert fits_half(scales)
    assert (scales == 0).any()


@pytest.mark.parametrize("bits", [4, 8, FLOAT])
def test_the_size_that_is_foretold_is_that_of_the_tensors(bits: int, tmp_path: Path, capsys: Captured) -> None:
    for head in (random_eagle3(), random_block()):
        folder = tmp_path / type(head).__name__ / "head"
        if isinstance(head, Eagle3Head):
            write_eagle3(head, 256, folder, bits)
        else:
            write_block(head, TARGET, folder, bits)
        size = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
        check_size(head, folder, bits)
        assert f"head: {size / 1e6:.2f} MB of weights" in capsys.readouterr().out
        packed = [name for name in load_file(folder / "model.safetensors") if "packed" in name]
        settings = json.loads((folder / "config.json").read_text()).keys()
        assert bool(packed) == ("quantization_config" in settings) == (bits != FLOAT)


def test_a_head_in_floats_is_packed_where_it_lies(tmp_path: Path, capsys: Captured) -> None:
    before = write_random_eagle3(tmp_path, **WIDE, dtype=torch.bfloat16, layout="angelslim")
    size = (tmp_path / "model.safetensors").stat().st_size
    wanted = dict(load_eagle3(tmp_path, TARGET).named_parameters())
    assert pack.main([str(tmp_path)]) == 0
    now = (tmp_path / "model.safetensors").stat().st_size
    said = " ".join(capsys.readouterr().out.split())
    assert f"10 matrices in int8, {size / 1e6:.2f} MB before and {now / 1e6:.2f} MB now" in said
    found = dict(load_eagle3(tmp_path, TARGET).named_parameters())
    off = {name: float((found[name] - wanted[name]).abs().max()) for name in wanted}
    assert f"no number by more than {max(off.values()):.3g} (" in said
    assert 0 < max(off.values()) < 0.02
    assert {name for name in off if not off[name]} >= {"norm.weight", "hidden_norm.weight"}
    tensors = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(tensors[name], before[name]) for name in ("norm.weight", "d2t", "t2d"))
    assert not list(tmp_path.glob("*.part"))
    assert pack.main([str(tmp_path)]) == 2
    assert "has quantization_config: the head is packed already" in " ".join(capsys.readouterr().err.split())


def test_what_is_no_head_in_floats_is_refused(tmp_path: Path, capsys: Captured) -> None:
    def refused(*said: str) -> None:
        assert pack.main([str(tmp_path)]) == 2
        sentence = " ".join(capsys.readouterr().err.split())
        assert all(part in sentence for part in said), sentence

    write_random_eagle3(tmp_path)  # 16 wide
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    narrow = {name: tensor for name, tensor in tensors.items() if tensor.ndim != 2 or tensor.shape[1] % 32}
    save_file(narrow, file)
    refused("no projection has a multiple of 32 inputs; leave it as it is")
    save_file({name: tensor for name, tensor in tensors.items() if name != "fc.weight"}, file)
    refused("tensor 'fc.weight' is missing, so this is no draft head")
    write_random_eagle3(tmp_path, **WIDE)
    tensors = load_file(file)
    tensors["fc.weight"][1, 2] = np.nan
    save_file(tensors, file)
    refused(f"{file}: tensor 'fc.weight' holds values that are not finite")
