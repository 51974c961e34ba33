"""What an EAGLE3 head's folder must hold, what is read from it, and the sentence for each way in which it does not."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.compiler.checkpoint import checkpoint_hashes
from outrider.compiler.models.config import WeightType
from outrider.compiler.models.eagle3_config import Eagle3Config, Eagle3Overrides, Taps
from outrider.compiler.models.rope import RopeScaling

from .eagle3_heads import (
    LAYOUTS,
    PICKLED,
    SAFETENSORS,
    WIDE,
    K,
    Layout,
    Q,
    change,
    change_config,
    load_eagle3,
    pack_head,
    read_eagle3_config,
    refused,
    target_config,
    write_eagle3,
)

UP = "midlayer.mlp.up_proj.weight"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_geometry_is_read_from_config_and_shapes(layout: Layout, tmp_path: Path) -> None:
    write_eagle3(tmp_path, layout=layout, draft_vocab=25, hidden=24, own_embedding=True, head_dim=10, rope_theta=5e5)
    assert read_eagle3_config(tmp_path, target_config(layers=12)) == Eagle3Config(
        hidden_size=24,
        target_hidden_size=16,
        intermediate_size=40,
        num_heads=4,
        num_kv_heads=2,
        head_dim=10,
        draft_vocab_size=25,
        vocab_size=60,
        rms_norm_eps=1e-5,
        rope_theta=5e5,
        rope_scaling=RopeScaling(),
        own_embedding=True,
        fc_norm=False,
        norm_output=False,
        taps=Taps((2, 6, 9), "EAGLE3's default: config.json names none"),
    )


def test_the_recipe_overrides_what_the_config_claims(tmp_path: Path) -> None:
    target = target_config()
    write_eagle3(tmp_path)
    assert read_eagle3_config(tmp_path, target).rope_theta == 10000
    write_eagle3(tmp_path, rope_theta=1e6, norm_output=True)
    read, given = read_eagle3_config(tmp_path, target), Eagle3Overrides(rope_theta=5e5, norm_output=False)
    assert (read.rope_theta, read.norm_output) == (1e6, True)
    head = load_eagle3(tmp_path, target, given=given)
    assert (head.config.rope_theta, head.config.norm_output) == (5e5, False)


@pytest.mark.parametrize("absent", [(), ("t2d",), ("d2t",)])
def test_target_ids_come_from_whichever_map_is_there(absent: tuple[str, ...], tmp_path: Path) -> None:
    tensors = write_eagle3(tmp_path, draft_vocab=25)
    change(tmp_path, lambda stored: [stored.pop(name) for name in absent])
    ids = load_eagle3(tmp_path, target_config()).target_ids
    assert ids.dtype == torch.int64
    assert torch.equal(ids, torch.arange(25) + tensors["d2t"])
    assert torch.equal(ids, tensors["t2d"].nonzero().flatten())


@pytest.mark.parametrize(("layout", "dtype"), [*zip(LAYOUTS, ("float32", "float16", "bfloat16"), strict=True)])
def test_weights_are_in_the_type_and_layout_asked_for(dtype: WeightType, layout: Layout, tmp_path: Path) -> None:
    tensors = write_eagle3(tmp_path, layout=layout, draft_vocab=25, dtype=torch.bfloat16)
    head = load_eagle3(tmp_path, target_config(), dtype)
    kind = getattr(torch, dtype)
    assert {p.dtype for p in head.parameters()} == {kind}
    assert all(p.is_contiguous() and not p.requires_grad and p.device.type == "cpu" for p in head.parameters())
    assert torch.equal(head.q.weight, tensors[Q].T.to(kind))
    assert head.target_ids.dtype == torch.int64
    assert not head.training


def shaped(*shape: int) -> Callable[[Tensor], Tensor]:
    return lambda tensor: torch.zeros(shape, dtype=tensor.dtype)


def typed(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.to(dtype)


def added(at: int, number: int) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.index_add(0, torch.tensor([at]), torch.tensor([number]))


MOST = torch.iinfo(torch.int64).max
ASCENDING = "(draft_id + d2t, ascending)"
TENSORS: list[tuple[str, Callable[[Tensor], Tensor] | None, tuple[str, ...]]] = [
    (UP, None, (f"tensor '{UP}' is missing", "EAGLE3 head", "[40, 16]", "give a complete checkpoint")),
    ("midlayer.self_attn.q_norm.weight", shaped(32), ("q_norm.weight' is unexpected", "EAGLE3 head", "config.json")),
    *((name, shaped(*shape), (f"tensor '{name}' has shape {list(shape)}", f"asks for {wanted}"))
      for name, shape, wanted in (
        ("fc.weight", (16, 80), "[16, 48]"), ("lm_head.weight", (26, 16), "[25, 16]"), (Q, (32, 16), "[32, 32]"),
        ("embed_tokens.weight", (59, 16), "[60, 16]"), ("d2t", (24,), "[25]"), ("t2d", (61,), "[60]"),
    )),
    *((name, typed(dtype), (f"tensor '{name}' is stored as ", f"expected {wanted}; ", "give the original one"))
      for name, dtype, wanted in (
        (UP, torch.int8, "F64, F32, F16, BF16"), ("d2t", torch.float32, "I64"), ("t2d", torch.int64, "BOOL"),
    )),
    ("d2t", added(24, 60), ("tensor 'd2t' makes draft token ", "below 60", ASCENDING)),
    ("d2t", added(0, -40), ("tensor 'd2t' makes draft token ", "above -1", ASCENDING)),
    ("d2t", added(10, 30), ("tensor 'd2t' makes draft token ", "above ", ASCENDING)),
    ("d2t", lambda d2t: d2t.index_fill(0, torch.tensor(3), MOST), ("tensor 'd2t' makes draft token 3 ",)),
    ("t2d", lambda t2d: t2d.roll(1), ("'t2d' and 'd2t' disagree: draft token ",)),
    ("t2d", torch.ones_like, ("tensor 't2d' marks 60 tokens, expected 25",)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "edit", "words"), TENSORS)
def test_what_is_wrong_with_a_tensor_is_named(
    name: str, edit: Callable[[Tensor], Tensor] | None, words: tuple[str, ...], tmp_path: Path
) -> None:
    for layout, file in (("angelslim", SAFETENSORS), ("safeailab", PICKLED)):
        folder = tmp_path / layout
        tensors = write_eagle3(folder, layout=layout, draft_vocab=25, own_embedding=True)  # type: ignore[arg-type]
        value = None if edit is None else edit(tensors.get(name, torch.zeros(1)))
        change(folder, lambda stored, value=value: stored.update({name: value}) if edit else stored.pop(name))  # type: ignore[misc]
        refused(folder, str(folder / file), *words)


def test_a_map_that_is_needed_or_is_none(tmp_path: Path) -> None:
    write_eagle3(tmp_path, draft_vocab=25)
    change(tmp_path, lambda tensors: [tensors.pop("d2t"), tensors.pop("t2d")])
    refused(tmp_path, "tensor 'd2t' is missing", "draft vocabulary (25)", "target's (60)")
    assert "d2t" not in write_eagle3(tmp_path / "whole", layout="safeailab")
    assert torch.equal(load_eagle3(tmp_path / "whole", target_config()).target_ids, torch.arange(60))


def test_another_target_is_refused(tmp_path: Path) -> None:
    wide = target_config(hidden=32)
    write_eagle3(tmp_path)
    refused(tmp_path, "config.json: vocab_size is 60, but the target's is 61", target=target_config(vocab=61))
    refused(tmp_path, "config.json: hidden_size, which stands for the absent target_hidden_size, is 16", target=wide)
    write_eagle3(tmp_path, hidden=24, own_embedding=True)
    refused(tmp_path, "target_hidden_size is 16, but the target's is 32", "this target", target=wide)
    write_eagle3(tmp_path, hidden=24)
    refused(tmp_path, "tensor 'embed_tokens.weight' is missing", "embedding is 16 wide, not 24", "that holds one")


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers must be 1, found 2"),
        ({"intermediate_size": None}, "intermediate_size is missing; add it"),
        ({"draft_vocab_size": 61}, "draft_vocab_size 61 is greater than vocab_size 60"),
        ({"num_attention_heads": 8}, "head_dim is 8, but tensor 'midlayer.self_attn.q_proj.weight' has 32 rows"),
        ({"num_key_value_heads": 4}, "num_key_value_heads is 4, but tensor 'midlayer.self_attn.k_proj.weight' has 16"),
        ({"fc_norm": True}, "tensor 'fc_norm.0.weight', 'fc_norm.1.weight', 'fc_norm.2.weight' is missing"),
    ],
)
def test_wrong_config_names_the_key(values: dict[str, object], sentence: str, tmp_path: Path) -> None:
    write_eagle3(tmp_path)
    change_config(tmp_path, **values)
    refused(tmp_path, str(tmp_path), sentence)


def test_a_kind_of_quantised_head_that_is_not_read_is_named(tmp_path: Path) -> None:
    write_eagle3(tmp_path)
    change_config(tmp_path, quantization_config={"quant_method": "fp8"})
    refused(tmp_path, "config.json: this is an FP8 checkpoint (quantization_config), which is not read; read are AWQ")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_projections_that_are_incomplete_or_not_described_are_named(layout: Layout, tmp_path: Path) -> None:
    target, name = target_config(hidden=32), f"{UP.removesuffix('.weight')}.weight_scale"
    write_eagle3(tmp_path, layout=layout, **WIDE)
    pack_head(tmp_path)
    change(tmp_path, lambda tensors: tensors.pop(name))
    refused(tmp_path, f"tensor '{name}' is missing beside", target=target)
    change_config(tmp_path, quantization_config=None)
    kind = "a compressed-tensors checkpoint by its tensors, but config.json has no quantization_config"
    refused(tmp_path, kind, target=target)


def test_floats_and_integers_may_stand_side_by_side(tmp_path: Path) -> None:
    """Projections in `ignore`."""
    tensors = write_eagle3(tmp_path, **WIDE)
    numbers = pack_head(tmp_path, left={Q, "fc.weight"})
    head = load_eagle3(tmp_path, target_config(hidden=32))
    assert torch.equal(head.q.weight.T, tensors[Q])
    assert torch.equal(head.k.weight.T, numbers[K])


def test_norms_that_the_config_denies(tmp_path: Path) -> None:
    write_eagle3(tmp_path, fc_norm=True)
    change_config(tmp_path, fc_norm=None)  # where it says nothing the tensors decide
    assert read_eagle3_config(tmp_path, target_config()).fc_norm
    change_config(tmp_path, fc_norm=False)
    refused(tmp_path, "'fc_norm.0.weight', 'fc_norm.1.weight', 'fc_norm.2.weight' is unexpected")


def test_folder_without_weights(tmp_path: Path) -> None:
    write_eagle3(tmp_path)
    (tmp_path / SAFETENSORS).rename(tmp_path / "head.pt")
    refused(tmp_path, f"{tmp_path} holds no {SAFETENSORS}", PICKLED, "beside head.pt")


class Harmful:
    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return print, ("a pickle ran",)


class TestPickle:
    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        write_eagle3(tmp_path, layout="safeailab")
        return tmp_path / PICKLED

    @pytest.mark.parametrize("keep", [0, 100, -1])
    def test_that_is_cut_short(self, keep: int, file: Path) -> None:
        file.write_bytes(file.read_bytes()[:keep])
        refused(file.parent, f"{file} is damaged or holds more than tensors", "download it again", SAFETENSORS)

    def test_that_would_run_code(self, file: Path, capfd: pytest.CaptureFixture[str]) -> None:
        torch.save({"fc.weight": Harmful()}, file)
        refused(file.parent, f"{file} is damaged or holds more than tensors (UnpicklingError)")
        assert "a pickle ran" not in capfd.readouterr().out

    @pytest.mark.parametrize(
        ("content", "found"),
        [
            ([torch.zeros(1)], "must hold tensors by name, found a list"),
            ({"state_dict": {"fc.weight": torch.zeros(1)}}, "'state_dict' must be a plain tensor, found a dict"),
            ({"fc.weight": torch.zeros(2, 2).to_sparse()}, "'fc.weight' must be a plain tensor"),
        ],
    )
    def test_that_is_no_weights(self, content: object, found: str, file: Path) -> None:
        torch.save(content, file)
        refused(file.parent, str(file), found)

    def test_of_the_old_format_is_read_into_memory_of_its_own(self, file: Path) -> None:
        content = torch.load(file, weights_only=True)
        for new in (False, True):
            torch.save(content, file, _use_new_zipfile_serialization=new)
            head = load_eagle3(file.parent, target_config())
            file.write_bytes(b"\xff" * file.stat().st_size)
            assert torch.equal(head.fc.weight, content["fc.weight"].T)

    def test_beside_safetensors_is_left_alone(self, file: Path) -> None:
        assert checkpoint_hashes(file.parent)[PICKLED] == hashlib.sha256(file.read_bytes()).hexdigest()
        tensors = write_eagle3(file.parent, layout="specforge", seed=1)
        file.write_bytes(b"no weights")
        assert torch.equal(load_eagle3(file.parent, target_config()).fc.weight, tensors["fc.weight"].T)
        assert set(checkpoint_hashes(file.parent)) == {"config.json", SAFETENSORS}
