"""Llamas without weights, exported and lowered as for a plan: what their engines of the backend `cuda` launch."""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from compiler.checkpoint import defer_decoder
from compiler.engines.onnx_file import describe_engine
from compiler.export import export_target
from compiler.kernels import HANDLERS
from compiler.kernels.emitter import Emitter
from compiler.lowering import lower
from compiler.models.config import WeightType
from compiler.quantization.graph import quantize
from compiler.quantization.weight_form import WeightForm
from plans import names
from tools.gpu.step_model import StepModel, made_up
from tools.synthetic_llama import LlamaShape

TYPES = ("bfloat16", "int8", "int4")
CAPACITY = 8448
SHAPES = {"1b": LlamaShape(16, 2048, 8192, 32, 8, 128256), "8b": LlamaShape(32, 4096, 14336, 32, 8, 128256)}
_ALIGNMENT = 4096  # of a constant in the file of weights


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


def write_hollow_llama(shape: LlamaShape, folder: Path) -> None:
    """Write a checkpoint whose tensors have sizes and no values, its head apart from its embedding: a sparse file."""
    tensors: dict[str, tuple[int, ...]] = {"model.norm.weight": (shape.hidden,)}
    tensors |= dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (shape.vocabulary, shape.hidden))
    for layer in range(shape.layers):
        tensors |= {f"model.layers.{layer}.{name}.weight": size for name, size in shape.layer_tensors().items()}
    at, header = 0, {}
    for name, size in tensors.items():
        end = at + 2 * int(np.prod(size))
        header[name] = {"dtype": "BF16", "shape": size, "data_offsets": (at, end)}
        at = end
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    config = shape.config(2 * CAPACITY) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def model_of(shape: LlamaShape, kind: str) -> StepModel:
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
        known = {name: engine.constants[name] for name in sorted(engine.constants.keys() - made_up(engine).keys())}
        assert all(place.size <= 1 << 20 for place in known.values()), "no kernel says how to fill a constant"
        values = {name: weights.reads[place.offset]().tobytes() for name, place in known.items()}
    own = describe_engine(model, "target.json")
    bound = (*own.inputs, *(tensor for tensor in own.outputs if tensor.name not in own.aliases))
    return StepModel(engine=engine, weights_size=weights.size, capacity=CAPACITY, tensors=bound, values=values)
