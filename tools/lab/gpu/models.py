"""Llamas without weights, exported and lowered as for a plan: what their engines of the backend `cuda` launch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.compiler.deferred import defer
from outrider.compiler.engines.onnx_file import describe_engine
from outrider.compiler.export import export_target
from outrider.compiler.kernels import HANDLERS
from outrider.compiler.kernels.emitter import Emitter
from outrider.compiler.lowering import lower
from outrider.compiler.models.config import WeightType, config_from
from outrider.compiler.models.decoder import Decoder
from outrider.compiler.quantization.graph import quantize
from outrider.compiler.quantization.weight_form import WeightForm
from outrider.compiler.slots import slots
from outrider.plans import names
from outrider.tools.lab.gpu.stages import StepModel
from outrider.tools.lab.synthetic_llama import LlamaShape

TYPES = ("bfloat16", "int8", "int4")
CAPACITY = 8448
SHAPES = {"1b": LlamaShape(16, 2048, 8192, 32, 8, 128256), "8b": LlamaShape(32, 4096, 14336, 32, 8, 128256)}
_RANDOM = ("decoder.", "tables.")  # what weights, cosines and sines are called; code of `evaluate` has values


class _Offsets:
    """A file of weights that is never written: where each constant would be, and how to read it."""

    def __init__(self) -> None:
        self.name, self.size = "weights.bin", 0
        self.reads: dict[int, Callable[[], NDArray[np.generic]]] = {}

    def place(self, size: int, read: Callable[[], NDArray[np.generic]]) -> int:
        offset = -(-self.size // 4096) * 4096  # at a page, as in a plan
        self.size, self.reads[offset] = offset + size, read
        return offset


def model_of(shape: LlamaShape, kind: str) -> StepModel:
    """Return the step of a target whose head is not its embedding, with weights of one of `TYPES`, as a plan has it."""
    raw = {**shape.config(2 * CAPACITY), "tie_word_embeddings": False}
    with torch.device("meta"):
        decoder = Decoder(config_from(raw, Path("config.json"), None, Path(), None)).eval()
    wanted = slots(decoder, str)
    zeros: Any = SimpleNamespace(read=lambda name: torch.zeros(wanted[name].shape), quantized=lambda name: None)
    defer(decoder, zeros, wanted, "float32")
    model = export_target(decoder, CAPACITY)
    whole = kind == "bfloat16"
    quantize("target", model, None if whole else WeightForm(4 if kind == "int4" else 8, 8))
    lower("target", model, "cuda", rows=1, kv_cache="bfloat16" if whole else "float16")
    limits = dict.fromkeys(names.SYMBOLS, 600) | {names.VIEW: CAPACITY, names.ROWS: 1, names.ROW_EDGES: 2}
    weights = _Offsets()
    dtype: WeightType = "bfloat16" if whole else "float32"
    engine = Emitter("target", model.graph, limits, weights, HANDLERS, dtype).emit()
    known = {name: place for name, place in engine.constants.items() if not name.startswith(_RANDOM)}
    values = {name: weights.reads[place.offset]().tobytes() for name, place in known.items()}
    own = describe_engine(model, "target.json")
    bound = (*own.inputs, *(tensor for tensor in own.outputs if tensor.name not in own.aliases))
    return StepModel(engine=engine, capacity=CAPACITY, tensors=bound, values=values)
