"""Llamas without weights, exported and lowered as for a plan: what their engines of the backend `cuda` launch."""

from __future__ import annotations

import base64
import json
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from compiler.checkpoint import defer_decoder
from compiler.export import export_target
from compiler.kernels import HANDLERS
from compiler.kernels.emitter import Emitter
from compiler.lowering import lower
from compiler.models.config import WeightType
from compiler.quantization.graph import quantize
from compiler.quantization.weight_form import WeightForm
from plans import names
from plans.kernel_engine import KernelEngine
from tools.gpu.step_model import StepModel, StepTensor, made_up

TYPES = ("bfloat16", "int8", "int4")
CAPACITY = 8448
_ALIGNMENT = 4096  # of a constant in the file of weights
_MOST_VALUES = 1 << 20  # bytes of a constant that is kept with the engine


@dataclass(frozen=True)
class Shape:
    """A Llama's sizes."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int


SHAPES = {
    "1b": Shape(hidden=2048, intermediate=8192, layers=16, heads=32, kv_heads=8, vocab=128256),
    "8b": Shape(hidden=4096, intermediate=14336, layers=32, heads=32, kv_heads=8, vocab=128256),
}


@dataclass
class _Offsets:
    """A file of weights that is never written: where each constant would be, and how to read it."""

    name: str = "weights.bin"
    size: int = 0
    reads: dict[int, Callable[[], NDArray[np.generic]]] = field(default_factory=dict)

    def place(self, size: int, read: Callable[[], NDArray[np.generic]]) -> int:
        offset = -(-self.size // _ALIGNMENT) * _ALIGNMENT
        self.size, self.reads[offset] = offset + size, read
        return offset


def write_hollow_llama(shape: Shape, folder: Path) -> None:
    """Write a checkpoint whose tensors have sizes and no values: a sparse file."""
    kv = shape.hidden // shape.heads * shape.kv_heads
    tensors = {"model.embed_tokens.weight": (shape.vocab, shape.hidden), "model.norm.weight": (shape.hidden,)}
    tensors["lm_head.weight"] = (shape.vocab, shape.hidden)
    for layer in range(shape.layers):
        for name, size in {
            "input_layernorm": (shape.hidden,),
            "post_attention_layernorm": (shape.hidden,),
            "self_attn.q_proj": (shape.hidden, shape.hidden),
            "self_attn.k_proj": (kv, shape.hidden),
            "self_attn.v_proj": (kv, shape.hidden),
            "self_attn.o_proj": (shape.hidden, shape.hidden),
            "mlp.gate_proj": (shape.intermediate, shape.hidden),
            "mlp.up_proj": (shape.intermediate, shape.hidden),
            "mlp.down_proj": (shape.hidden, shape.intermediate),
        }.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = size
    at, header = 0, {}
    for name, size in tensors.items():
        end = at + 2 * int(np.prod(size))
        header[name] = {"dtype": "BF16", "shape": size, "data_offsets": (at, end)}
        at = end
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": shape.vocab,
        "hidden_size": shape.hidden, "intermediate_size": shape.intermediate, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0, "max_position_embeddings": 2 * CAPACITY, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "hidden_act": "silu",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def model_of(shape: Shape, kind: str) -> StepModel:
    """Return the target's step with weights of one of `TYPES`, as a plan would have it."""
    with tempfile.TemporaryDirectory() as folder:
        write_hollow_llama(shape, Path(folder))
        model = export_target(defer_decoder(Path(folder), "float32"), CAPACITY)
        whole = kind == "bfloat16"
        quantize("target", model, None if whole else WeightForm(4 if kind == "int4" else 8, 8))
        lower("target", model, "cuda", rows=1, kv_cache="bfloat16" if whole else "float16")
        limits = dict.fromkeys(names.SYMBOLS, 600) | {names.VIEW: CAPACITY, names.ROWS: 1, names.ROW_EDGES: 2}
        weights = _Offsets()
        dtype: WeightType = "bfloat16" if whole else "float32"
        engine = Emitter("target", model.graph, limits, weights, HANDLERS, dtype).emit()
        values = {}
        for name in engine.constants.keys() - made_up(engine).keys():
            place = engine.constants[name]
            assert place.size <= _MOST_VALUES, f"{name} has {place.size} bytes, and no kernel says how to fill it"
            values[name] = base64.b64encode(weights.reads[place.offset]().tobytes()).decode()
    caches = {names.cache_output(value.name or "") for value in model.graph.inputs}
    bound = [*model.graph.inputs, *(value for value in model.graph.outputs if value.name not in caches)]
    return StepModel(
        engine=engine,
        weights_size=weights.size,
        capacity=CAPACITY,
        tensors=tuple(map(_tensor, bound)),
        values=dict(sorted(values.items())),
    )


def engine_of(shape: Shape, kind: str) -> KernelEngine:
    """Return the engine of `model_of`."""
    return model_of(shape, kind).engine


def _tensor(value: ir.Value) -> StepTensor:
    assert value.name
    assert value.shape is not None
    assert value.dtype is not None
    dtype = {"FLOAT": "float32"}.get(value.dtype.name, value.dtype.name.lower())
    shape = tuple(each if isinstance(each, int) else str(each.value) for each in value.shape)
    return StepTensor.model_validate({"name": value.name, "dtype": dtype, "shape": shape})
