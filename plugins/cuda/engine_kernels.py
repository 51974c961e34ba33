"""Kernels that engines of the backend `cuda` are made of: the parameters of each, in order, by name.

`csrc/cuda/engine/*.cu.h` has the kernels. Tensors are addresses, numbers int64; a real number is passed as the bits of
a float32.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from outrider.plans import names
from outrider.plans.kernel_engine import Parameters
from outrider.plugins.cuda.launches import ELEMENTS, ROW_THREADS, THREADS
from outrider.plugins.ops import OPS


@dataclass(frozen=True)
class EngineKernel:
    """A kernel's parameters. Tensors of `optional` may be left out; a block has from `least_threads` to THREADS."""

    name: str
    tensors: tuple[str, ...]
    numbers: tuple[str, ...]
    optional: frozenset[str] = frozenset()
    least_threads: int = THREADS


_SOURCES = tuple(f"source.{i}" for i in range(8))

ENGINE_KERNELS = {
    kernel.name: kernel
    for kernel in (
        EngineKernel(
            "outrider_evaluate", ("to", "code", *_SOURCES), ("elements", "length", "real", *names.SYMBOLS),
            frozenset(_SOURCES),
        ),
        EngineKernel(
            "outrider_scatter", ("to", "places", "given"), ("rows", "width", "count", "value", "real"),
            frozenset({"given"}),
        ),
        EngineKernel(
            "outrider_rms_norm", ("x", "weight", "added", "normed", "scales", "sums", "sum"),
            ("size", "epsilon", "form"),
            frozenset({"added", "sum", "scales", "sums"}),
        ),
        EngineKernel("outrider_gated_unit", ("both", "to"), ("rows", "size", "unit")),
        EngineKernel(
            "outrider_form", ("x", "to", "scales", "sums"), ("blocks", "form"), frozenset({"scales", "sums"})
        ),
        EngineKernel("outrider_product", ("x", "weight", "to"), ("rows", "inputs", "outputs", "turned")),
        EngineKernel(
            "outrider_half_product", ("x", "weight", "residual", "to", "to_scales", "to_sums"),
            ("rows", "inputs", "outputs", "element", "unit", "form"), frozenset({"residual", "to_scales", "to_sums"}),
        ),
        EngineKernel("outrider_half_gather", ("ids", "weight", "to"), ("count", "inputs", "outputs", "element")),
        EngineKernel(
            "outrider_quant_product",
            ("integers", "scales", "sums", "packed", "residual", "to", "to_scales", "to_sums"),
            ("rows", "inputs", "outputs", "bits", "wide", "minimums", "unit", "form"),
            frozenset({"residual", "to_scales", "to_sums"}),
        ),
        EngineKernel(
            "outrider_quant_gather", ("ids", "packed", "to"), ("count", "inputs", "outputs", "bits", "wide", "minimums")
        ),
        EngineKernel(
            "outrider_visible", ("bias", "row_splits", "lists", "counts"), ("rows", "places", "view")
        ),
        EngineKernel(
            "outrider_append",
            (
                "query", "key", "value", "row_splits", "past_length", "positions", "cos", "sin", "query_norm",
                "key_norm", "queries", "keys", "values",
            ),
            (
                "rows", "heads", "kv_heads", "size", "rotated", "capacity", "query_stride", "kv_stride", "query_place",
                "key_place", "value_place", "element", "epsilon", "limit",
            ),
            frozenset({"query", "queries", "positions", "cos", "sin", "query_norm", "key_norm"}),
            least_threads=32,
        ),
        EngineKernel(
            "outrider_attend",
            (
                "queries", "keys", "values", "row_splits", "lists", "counts", "sinks", "partial", "counters", "out",
                "out_scales", "out_sums",
            ),
            (
                "rows", "heads", "kv_heads", "size", "capacity", "view", "chunks", "first_token", "window", "element",
                "scale", "softcap", "form", "at_once", "room",
            ),
            frozenset({"sinks", "out_scales", "out_sums"}),
        ),
    )
}  # fmt: skip

_WRITTEN = {
    "to", "to_scales", "to_sums", "normed", "scales", "sums", "sum", "lists", "counts", "queries", "keys", "values",
    "partial", "counters", "out", "out_scales", "out_sums",
}  # fmt: skip
"""Tensors that some kernel writes to: none of these is ever a constant."""


def _places(kernel: EngineKernel, chosen: Set[str]) -> frozenset[int]:
    return frozenset(place for place, name in enumerate(kernel.tensors) if name in chosen)


