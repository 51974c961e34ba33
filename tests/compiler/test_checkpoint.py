"""What a checkpoint folder must hold, and the sentence for each way in which it does not."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.compiler.checkpoint import checkpoint_hashes, load_decoder
from outrider.compiler.models.config import WeightType
from outrider.plans.errors import CheckpointError

from .conftest import MakeCheckpoint

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 64,
}
GATE = "model.layers.1.mlp.gate_proj.weight"


def refused(path: Path, *parts: str, dtype: WeightType = "float32") -> None:
    """Loading `path` fails with one sentence that holds every part."""
    with pytest.raises(CheckpointError) as error:
        load_decoder(path, dtype)
    for part in parts:
        assert part in str(error.value)
    assert str(error.value).count("config.json: ") <= 1


def change(path: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(path / FILE)
    edit(tensors)
    save_file(tensors, path / FILE)


def change_config(path: Path, **values: object) -> None:
    config = path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | values))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_weights_are_in_the_type_and_layout_asked_for(
    dtype: WeightType, tmp_path: Path, make_checkpoint: MakeCheckpoint
) -> None:
    make_checkpoint("qwen2")
    stored = load_file(tmp_path / FILE)
    model = load_decoder(tmp_path, dtype)
    kind = getattr(torch, dtype)
    assert {p.dtype for p in model.parameters()} == {kind}
    assert all(p.is_contiguous() and not p.requires_grad and p.device.type == "cpu" for p in model.parameters())
    weights = model.state_dict()
    assert torch.equal(weights["layers.1.gate.weight"], stored[GATE].T.to(kind))
    assert torch.equal(weights["layers.0.q.bias"], stored["model.layers.0.self_attn.q_proj.bias"].to(kind))
    assert torch.equal(weights["embedding"], stored["model.embed_tokens.weight"].to(kind))


def test_weights_survive_a_change_of_the_file(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    make_checkpoint()
    model = load_decoder(tmp_path)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    size = (tmp_path / FILE).stat().st_size
    with (tmp_path / FILE).open("r+b") as file:
        file.write(b"\xff" * size)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def quantise(*suffixes: str) -> Callable[[dict[str, Tensor]], None]:
    """Put packed parts in the place of a projection."""

    def edit(tensors: dict[str, Tensor]) -> None:
        del tensors[GATE]
        tensors.update({GATE.removesuffix("weight") + each: torch.zeros(4, dtype=torch.int32) for each in suffixes})

    return edit


def as_type(dtype: torch.dtype) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({GATE: tensors[GATE].to(dtype)})


NO_CONFIG = "by its tensors, but config.json has no quantization_config"


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda t: t.pop(GATE), (f": tensor '{GATE}' is missing", "llama", "[48, 32]")),
        (
            lambda t: [t.update({name.removeprefix("model."): t.pop(name)}) for name in list(t)],
            ("'model.embed_tokens.weight'", "(and 17 more) is missing", "found instead 'embed_tokens.weight'"),
        ),
        (lambda t: t.pop("lm_head.weight"), ("'lm_head.weight' is missing", "set tie_word_embeddings")),
        (
            lambda t: t.update({GATE.replace("1", "2"): torch.zeros(48, 32)}),
            ("'model.layers.2.mlp.gate_proj.weight' is unexpected", "with 2 layers", "config.json"),
        ),
        (
            lambda t: t.update({GATE: t[GATE].T.contiguous()}),
            (f": tensor '{GATE}' has shape [32, 48]", "asks for [48, 32]"),
        ),
        (as_type(torch.int8), (f"tensor '{GATE}' is stored as I8", "quantised")),
        (as_type(torch.float8_e4m3fn), (": this is an FP8 checkpoint by its tensors",)),
        (lambda t: t[GATE][3, 4].fill_(float("nan")), (f"'{GATE}' holds values that are not finite", "damaged")),
        (lambda t: t[GATE][3, 4].fill_(1e6), (f"'{GATE}' holds values that are not finite in float16", "bfloat16")),
        # Older tools keep their settings in a file of their own, and config.json says nothing.
        (quantise("qweight", "qzeros", "scales", "g_idx"), (f": this is a GPTQ checkpoint {NO_CONFIG}",)),
        (quantise("qweight", "qzeros", "scales"), (f": this is an AWQ or GPTQ checkpoint {NO_CONFIG}",)),
        (quantise("weight_packed", "weight_scale"), (f": this is a compressed-tensors checkpoint {NO_CONFIG}",)),
        (quantise("weight", "weight.absmax"), (": this is a bitsandbytes checkpoint by its tensors, which is not",)),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_tensor_is_named(
    edit: Callable[[dict[str, Tensor]], object], said: tuple[str, ...], tmp_path: Path, make_checkpoint: MakeCheckpoint
) -> None:
    make_checkpoint()
    change(tmp_path, edit)
    refused(tmp_path, str(tmp_path / FILE), *said, dtype="float16")


def test_a_tied_head_may_repeat_the_embedding_and_saved_frequencies_stand_there(
    tmp_path: Path, make_checkpoint: MakeCheckpoint
) -> None:
    make_checkpoint(tie_word_embeddings=True)
    change(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    change(tmp_path, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}))
    assert load_decoder(tmp_path).lm_head is None
    change(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    refused(tmp_path, "'lm_head.weight' differs from the embedding", "tie_word_embeddings")
    change(tmp_path, lambda t: t.update({"lm_head.weight": torch.zeros(5, 32)}))
    refused(tmp_path, "'lm_head.weight' has shape [5, 32]", "asks for [97, 32]")


@pytest.mark.parametrize("keep", [4, -1])
def test_truncated_file_is_refused(keep: int, tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    make_checkpoint()
    content = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(content[:keep])
    refused(tmp_path, f"{tmp_path / FILE} is truncated or damaged", "download it again")


def test_folders_without_a_checkpoint_are_refused(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    refused(tmp_path / "absent", f"{tmp_path / 'absent'} is not a folder")
    with pytest.raises(CheckpointError, match="is not a folder"):
        checkpoint_hashes(tmp_path / "absent")
    refused(tmp_path, f"{tmp_path / 'config.json'} does not exist")
    make_checkpoint()
    (tmp_path / FILE).unlink()
    refused(tmp_path, f"{tmp_path} holds neither {FILE} nor {INDEX}")
    (tmp_path / "model-q4_0.gguf").write_bytes(b"")
    refused(tmp_path, "model-q4_0.gguf", "give the path of the GGUF file itself")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    refused(tmp_path, "holds pytorch_model.bin", "save_pretrained")


@pytest.mark.parametrize(
    ("family", "values", "sentence"),
    [
        ("llama", {"model_type": "mamba"}, "model_type 'mamba' is not supported; known families: llama, mistral"),
        ("llama", {"head_dim": 7}, "head_dim is 7"),
        ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps must be a finite number, found nan"),
        ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 1024, found 1000000000"),
        ("llama", {"layer_types": ["full_attention", "sliding_attention"]}, "layers of Llama 2, 3 models have no"),
        ("llama", {"layer_types": ["full_attention"]}, "layer_types must list the kind of each of the 2 layers"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("mistral", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types differs from what"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 2}, "set sliding_window and use_sliding_window"),
        ("gemma2", {"hidden_activation": "silu"}, "hidden_activation is 'silu'; only 'gelu_pytorch_tanh'"),
        ("phi3", {"rope_scaling": LONG | {"short_factor": [1.0]}}, "'short_factor' has 1 numbers, and 4 pairs"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers must list 0 or 1 for each of the 2 layers"),
    ],
)  # fmt: skip
def test_wrong_config_names_the_key(
    family: str, values: dict[str, object], sentence: str, tmp_path: Path, make_checkpoint: MakeCheckpoint
) -> None:
    make_checkpoint(family, head_dim=8, pad_token_id=0)
    if "rope_scaling" in values:  # in the older spelling, which contradicts the newer one
        config = json.loads((tmp_path / "config.json").read_text())
        del config["rope_parameters"], config["original_max_position_embeddings"]
        (tmp_path / "config.json").write_text(json.dumps(config))
    change_config(tmp_path, **values)
    refused(tmp_path, str(tmp_path / "config.json"), sentence)


def test_deeply_nested_json_and_wrong_end_tokens_are_refused(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    make_checkpoint()
    generation = tmp_path / "generation_config.json"
    for end in ("</s>", 97, [1, -1]):
        generation.write_text(json.dumps({"eos_token_id": end}))
        sentence = f"eos_token_id must be one token id or a list of them, from 0 to 96, found {end!r}"
        refused(tmp_path, f"{generation}: {sentence}")
    (tmp_path / "config.json").write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    refused(tmp_path, f"{tmp_path / 'config.json'} cannot be read as JSON: it is nested too deeply")


def compressed(group: dict[str, object] | None = None, **changes: object) -> dict[str, object]:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    groups = {"g": {"targets": ["Linear"], "weights": weights} | (group or {})}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups} | changes


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"quant_method": "awq", "version": "gemv"}, ("version must be 'gemm', found 'gemv'", "other AWQ")),
        ({"quant_method": "awq", "format": "marlin"}, ("format must be 'gemm', found 'marlin'", "other AWQ")),
        ({"quant_method": "awq", "bits": 3}, ("bits must be 4, found 3", "AWQ")),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, ("checkpoint_format must be 'gptq' or 'gptq_v2'",)),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, ("is_marlin_format must be False, found",)),
        (compressed(sparsity_config={"format": "sparse-24"}), ("sparsity_config.format must be 'dense', found",)),
        (compressed(format="float-quantized"), ("format must be 'pack-quantized' or", "'float-quantized'")),
        (compressed({"weights": {"num_bits": 4, "strategy": "tensor"}}), ("strategy must be 'group' or 'channel'",)),
        (compressed({"input_activations": {"num_bits": 8}}), ("g.input_activations must be absent, found",)),
        (compressed(kv_cache_scheme={"num_bits": 8}), ("kv_cache_scheme must be absent",)),
        ("awq", (": quantization_config must be a JSON object",)),
        ({"quant_method": "fp8"}, ("an FP8 checkpoint (quantization_config), which is not read; read are", "give the")),
        ({"quant_method": "new-one"}, ("this is a new-one checkpoint",)),
    ],
)  # fmt: skip
def test_packing_that_is_not_read_is_named_by_its_key(
    settings: object, said: tuple[str, ...], tmp_path: Path, make_checkpoint: MakeCheckpoint
) -> None:
    make_checkpoint()
    change_config(tmp_path, quantization_config=settings)
    refused(tmp_path, str(tmp_path / "config.json"), "quantization_config", *said)
    change_config(tmp_path, quantization_config=None, compression_config=settings)  # an older name
    refused(tmp_path, *(each.replace("quantization_config", "compression_config") for each in said))


def test_an_absent_window_is_that_of_transformers(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    make_checkpoint("mistral", sliding_window=4096)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["sliding_window"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_decoder(tmp_path).config.windows == (4096, 4096)


QKV, UP = "model.layers.1.self_attn.qkv_proj.weight", "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda t: t.update({QKV: t[QKV][:-8].clone()}), (repr(QKV), "has shape [56, 32]", "of 64 rows together")),
        (lambda t: t.update({UP: torch.zeros(48, 32)}), (repr(UP), "stands beside 'model.layers.0.mlp.gate_up_proj")),
        (lambda t: t.pop(QKV), ("'model.layers.1.self_attn.q_proj.weight'", "is missing")),
    ],
)
def test_projections_that_are_stored_as_one_tensor_are_checked(
    edit: Callable[[dict[str, Tensor]], object], said: tuple[str, ...], tmp_path: Path, make_checkpoint: MakeCheckpoint
) -> None:
    make_checkpoint("phi3", pad_token_id=0)
    change(tmp_path, edit)
    refused(tmp_path, *said)


class TestSharded:
    @pytest.fixture
    def folder(self, tmp_path: Path, make_checkpoint: MakeCheckpoint) -> Path:
        make_checkpoint(max_shard_size="20KB")
        return tmp_path

    @pytest.fixture
    def weight_map(self, folder: Path) -> dict[str, str]:
        content: dict[str, dict[str, str]] = json.loads((folder / INDEX).read_text())
        return content["weight_map"]

    def rewrite(self, folder: Path, weight_map: object) -> None:
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))

    def test_what_is_wrong_with_a_shard_is_named(self, folder: Path, weight_map: dict[str, str]) -> None:
        shard = folder / weight_map[GATE]
        content, tensors = shard.read_bytes(), load_file(shard)
        shard.write_bytes(content[:-8])
        refused(folder, f"{shard} is truncated or damaged")
        save_file({name: tensor for name, tensor in tensors.items() if name != GATE}, shard)
        refused(folder, f"{shard}: tensor '{GATE}' is missing, though {folder / INDEX} places it there")
        shard.unlink()
        refused(folder, f"{shard} is missing", INDEX)
        shard.write_bytes(content)
        self.rewrite(folder, {name: file for name, file in weight_map.items() if name != GATE})
        refused(folder, f"{shard}: holds tensor '{GATE}'", "does not place there")

    def test_shard_names_stay_in_the_folder(self, folder: Path, weight_map: dict[str, str]) -> None:
        for name in ("../model.safetensors", "/etc/passwd", "x.bin", 3):
            self.rewrite(folder, weight_map | {GATE: name})
            refused(folder, f"{folder / INDEX}: the file of tensor '{GATE}'", "in the same folder", repr(name))
        for content in ("{", "{}", '{"weight_map": 1}'):
            (folder / INDEX).write_text(content)
            refused(folder, str(folder / INDEX))

    def test_index_beside_or_of_a_single_file(self, folder: Path, weight_map: dict[str, str]) -> None:
        save_file({"x": torch.zeros(1)}, folder / FILE)
        refused(folder, f"holds both {FILE} and {INDEX}", "out of date")
        tensors = {name: load_file(folder / shard)[name] for name, shard in weight_map.items()}
        save_file(tensors, folder / FILE)
        self.rewrite(folder, dict.fromkeys(tensors, FILE))
        load_decoder(folder)


def test_hashes_cover_what_can_change_a_plan(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    make_checkpoint(max_shard_size="20KB")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "README.md"):
        (tmp_path / name).write_text(name)
    hashes = checkpoint_hashes(tmp_path)
    shards = {file.name for file in tmp_path.glob("*.safetensors")}
    assert len(shards) > 1
    others = {"config.json", "generation_config.json", INDEX, "tokenizer.json", "tokenizer_config.json"}
    assert set(hashes) == shards | others | {"chat_template.jinja"}
    assert list(hashes) == sorted(hashes)
    assert hashes["tokenizer.json"] == hashlib.sha256(b"tokenizer.json").hexdigest()
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in hashes.values())
