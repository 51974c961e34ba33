"""Kernels that engines of the backend `cuda` are made of: the parameters of each, in order, by name.

`csrc/cuda/engine/*.cu.h` has the kernels. Tensors are addresses, numbers int64; a real number is passed as the bits of
a float32.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from plans import names
from plans.kernel_engine import Parameters
from plugins.cuda.launches import ELEMENTS, LAUNCHES, ROW_THREADS, THREADS


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
        EngineKernel(
            "outrider_normed_half_product", ("x", "norm", "weight", "to", "to_scales", "to_sums"),
            ("rows", "inputs", "outputs", "element", "unit", "form", "epsilon"), frozenset({"to_scales", "to_sums"}),
        ),
        EngineKernel("outrider_half_gather", ("ids", "weight", "to"), ("count", "inputs", "outputs", "element")),
        EngineKernel(
            "outrider_quant_product",
            ("integers", "scales", "sums", "packed", "residual", "to", "to_scales", "to_sums"),
            ("rows", "inputs", "outputs", "bits", "wide", "minimums", "unit", "form"),
            frozenset({"residual", "to_scales", "to_sums"}),
        ),
        EngineKernel(
            "outrider_normed_quant_product", ("x", "norm", "packed", "to", "to_scales", "to_sums"),
            ("rows", "inputs", "outputs", "bits", "wide", "minimums", "unit", "form", "epsilon"),
            frozenset({"to_scales", "to_sums"}),
        ),
        EngineKernel(
            "outrider_quant_gather", ("ids", "packed", "to"), ("count", "inputs", "outputs", "bits", "wide", "minimums")
        ),
        EngineKernel("outrider_entropy", ("logits", "to"), ("vocabulary",)),
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
                "scale", "softcap", "form",
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
} | {op.kernel: Parameters(len(op.pointers), len(op.numbers), threads=(1, ROW_THREADS)) for op in LAUNCHES.values()}
"""All kernels that an engine may launch, those of our ops too, which take all their tensors."""

FORMS = (*ELEMENTS, "int8")
"""Forms in which kernels leave numbers for products, in the kernels' numbering (`engine/form.h`)."""

INTEGERS = FORMS.index("int8")

UNITS = ("", "silu", "gelu_tanh")
"""Gated units behind a product, in the kernels' numbering (`engine/units.h`)."""

NORM_ROWS = 8
"""Rows that a product of halves norms by itself, at most (kNormRows of `engine/rms_norm.cu.h`)."""

QUANT_NORM_ROWS = 1
"""The same of a product of integers: normalizing more rows in each of its blocks takes longer than a launch."""

CHUNK = 256
"""Keys that are summed by themselves (kChunk of `engine/attention.cu.h`)."""

MOST_HEAD = 1024
"""Numbers of a head, at most."""

HEAD_STEP = 8
"""Heads that attend have a multiple of so many numbers (`load_eight` of `engine/attention.cu.h`)."""

_TILE_BYTES = 16384  # kTileBytes of engine/attention.cu.h


def attention_bytes(group: int, size: int) -> int:
    """Return the bytes of shared memory that a block of `outrider_attend` is launched with.

    They hold a tile of values, and for each of `group` query heads of `size` numbers weights, query and highest score;
    and the slots.
    """
    return _TILE_BYTES + 4 * (group * (CHUNK + size + 1) + CHUNK)


QUANT_ROWS = 32
"""Rows of a block of `outrider_quant_product` (kQuantRows of `engine/quant_product.cu.h`)."""

_QUANT_WARPS, _QUANT_STRIDE, _COLUMNS = 8, 260, 32  # kQuantWarps, kQuantStride, kColumns of the same file
_QUANT_AHEAD = {4: 6, 8: 4}  # QuantAhead::kBlocks, by bits


def quant_bytes(bits: int, rows: int) -> int:
    """Return the bytes of shared memory that a block of `outrider_quant_product` needs for a step of `rows` rows.

    Each warp has there the products, factors and sums of rows, up to 16 of them twice, the scales and minimums of
    weights, and blocks of weights on their way.
    """
    ahead = _QUANT_AHEAD[bits] * 32 * (4 * bits + 8)
    fixed, of_row = _QUANT_WARPS * (ahead + 2 * 8 * _COLUMNS), 4 * _QUANT_STRIDE + 8 * (_QUANT_WARPS + 2)
    return fixed + of_row * max(2 * min(rows, QUANT_ROWS // 2), min(rows, QUANT_ROWS))


def normed_quant_bytes(bits: int, inputs: int, rows: int = QUANT_NORM_ROWS) -> int:
    """Return the same of `outrider_normed_quant_product`: a row as floats and all rows as integers lie there too."""
    return quant_bytes(bits, rows) + 4 * inputs + rows * (inputs + inputs // 32 * 8)


def norm_bytes(size: int) -> int:
    """Return the bytes of shared memory that a block of `outrider_rms_norm` needs: a row of `size` numbers."""
    return 4 * size
