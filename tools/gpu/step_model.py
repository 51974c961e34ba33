"""A model's step for measuring: the engine's list of launches, its tensors, and how to make up its weights."""

from __future__ import annotations

import base64
from math import prod
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from plans import names
from plans.buffers import Strict
from plans.kernel_engine import KernelEngine
from plugins.cuda.engine_kernels import ENGINE_KERNELS

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8}
_REAL = {"weight", "norm", "cos", "sin", "query_norm", "key_norm", "sinks"}  # parameters that are float32 constants


class StepTensor(Strict):
    """An input or an output of the engine; `shape` has sizes and symbols."""

    name: str
    dtype: Literal["float32", "float16", "bfloat16", "int64"]
    shape: tuple[int | str, ...]

    def bytes(self, sizes: dict[str, int]) -> int:
        return BYTES[self.dtype] * prod(sizes[each] if isinstance(each, str) else each for each in self.shape)


class StepModel(Strict):
    """`weights_size` are the bytes of the file of weights, of which only `values` are known (base64, by constant)."""

    engine: KernelEngine
    weights_size: int
    capacity: int
    tensors: tuple[StepTensor, ...]
    values: dict[str, str] = Field({})

    def value(self, name: str) -> NDArray[np.uint8]:
        return np.frombuffer(base64.b64decode(self.values[name]), np.uint8)

    def sizes(self, rows: int, keys: int) -> dict[str, int]:
        """Return the sizes of a step of `rows` new tokens with `keys` keys in view."""
        ones = dict.fromkeys(names.SYMBOLS, 1) | {names.ROW_EDGES: 2, names.VIEW: keys, names.CAPACITY: self.capacity}
        return ones | dict.fromkeys((names.NEW, names.LOGITS, names.PLACES, names.FEATURED), rows)


def made_up(engine: KernelEngine) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the constants whose numbers no result depends on: how `probe.cu` fills them, and its numbers.

    Packed blocks get random integers and plausible scales, halves and reals are uniform.
    """
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for launch, _ in engine.launches():
        spec = ENGINE_KERNELS.get(launch.kernel)
        for parameter, name in zip(spec.tensors if spec else (), launch.tensors, strict=spec is not None):
            if name not in engine.constants:
                continue
            assert spec is not None
            numbers = dict(zip(spec.numbers, launch.numbers, strict=True))
            if parameter == "packed":
                bits, wide, minimums = (int(numbers[each]) for each in ("bits", "wide", "minimums"))
                found[name] = "packed", (128 * bits, 32 * (1 + minimums), wide)
            elif parameter == "weight" and "half" in launch.kernel:
                found[name] = "halves", (int(numbers["element"]),)
            elif parameter in _REAL:
                found[name] = "reals", ()
    return found