PARAMETERS = {
    kernel.name: Parameters(
        len(kernel.tensors),
        len(kernel.numbers),
        _places(kernel, kernel.optional),
        _places(kernel, _WRITTEN),
        (kernel.least_threads, THREADS),
    )
    for kernel in ENGINE_KERNELS.values()
} | {
    op.launch.kernel: Parameters(len(op.launch.pointers), len(op.launch.numbers), threads=(1, ROW_THREADS))
    for op in OPS.values()
    if op.launch
}
"""All kernels that an engine may launch, those of our ops too, which take all their tensors."""

FORMS = (*ELEMENTS, "int8")
"""Forms in which kernels leave numbers for products, in the kernels' numbering (`engine/form.h`)."""

INTEGERS = FORMS.index("int8")

CHUNK = 256
"""Keys that are summed by themselves (kChunk of `engine/attention.cu.h`)."""

MOST_HEAD = 1024
"""Numbers of a head, at most."""

MOST_SHARED = 98 * 1024
"""Bytes of dynamic shared memory that a block may have on every GPU: compute capability 8.6, 8.9 and 12 have least."""

HEAD_STEP = 8
"""Heads that attend have a multiple of 8 numbers (`load_eight` of `engine/attention.cu.h`)."""


def attention_room(group: int, size: int, itemsize: int) -> int:
    """Return the bytes of shared memory for keys, and then values, of heads of `size` numbers: for all of a chunk where
    that fits beside what `group` query heads need, and for four at least (`Staged` of `engine/attention.cu.h`)."""
    stride = (size * itemsize // 16 | 1) * 16
    left = MOST_SHARED - 4 * (CHUNK + (CHUNK + size + 1) * group)
    return stride * max(4, min(CHUNK, left // stride // 4 * 4))


def attention_bytes(at_once: object, size: int, room: int) -> str:
    """Return a formula of the bytes of shared memory that a block of `outrider_attend` is launched with.

    They hold `room`; for each of `at_once` query heads, a number or a formula, of `size` numbers weights, query and
    highest score; and the slots.
    """
    return f"{room + 4 * CHUNK} + {4 * (CHUNK + size + 1)} * ({at_once})"


_WARPS, _COLUMNS = 8, 32  # of a product's block: warps (kQuantWarps, kHalfWarps), and outputs
_HALF_AHEAD = 4 * 2048  # bytes of weights of a warp (kHalfAhead tiles)


def quant_bytes(bits: int, rows: object) -> str:
    """Return a formula of the bytes of shared memory that a block of `outrider_quant_product` needs in a step of `rows`
    rows: a number, or a formula.

    Blocks of weights are on their way there, and those of inputs where there are up to 8 rows; up to 32 rows have the
    products of each warp, and their scales and sums, and few of them twice (`engine/quant_product.cu.h`).
    """
    deep = 8 // bits  # blocks of a warp in a turn of few rows
    inputs = _WARPS * 4 * deep * (8 * 32 + 8 * _WARPS)  # CopiedInputs::kBytes
    twice = f"max(2 * min({rows}, {8 // deep}), min({rows}, 8))"
    few = f"{_ahead(bits, 4 * deep) + inputs} + {_of_row(deep)} * {twice}"
    many = f"{_ahead(bits, 5 if bits == 4 else 4)} + {_of_row(1)} * min({rows}, 32)"
    past = f"min(1, max(0, {rows} - 8))"
    return f"({few}) * (1 - {past}) + ({many}) * {past}"


def _ahead(bits: int, blocks: int) -> int:
    """Return QuantAhead::kOfWarp of all warps, of `blocks` blocks."""
    return _WARPS * blocks * (bits // 4 * 640 + 256)


def _of_row(deep: int) -> int:
    """Return QuantShared::kOfRow."""
    return 4 * (deep * _WARPS * _COLUMNS + 4) + 8 * (deep * _WARPS + 2)


def half_bytes(rows: object) -> str:
    """Return the same of `outrider_half_product`: tiles of weights are on their way there, and the parts of its outputs
    meet, for 8 rows or for 32 (`engine/half_product.cu.h`)."""
    few, many = (_WARPS * (_HALF_AHEAD + _COLUMNS * 4 * (most + 1)) for most in (8, 32))
    return f"{few} + {many - few} * min(1, max(0, {rows} - 8))"


def norm_bytes(size: int) -> int:
    """Return the bytes of shared memory that a block of `outrider_rms_norm` needs: a row of `size` numbers."""
    return 4 * size
