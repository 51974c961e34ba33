"""Decoders out of packed checkpoints against transformers' model of the same numbers, and graphs of their integers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.compiler.checkpoint import defer_decoder, load_decoder
from outrider.compiler.engines.onnxruntime import OnnxRuntimeEngines
from outrider.compiler.export import export_target
from outrider.compiler.lowering import lower
from outrider.compiler.models.eager import sequence_logits
from outrider.compiler.quantization.graph import quantize
from outrider.plans.errors import CheckpointError
from tests.cpu_session import cpu_session

from .models import logits_of, random_model
from .packed import (
    Pack,
    awq_tensors,
    compressed_settings,
    compressed_tensors,
    gptq_tensors,
    round_in_groups,
    write_packed,
)  # fmt: skip

IDS = [(37 * i) % 310 + 2 for i in range(60)]
CAPACITY = 128


def awq(name: str, weight: Tensor) -> tuple[dict[str, Any], NDArray[np.float32]]:
    made = round_in_groups(weight.numpy(), 4, 128, symmetric=False)
    return awq_tensors(made), made.numbers


def gptq(bits: int = 4, act_order: bool = False, less_one: bool = True, symmetric: bool = True) -> Pack:
    """Projections of one input have one order, as they have where GPTQ orders inputs by what activates them."""

    def pack(name: str, weight: Tensor) -> tuple[dict[str, Any], NDArray[np.float32]]:
        inputs = name.replace("k_proj", "q_proj").replace("v_proj", "q_proj").replace("up_proj", "gate_proj")
        order = np.random.default_rng(sum(inputs.encode())).permutation(weight.shape[1])
        groups = order // 64 if act_order else None
        made = round_in_groups(weight.numpy(), bits, 64, symmetric=symmetric, groups=groups)
        return gptq_tensors(made, bits, less_one), made.numbers

    return pack


def compressed(bits: int, size: int | None, symmetric: bool) -> Pack:
    return lambda name, weight: compressed_tensors(weight, bits, size, symmetric, torch.bfloat16)


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": True}
FORMATS: dict[str, tuple[Pack, dict[str, object], str, dict[str, object]]] = {
    "awq": (awq, AWQ, "llama", {}),
    "gptq": (gptq(), GPTQ, "qwen2", {"num_hidden_layers": 2}),
    "gptq, activations ordered": (gptq(act_order=True, symmetric=False), GPTQ, "llama", {"num_hidden_layers": 2}),
    "gptq, with biases": (gptq(act_order=True), GPTQ, "llama", {"attention_bias": True, "mlp_bias": True}),
    "gptq v2 int8": (
        gptq(bits=8, less_one=False, symmetric=False), GPTQ | {"bits": 8, "checkpoint_format": "gptq_v2"}, "qwen3", {},
    ),
    "compressed int4": (
        compressed(4, 128, False), compressed_settings(4, 128, False), "llama", {"tie_word_embeddings": True},
    ),
    "compressed int8": (compressed(8, None, True), compressed_settings(8, None, True), "qwen3", {}),
}  # fmt: skip


def write(name: str, folder: Path) -> Any:
    pack, settings, family, changes = FORMATS[name]
    model = random_model(family, **changes)
    write_packed(folder, model, pack, settings)
    return model


@pytest.mark.parametrize("name", FORMATS)
def test_decoder_is_transformers_at_every_position(name: str, tmp_path: Path) -> None:
    model = write(name, tmp_path)
    found = sequence_logits(load_decoder(tmp_path), IDS)
    torch.testing.assert_close(found, logits_of(model, IDS), atol=2e-5, rtol=1e-5)


def graph_logits(folder: Path, place: Path) -> tuple[NDArray[np.float32], list[Any]]:
    """Logits of the graph with the checkpoint's integers in weight-only operators, and its nodes before lowering."""
    decoder = defer_decoder(folder)
    graph = export_target(decoder, CAPACITY)
    quantize("target", graph, None)
    nodes = list(graph.graph)
    lower("target", graph, "onnxruntime-cuda", 1)
    place.mkdir()
    engines = OnnxRuntimeEngines(place)
    engines.write("target", graph, {})
    engines.close()
    c, n = decoder.config, len(IDS)
    hidden = np.triu(np.ones((n, n), bool), 1)
    cache = np.zeros((1, c.num_kv_heads, CAPACITY, c.head_dim), np.float32)
    inputs: dict[str, Any] = {
        "token_ids": np.array(IDS), "positions": np.arange(n), "past_length": np.zeros(1, np.int64),
        "attn_bias": np.where(hidden, np.finfo(np.float32).min, np.float32(0))[None, None],
        "logit_indices": np.arange(n), "row_splits": np.array([0, n]),
        **{f"{part}_cache.{layer}": cache for layer in range(c.num_layers) for part in "kv"},
    }  # fmt: skip
    session = cpu_session(place / "target.onnx")
    wanted = {value.name for value in session.get_inputs()}
    found: NDArray[np.float32] = session.run(["logits"], {k: v for k, v in inputs.items() if k in wanted})[0]
    return found, nodes


def test_graph_with_the_checkpoints_integers_is_transformers(tmp_path: Path) -> None:
    """Weight-only operators round no activations, so that a wrong integer, scale or order would show."""
    model = write("gptq, activations ordered", tmp_path)
    found, nodes = graph_logits(tmp_path, tmp_path / "engine")
    np.testing.assert_allclose(found, logits_of(model, IDS).numpy(), atol=1e-4)
    kinds = [node.op_type for node in nodes]
    layers = model.config.num_hidden_layers
    assert kinds.count("AsymmetricQuantMatMul") == 7 * layers
    reordered = [node for node in nodes if node.op_type == "Gather" and node.attributes["axis"].value == -1]
    assert len(reordered) == 3 * layers  # one for q, k and v, one for o, one for gate and up; none for down


def test_zero_biases_that_the_model_does_not_have_are_left_out(tmp_path: Path) -> None:
    """AutoGPTQ once wrote a bias of zeros for every projection."""
    model = write("gptq", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors, name = load_file(file), "model.layers.0.self_attn.o_proj.bias"
    assert name not in tensors
    save_file(tensors | {name: torch.zeros(256)}, file)
    torch.testing.assert_close(
        sequence_logits(load_decoder(tmp_path), IDS), logits_of(model, IDS), atol=2e-5, rtol=1e-5
    )
    save_file(tensors | {name: torch.ones(256)}, file)
    with pytest.raises(CheckpointError, match=r"o_proj.bias' is unexpected"):
        load_decoder(tmp_path)


def test_tensors_of_the_folder_are_checked(tmp_path: Path) -> None:
    write("awq", tmp_path)
    file, up = tmp_path / "model.safetensors", "model.layers.0.mlp.up_proj"
    tensors = load_file(file)
    for old, new, said in (
        (up, "model.layers.0.mlp.odd_proj", "'model.layers.0.mlp.odd_proj.weight' is unexpected"),
        (f"{up}.qzeros", "x", f"'{up}.qzeros' is missing beside"),
        ("self_attn.q_proj", "self_attn.v_proj", "'model.layers.0.self_attn.v_proj.weight' has shape [256, 256], but"),
    ):
        save_file(tensors | {n.replace(old, new): each.clone() for n, each in tensors.items() if old in n}, file)
        if new == "x":
            save_file({n: each for n, each in tensors.items() if n != old}, file)
        with pytest.raises(CheckpointError) as error:
            load_decoder(tmp_path)
        assert said in str(error.value)
        assert str(file) in str(error.value)
