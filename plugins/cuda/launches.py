"""Launches of ops' kernels on a device: a kernel, its parameters in order, and the numbers of blocks and threads.

This is data: a kernel's parameters are the op's tensors, its workspace, and numbers; a float is passed as the bits of a
float32. `csrc/cuda/*.cu.h` has the kernels.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from outrider.plugins.schema import SLOT, OpSchema

THREADS = 256
ROW_THREADS = 512  # for kernels whose few blocks read much: the most that a block may have (csrc/cuda/block.h)

# Dtypes of a KV cache on a device, in the kernels' numbering (csrc/cuda/element.h).
ELEMENTS = ("float32", "float16", "bfloat16")

Sizes = Mapping[str, int]
"""Sizes of an op by symbol: those of its tensors, and the extents of the call."""


@dataclass(frozen=True)
class Scratch:
    """A part of an op's workspace: `size` gives its bytes from the op's largest sizes; `zeroed`: it starts as zeros."""

    size: Callable[[Sizes], int]
    zeroed: bool = False


@dataclass(frozen=True)
class Launch:
    """A kernel's parameters: names of tensors and of scratch, then of sizes (symbols) and attributes, as int64.

    `blocks` and `threads` compute the numbers of blocks, and of threads per block, from the sizes of the call.
    """

    kernel: str
    pointers: tuple[str, ...]
    numbers: tuple[str, ...]
    blocks: Callable[[Sizes], int]
    threads: Callable[[Sizes], int] = lambda sizes: THREADS
    scratch: Mapping[str, Scratch] = field(default_factory=dict)


STATUS = "status"  # int64 [1]: 0, or the number of a fault (FAULTS); shared by all ops of a session
FAULTS = {
    1: "the logits contain NaN",
    2: "the logits are -inf for every token",
    3: "an index, a branch or a drafter's probability is out of range",
}

COUNTER = {"counter": Scratch(lambda s: 8, zeroed=True)}  # of blocks that have ended


def as_number(kind: type[int] | type[float], value: int | float) -> int:
    """Return an attribute as kernels take it: an integer, or the bits of a float32."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0]) if kind is float else int(value)


def move_unit(sizes: Sizes) -> int:
    """Return the bytes that a thread moves at once, a divisor of a slot's bytes."""
    slot = sizes[SLOT] * sizes["itemsize"]
    return next(unit for unit in (16, 4, 2) if slot % unit == 0)


def make_launch(
    schema: OpSchema,
    kernel: str,
    numbers: tuple[str, ...],
    blocks: Callable[[Sizes], int],
    threads: Callable[[Sizes], int] = lambda sizes: THREADS,
    scratch: Mapping[str, Scratch] | None = None,
) -> Launch:
    """Return the launch of a kernel that takes the op's tensors, in the schema's order, its scratch, and `numbers`."""
    pointers = (*(spec.name for spec in schema.tensors), *(scratch or {}))
    return Launch(kernel, pointers, numbers, blocks, threads, scratch or {})
