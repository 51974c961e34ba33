"""A model's step for measuring: the engine's list of launches, its tensors, and how to make up its weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict

from plans import names
from plans.buffers import Strict, Tensor
from plans.kernel_engine import KernelEngine
from plugins.cuda.engine_kernels import ENGINE_KERNELS
from plugins.cuda.launches import ELEMENTS

_REAL = {"weight", "norm", "cos", "sin", "query_norm", "key_norm", "sinks"}  # parameters that are float32 constants


@dataclass(frozen=True)
class Fill:
    """32-bit words in blocks: first `random` random ones, then `base` with random bits where `mask` has ones."""

    block: int
    random: int
    base: int
    mask: int

    def words(self, most: int) -> NDArray[np.uint32]:
        """Return whole blocks, of up to `most` words where that is one block at least."""
        shape = max(1, most // self.block), self.block
        words = np.random.default_rng(1).integers(0, 2**32, shape, np.uint32)
        words[:, self.random :] = words[:, self.random :] & np.uint32(self.mask) ^ np.uint32(self.base)
        return words


FILLS = {
    "float32": Fill(1, 0, 0x3F000000, 0x007FFFFF),  # from 0.5 to 1
    "float16": Fill(1, 0, 0x24002400, 0x83FF83FF),  # from 1/64 to 1/32, of both signs
    "bfloat16": Fill(1, 0, 0x3C803C80, 0x807F807F),
}


class StepModel(Strict):
    """`weights_size` are the bytes of the file of weights, of which only the constants `values` are known."""

    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    engine: KernelEngine
    weights_size: int
    capacity: int
    tensors: tuple[Tensor, ...]
    values: dict[str, bytes]

    def sizes(self, rows: int, keys: int) -> dict[str, int]:
        """Return the sizes of a step of `rows` new tokens with `keys` keys in view."""
        ones = dict.fromkeys(names.SYMBOLS, 1) | {names.ROW_EDGES: 2, names.VIEW: keys, names.CAPACITY: self.capacity}
        return ones | dict.fromkeys((names.NEW, names.LOGITS, names.PLACES, names.FEATURED), rows)


def made_up(engine: KernelEngine) -> dict[str, Fill]:
    """Return how to fill the constants that may have any numbers: weights, which are never zeros here."""
    found: dict[str, Fill] = {}
    for launch, _ in engine.launches():
        if (spec := ENGINE_KERNELS.get(launch.kernel)) is None:
            continue
        numbers = dict(zip(spec.numbers, launch.numbers, strict=True))
        for parameter, name in zip(spec.tensors, launch.tensors, strict=True):
            if name not in engine.constants:
                continue
            if parameter == "packed":  # 32 rows of a block of 32 integers, their scales and minimums of about 0.01
                integers, wide = 32 * int(numbers["bits"]), int(numbers["wide"])
                scales = (16 << wide) * (1 + int(numbers["minimums"]))
                pattern = (0x3C23D70A, 0xFFFF) if wide else (0x211F211F, 0x000F000F)
                found[name] = Fill(integers + scales, integers, *pattern)
            elif parameter in _REAL:
                half = parameter == "weight" and "half" in launch.kernel
                found[name] = FILLS[ELEMENTS[int(numbers["element"])] if half else "float32"]
    return found
