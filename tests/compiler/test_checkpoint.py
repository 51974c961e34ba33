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


def test_missing_tensor_is_named_with_its_shape(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    make_checkpoint()
    change(tmp_path, lambda tensors: tensors.pop(GATE))
    refused(tmp_path, f"{tmp_path / FILE}: tensor '{GATE}' is missing", "llama", "[48, 32]")


def test_many_missing_tensors_are_counted(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    make_checkpoint()
    tensors = load_file(tmp_path / FILE)
    renamed = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(renamed, tmp_path / FILE)
    refused(tmp_path, "'model.embed_tokens.weight'", "(and 17 more) is missing", "found instead 'embed_tokens.weight'")


def test_missing_head_suggests_tying(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    make_checkpoint()
    change(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    refused(tmp_path, "'lm_head.weight' is missing", "set tie_word_embeddings")


def test_unexpected_tensor_is_named(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    make_checkpoint()
    change(tmp_path, lambda tensors: tensors.update({"model.layers.2.mlp.gate_proj.weight": torch.zeros(48, 32)}))
    refused(tmp_path, FILE, "'model.layers.2.mlp.gate_proj.weight' is unexpected", "with 2 layers", "config.json")


def test_saved_rotary_frequencies_are_ignored(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    make_checkpoint()
    change(tmp_path, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}))
    load_decoder(tmp_path)


def test_wrong_shape_names_both_shapes(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    make_checkpoint()
    change(tmp_path, lambda tensors: tensors.update({GATE: tensors[GATE].T.contiguous()}))
    refused(tmp_path, f"{tmp_path / FILE}: tensor '{GATE}' has shape [32, 48]", "asks for [48, 32]")


def test_quantised_weights_are_refused(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    make_checkpoint()
    change(tmp_path, lambda tensors: tensors.update({GATE: tensors[GATE].to(torch.int8)}))
    refused(tmp_path, f"tensor '{GATE}' is stored as I8", "quantised")


@pytest.mark.parametrize(("value", "cause"), [(float("nan"), "the file is damaged"), (1e6, "choose bfloat16")])
def test_values_that_are_not_finite_are_refused(
    value: float, cause: str, tmp_path: Path, make_checkpoint: MakeCheckpoint
) -> None:
    make_checkpoint()
    change(tmp_path, lambda tensors: tensors[GATE][3, 4].fill_(value))
    refused(tmp_path, f"'{GATE}' holds values that are not finite in float16", cause, dtype="float16")


def test_tied_checkpoint_may_repeat_the_embedding(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    make_checkpoint(tie_word_embeddings=True)
    change(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert load_decoder(tmp_path).lm_head is None


def test_tied_checkpoint_with_another_head_is_refused(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    make_checkpoint(tie_word_embeddings=True)
    change(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    refused(tmp_path, "'lm_head.weight' differs from the embedding", "tie_word_embeddings")
    change(tmp_path, lambda t: t.update({"lm_head.weight": torch.zeros(5, 32)}))
    refused(tmp_path, "'lm_head.weight' has shape [5, 32]", "asks for [97, 32]")


@pytest.mark.parametrize("keep", [0, 4, 200, -1])
def test_truncated_file_is_refused(keep: int, tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    make_checkpoint()
    content = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(content[:keep])
    refused(tmp_path, f"{tmp_path / FILE} is truncated or damaged", "download it again")


def test_no_weights_and_pickled_weights_are_refused(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    make_checkpoint()
    (tmp_path / FILE).unlink()
    refused(tmp_path, f"{tmp_path} holds neither {FILE} nor {INDEX}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    refused(tmp_path, "holds pytorch_model.bin", "save_pretrained")


def test_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    refused(tmp_path / "absent", f"{tmp_path / 'absent'} is not a folder")
    with pytest.raises(CheckpointError, match="is not a folder"):
        checkpoint_hashes(tmp_path / "absent")
    refused(tmp_path, f"{tmp_path / 'config.json'} does not exist")


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"model_type": {"a": 1}}, "model_type {'a': 1} is not supported; known families: llama,"),
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported; known families: llama, mistral, ministral"),
        ({"hidden_size": "32"}, "hidden_size must be a whole number, found '32'"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number, found 'small'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a finite number, found nan"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps must be a finite number, found inf"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 1024, found 1000000000"),
        ({"hidden_size": 10**30}, "hidden_size must be at most 262144, found 10000000"),
        ({"max_position_embeddings": 2**33}, "max_position_embeddings must be at most 2147483647, found 8589934592"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false, found 'no'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layers of Llama 2, 3 models have no window"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types.1 must be 'full_attention' or"),
        ({"layer_types": ["full_attention"]}, "layer_types must list the kind of each of the 2 layers"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; Llama 2, 3 models rotate whole heads"),
        ({"rope_parameters": {"full_attention": {}, "sliding_attention": {}}}, "rope_parameters is by kind of layer"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"torch_dtype": {"a": 1}}, "torch_dtype must be text (quote it if it looks like a number), found {'a': 1}"),
        ({"architectures": {"a": 1}}, "architectures must be a list, found {'a': 1}"),
        ({"eos_token_id": {"a": 1}}, "eos_token_id.0 must be a whole number, found {'a': 1}"),
        ({"rope_parameters": [1]}, "rope_parameters must be a mapping of keys to values, found [1]"),
        ({"rope_parameters": {"rope_theta": "large"}}, "rope_theta must be a number, found 'large'"),
    ],
)
def test_wrong_config_names_the_key(
    values: dict[str, object], sentence: str, tmp_path: Path, make_checkpoint: MakeCheckpoint
) -> None:
    make_checkpoint()
    change_config(tmp_path, **values)
    refused(tmp_path, str(tmp_path / "config.json"), sentence)


@pytest.mark.parametrize("end", ["</s>", 97, [1, -1], True])
def test_wrong_end_token_names_the_file(end: object, tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    make_checkpoint()
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    sentence = f"eos_token_id must be one token id or a list of them, from 0 to 96, found {end!r}"
    refused(tmp_path, f"{tmp_path / 'generation_config.json'}: {sentence}")


def test_deeply_nested_json_is_refused(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    make_checkpoint()
    (tmp_path / "config.json").write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    refused(tmp_path, f"{tmp_path / 'config.json'} cannot be read as JSON: it is nested too deeply")


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "an FP8 checkpoint"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "a bitsandbytes checkpoint"),
        ({"compression_config": {"quant_method": "torchao"}}, "a TorchAO checkpoint"),
        ({"quantization_config": {"quant_method": "new-one"}}, "a new-one checkpoint"),
        ({"quantization_config": {"bits": 4}}, "a quantised checkpoint"),
    ],
)
def test_quantised_checkpoint_is_named_by_its_config(
    settings: dict[str, object], kind: str, tmp_path: Path, make_checkpoint: MakeCheckpoint
) -> None:
    make_checkpoint()
    change_config(tmp_path, **settings)
    refused(
        tmp_path, f"{tmp_path / 'config.json'}: this is {kind}", "which is not read; read are AWQ", "give the checkp"
    )


def compressed(weights: dict[str, object] | None = None, **changes: object) -> dict[str, object]:
    chosen = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32} | (weights or {})
    group = {"targets": ["Linear"], "weights": chosen} | {
        k: changes.pop(k) for k in ("input_activations",) if k in changes
    }
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"g": group}} | changes


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"quant_method": "awq", "version": "gemv"}, ("version must be 'gemm', found 'gemv'", "other AWQ")),
        ({"quant_method": "awq", "format": "marlin"}, ("format must be 'gemm', found 'marlin'", "AWQ")),
        ({"quant_method": "awq", "bits": 3}, ("bits must be 4, found 3", "AWQ")),
        ({"quant_method": "gptq", "bits": 3}, ("bits must be 4 or 8, found 3", "GPTQ")),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, ("checkpoint_format must be 'gptq' or 'gptq_v2'",)),
        ({"quant_method": "gptq", "is_marlin_format": True}, ("is_marlin_format must be False, found True", "GPTQ")),
        (compressed(format="float-quantized"), ("format must be 'pack-quantized' or", "'float-quantized'")),
        (compressed({"num_bits": 2}), ("config_groups.g.weights.num_bits must be 4 or 8, found 2",)),
        (compressed({"type": "float"}), ("config_groups.g.weights.type must be 'int', found 'float'",)),
        (compressed({"strategy": "tensor"}), ("weights.strategy must be 'group' or 'channel', found 'tensor'",)),
        (compressed(input_activations={"num_bits": 8}), ("g.input_activations must be absent, found {'num_bits': 8}",)),
        (compressed(kv_cache_scheme={"num_bits": 8}), ("kv_cache_scheme must be absent",)),
        (compressed(sparsity_config={"format": "sparse-24"}), ("sparsity_config.format must be 'dense'",)),
        ("awq", ("quantization_config must be a JSON object",)),
    ],
)  # fmt: skip
def test_packing_that_is_not_read_is_named_by_its_key(
    settings: object, said: tuple[str, ...], tmp_path: Path, make_checkpoint: MakeCheckpoint
) -> None:
    make_checkpoint()
    change_config(tmp_path, quantization_config=settings)
    refused(tmp_path, f"{tmp_path / 'config.json'}: quantization_config", *said)


@pytest.mark.parametrize(
    ("suffixes", "kind"),
    [
        (("qweight", "qzeros", "scales", "g_idx"), "a GPTQ checkpoint"),
        (("qweight", "qzeros", "scales"), "an AWQ or GPTQ checkpoint"),
        (("weight_packed", "weight_scale"), "a compressed-tensors checkpoint"),
        (("weight", "weight.absmax"), "a bitsandbytes checkpoint"),
    ],
)
def test_quantised_checkpoint_is_named_by_its_tensors(
    suffixes: tuple[str, ...], kind: str, tmp_path: Path, make_checkpoint: MakeCheckpoint
) -> None:
    """Older tools keep their settings in a file of their own, and config.json says nothing."""
    make_checkpoint()
    stem = GATE.removesuffix("weight")

    def quantise(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[GATE]
        tensors.update({stem + suffix: torch.zeros(4, dtype=torch.int32) for suffix in suffixes})

    change(tmp_path, quantise)
    wanted = "has no quantization_config" if "bitsandbytes" not in kind else "which is not read; read are AWQ"
    refused(tmp_path, f"{tmp_path / FILE}: this is {kind} by its tensors", wanted)


def test_fp8_checkpoint_is_named_by_its_tensors(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    make_checkpoint()
    change(tmp_path, lambda tensors: tensors.update({GATE: tensors[GATE].to(torch.float8_e4m3fn)}))
    refused(tmp_path, f"{tmp_path / FILE}: this is an FP8 checkpoint by its tensors")


def test_gguf_is_named(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    make_checkpoint()
    (tmp_path / FILE).rename(tmp_path / "model-q4_0.gguf")
    refused(tmp_path, "model-q4_0.gguf", "give the path of the GGUF file itself")


def test_an_absent_window_is_that_of_transformers(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    make_checkpoint("mistral", sliding_window=4096)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["sliding_window"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_decoder(tmp_path).config.windows == (4096, 4096)


@pytest.mark.parametrize(
    ("family", "values", "sentence"),
    [
        ("mistral", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types differs from what"),
        ("mistral", {"sliding_window": 0}, "sliding_window must be from 1 to 2147483647, found 0"),
        ("ministral", {"sliding_window": None, "layer_types": ["sliding_attention"] * 2}, "there is no window"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 2}, "set sliding_window and use_sliding_window"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be at least 1e-06, found 0"),
        ("gemma2", {"final_logit_softcapping": "no"}, "final_logit_softcapping must be a number"),
        ("gemma2", {"hidden_activation": "silu"}, "hidden_activation is 'silu'; only 'gelu_pytorch_tanh'"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention must be False, found True"),
        ("gemma3_text", {"model_type": "gemma3"}, "save that by itself; compiler/models/README.md says how"),
        ("phi3", {"partial_rotary_factor": 0.1}, "is 0 numbers; an even number is rotated"),
        ("phi3", {"partial_rotary_factor": 2}, "partial_rotary_factor must be at most 1.0, found 2"),
        ("phi3", {"rope_scaling": LONG | {"short_factor": [1.0]}}, "'short_factor' has 1 numbers, and 4 pairs"),
        ("phi3", {"rope_scaling": LONG | {"long_factor": [1.0] * 3 + ["x"]}}, "long_factor.3 must be a number"),
        ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "needs a 'long_factor'"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers must list 0 or 1 for each of the 2 layers"),
        ("granite", {"logits_scaling": float("inf")}, "logits_scaling must be a finite number"),
    ],
)
def test_wrong_config_of_a_family_names_the_key(
    family: str, values: dict[str, object], sentence: str, tmp_path: Path, make_checkpoint: MakeCheckpoint
) -> None:
    make_checkpoint(family, head_dim=8, pad_token_id=0)
    config = json.loads((tmp_path / "config.json").read_text())
    if "rope_scaling" in values or "partial_rotary_factor" in values:
        del config["rope_parameters"], config["original_max_position_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(config | values))
    refused(tmp_path, str(tmp_path / "config.json"), sentence)


class TestFused:
    """Projections that are stored as one tensor."""

    @pytest.fixture
    def folder(self, tmp_path: Path, make_checkpoint: MakeCheckpoint) -> Path:
        make_checkpoint("phi3", pad_token_id=0)
        return tmp_path

    def test_another_number_of_rows(self, folder: Path) -> None:
        tensors = load_file(folder / FILE)
        name = "model.layers.1.self_attn.qkv_proj.weight"
        save_file(tensors | {name: tensors[name][:-8].clone()}, folder / FILE)
        refused(folder, repr(name), "has shape [56, 32]", "it holds q_proj, k_proj, v_proj, of 64 rows")

    def test_a_part_beside_the_whole(self, folder: Path) -> None:
        name = "model.layers.0.mlp.up_proj.weight"
        save_file(load_file(folder / FILE) | {name: torch.zeros(48, 32)}, folder / FILE)
        refused(folder, repr(name), "stands beside 'model.layers.0.mlp.gate_up_proj.weight'")

    def test_none(self, folder: Path) -> None:
        tensors = load_file(folder / FILE)
        del tensors["model.layers.1.self_attn.qkv_proj.weight"]
        save_file(tensors, folder / FILE)
        refused(folder, "'model.layers.1.self_attn.q_proj.weight'", "is missing")


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

    def test_missing_shard(self, folder: Path, weight_map: dict[str, str]) -> None:
        (folder / weight_map[GATE]).unlink()
        refused(folder, f"{folder / weight_map[GATE]} is missing", INDEX)

    def test_truncated_shard(self, folder: Path, weight_map: dict[str, str]) -> None:
        shard = folder / weight_map[GATE]
        shard.write_bytes(shard.read_bytes()[:-8])
        refused(folder, f"{shard} is truncated or damaged")

    def test_shard_without_a_tensor_of_the_index(self, folder: Path, weight_map: dict[str, str]) -> None:
        shard = folder / weight_map[GATE]
        tensors = load_file(shard)
        del tensors[GATE]
        save_file(tensors, shard)
        refused(folder, f"{shard}: tensor '{GATE}' is missing, though {folder / INDEX} places it there")

    def test_tensor_that_the_index_does_not_place(self, folder: Path, weight_map: dict[str, str]) -> None:
        shard = weight_map.pop(GATE)
        self.rewrite(folder, weight_map)
        refused(folder, f"{folder / shard}: holds tensor '{GATE}'", "does not place there")

    @pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", "x.bin", "", 3])
    def test_shard_names_stay_in_the_folder(self, name: object, folder: Path, weight_map: dict[str, str]) -> None:
        self.rewrite(folder, weight_map | {GATE: name})
        refused(folder, f"{folder / INDEX}: the file of tensor '{GATE}'", "in the same folder", repr(name))

    @pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": 1}'])
    def test_broken_index(self, content: str, folder: Path) -> None:
        (folder / INDEX).write_text(content)
        refused(folder, str(folder / INDEX))

    def test_second_set_of_weights(self, folder: Path) -> None:
        save_file({"x": torch.zeros(1)}, folder / FILE)
        refused(folder, f"holds both {FILE} and {INDEX}", "out of date")

    def test_index_of_a_single_file(self, folder: Path, weight_map: dict[str, str]) -> None:
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
