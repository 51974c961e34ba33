"""Kernels of the backend `cuda` give what the references give, to the bit: as fibers, as PTX, and on a GPU (`-m gpu`).

The references are the CPU kernels' own: a product, a norm and an attention have the same bits on both.
"""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from outrider.compiler.kernels.code import MOST_KEPT, MOST_STACK, Nodes, Word, write
from outrider.compiler.kernels.sizes import size
from outrider.plugins.cuda.compile import SOURCES, compile_kernels
from outrider.plugins.cuda.engine_kernels import (
    CHUNK,
    ENGINE_KERNELS,
    FORMS,
    attention_bytes,
    attention_room,
    half_bytes,
    quant_bytes,
)
from outrider.plugins.cuda.launches import ELEMENTS
from outrider.plugins.onnx_ops.layers import UNITS
from outrider.plugins.quant_layout import QuantLayout, pack
from outrider.plugins.reference import lanes_attention
from outrider.plugins.reference.lanes import gated_unit, ordered_matmul
from outrider.plugins.reference.quant_matmul import dequantize, quant_matmul, quantize_rows
from tests.plugins.emulator import Emulator
from tests.plugins.engine_driver import launch, real
from tests.plugins.gpu import Gpu
from tests.plugins.test_cpu_rows import gated_unit as gated_unit_of_cpu
from tests.plugins.test_cpu_rows import norm

Kernels = Emulator | Gpu
POISON = np.float32(-77)
INTEGERS = FORMS.index("int8")
FORM_TYPES = (np.float32, np.uint16, np.uint16, np.int8)  # by FORMS
ROWS = (1, 2, 7, 8, 16, 32, 37)
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_100", "sm_120")
"""Beside sm_90, for which every plan of the tests is built."""


def poisoned(*shape: int) -> NDArray[np.float32]:
    return np.full(shape, POISON, np.float32)


def normal(rng: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    return rng.normal(size=shape).astype(np.float32)


def narrowed(x: NDArray[np.float32], dtype: str) -> NDArray[np.uint16]:
    """The bits of numbers as float16 or bfloat16."""
    return x.astype(np.float16 if dtype == "float16" else ml_dtypes.bfloat16).view(np.uint16)


def widened(bits: NDArray[np.uint16], dtype: str) -> NDArray[np.float64]:
    return bits.view(np.float16 if dtype == "float16" else ml_dtypes.bfloat16).astype(np.float64)


class Written:
    """Rows that a kernel writes in one of FORMS: of integers, with their scales and sums."""

    def __init__(self, form: str, rows: int, size: int) -> None:
        self.form, self.number = form, FORMS.index(form)
        self.to = np.full((rows, size), 77, FORM_TYPES[self.number])
        self.scales, self.sums = poisoned(rows, size // 32), np.full((rows, size // 32), -77, np.int32)

    def check(self, expected: NDArray[np.float32]) -> None:
        if self.form != "int8":
            wanted = expected if self.form == "float32" else narrowed(expected, self.form)
            np.testing.assert_array_equal(self.to, wanted)
            return
        integers, factors = quantize_rows(expected)
        np.testing.assert_array_equal(self.to, integers.reshape(self.to.shape))
        np.testing.assert_array_equal(self.scales, factors)
        np.testing.assert_array_equal(self.sums, integers.sum(-1))


class Quantised:
    """Random weights `[outputs, inputs]`: what they are as floats' parts, and packed."""

    def __init__(
        self, rng: np.random.Generator, outputs: int, inputs: int, bits: int, minimums: bool = False, wide: bool = False
    ) -> None:
        low, high = (0, 2**bits) if minimums else (-(2 ** (bits - 1)), 2 ** (bits - 1))
        self.integers = rng.integers(low, high, (outputs, inputs)).astype(np.uint8 if minimums else np.int8)
        kind = np.float32 if wide else np.float16
        self.scales = (rng.random((outputs, inputs // 32)) / 50).astype(kind).astype(np.float32)
        least = -(rng.random((outputs, inputs // 32)) / 9).astype(kind).astype(np.float32)
        self.minimums = least if minimums else None
        self.bits, self.outputs, self.inputs = bits, outputs, inputs
        self.packed = pack(*self.parts, QuantLayout(outputs, inputs, bits, wide, minimums))
        self.numbers = {"inputs": inputs, "bits": bits, "wide": int(wide), "minimums": int(minimums)}

    @property
    def parts(self) -> tuple[NDArray[Any], NDArray[np.float32], NDArray[np.float32] | None]:
        return self.integers, self.scales, self.minimums

    def multiply(
        self, kernels: Kernels, x: NDArray[np.float32], written: Written, *, unit: int = 0, blocks: int = 2, **more: Any
    ) -> None:
        """Launch the product of `x` as integers; with a unit, of half as many outputs."""
        rows = len(x)
        words, factors = quantize_rows(x)
        launch(
            kernels, "outrider_quant_product",
            {
                "integers": words.reshape(x.shape).astype(np.int8), "scales": factors,
                "sums": words.sum(-1).astype(np.int32), "packed": self.packed, "to": written.to,
                "to_scales": written.scales, "to_sums": written.sums, **more,
            },
            {**self.numbers, "rows": rows, "outputs": self.outputs >> unit, "unit": unit, "form": written.number},
            blocks * -(-rows // 32), shared=quant_bytes(self.bits, rows),
        )  # fmt: skip

    def gated(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """The reference's product with a gated unit after it."""
        both = quant_matmul(x, *self.parts)
        return gated_unit(both[:, : self.outputs // 2], both[:, self.outputs // 2 :])


def multiply_halves(
    kernels: Kernels, x: NDArray[np.uint16], weight: NDArray[np.uint16], dtype: str, written: Written, *,
    unit: int = 0, blocks: int = 2, **more: Any,
) -> None:  # fmt: skip
    (rows, inputs), element = x.shape, ELEMENTS.index(dtype)
    launch(
        kernels, "outrider_half_product", {"x": x, "weight": weight, "to": written.to, **more},
        {
            "rows": rows, "inputs": inputs, "outputs": len(weight) >> unit, "element": element, "unit": unit,
            "form": written.number,
        },
        blocks * -(-rows // 32), shared=half_bytes(rows),
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_kernels_compile(architecture: str) -> None:
    cubin = compile_kernels(architecture, "engine.cu")
    assert all(name.encode() in cubin for name in ENGINE_KERNELS)


def test_the_words_of_code_are_those_of_the_kernel() -> None:
    text = (SOURCES / "cuda" / "engine" / "evaluate.cu.h").read_text(encoding="utf-8")
    listed = re.sub(r"//[^\n]*", "", text[text.index("enum class Word") : text.index("};")])
    names = re.findall(r"\bk(\w+)", listed)
    assert [re.sub(r"(?<!^)(?=[A-Z])", "_", name).upper() for name in names] == [word.name for word in Word]
    assert f"kMostKept = {MOST_KEPT}, kMostStack = {MOST_STACK}" in text


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_products_have_the_bits_of_the_reference_in_any_number_of_rows(
    engine_kernels: Kernels, rows: int, turned: bool
) -> None:
    rng = np.random.default_rng(rows)
    x, weight, to = normal(rng, rows, 40), normal(rng, 40, 300), poisoned(rows, 300)
    launch(
        engine_kernels, "outrider_product",
        {"x": x, "weight": np.ascontiguousarray(weight.T) if turned else weight, "to": to},
        {"rows": rows, "inputs": 40, "outputs": 300, "turned": int(turned)}, 2 * -(-rows // 8),
    )  # fmt: skip
    np.testing.assert_array_equal(to, ordered_matmul(x, weight))


@pytest.mark.parametrize("size", [16, 24, 64, 200, 4160])
@pytest.mark.parametrize("added", [False, True])
def test_norms_have_the_bits_of_the_cpu(engine_kernels: Kernels, size: int, added: bool) -> None:
    rng = np.random.default_rng(size)
    x, more, weight, total = normal(rng, 5, size), normal(rng, 5, size), normal(rng, size), poisoned(5, size)
    written = Written("float32", 5, size)
    tensors = {"x": x, "weight": weight, "normed": written.to} | ({"added": more, "sum": total} if added else {})
    numbers = {"size": size, "epsilon": real(1e-6), "form": 0}
    launch(engine_kernels, "outrider_rms_norm", tensors, numbers, 5, shared=4 * size)
    expected = norm(x[None], weight, more[None] if added else None, summed=added)
    written.check(expected[0][0])
    if added:
        np.testing.assert_array_equal(total, expected[1][0])


@pytest.mark.parametrize("form", FORMS[1:])
def test_a_norm_leaves_its_rows_in_the_form_that_products_read(engine_kernels: Kernels, form: str) -> None:
    rng = np.random.default_rng(2)
    x, weight, written = normal(rng, 3, 96), normal(rng, 96), Written(form, 3, 96)
    launch(
        engine_kernels, "outrider_rms_norm",
        {"x": x, "weight": weight, "normed": written.to, "scales": written.scales, "sums": written.sums},
        {"size": 96, "epsilon": real(1e-6), "form": written.number}, 3, shared=4 * 96,
    )  # fmt: skip
    written.check(norm(x[None], weight)[0][0])


@pytest.mark.parametrize("unit", [*UNITS.values()])
def test_gated_units_have_the_bits_of_the_cpu(engine_kernels: Kernels, unit: str) -> None:
    both, to = normal(np.random.default_rng(0), 3, 2 * 37) * 8, poisoned(3, 37)
    both[0, :6] = [0.0, -0.0, 90.0, -90.0, np.nan, np.inf]
    numbers = {"rows": 3, "size": 37, "unit": 1 + list(UNITS.values()).index(unit)}
    launch(engine_kernels, "outrider_gated_unit", {"both": both, "to": to}, numbers, 1)
    np.testing.assert_array_equal(to, gated_unit_of_cpu(unit, both[None])[0])


@pytest.mark.parametrize(
    ("bits", "minimums", "wide"), [(4, False, False), (4, True, True), (8, False, True), (8, True, False)]
)
@pytest.mark.parametrize("rows", ROWS)
def test_quantised_products_have_the_bits_of_the_reference(
    engine_kernels: Kernels, rows: int, bits: int, minimums: bool, wide: bool
) -> None:
    rng = np.random.default_rng(100 * rows + bits)
    weights, x = Quantised(rng, 40, 320, bits, minimums, wide), normal(rng, rows, 320)
    x[0, 32:64] = 0.0
    formed, blocks = Written("int8", rows, 320), rows * 10
    launch(
        engine_kernels, "outrider_form", {"x": x, "to": formed.to, "scales": formed.scales, "sums": formed.sums},
        {"blocks": blocks, "form": INTEGERS}, -(-blocks // 8),
    )  # fmt: skip
    formed.check(x)
    weights.multiply(engine_kernels, x, written := Written("float32", rows, 40))
    written.check(quant_matmul(x, *weights.parts))


@pytest.mark.parametrize(("bits", "minimums", "wide"), [(4, False, False), (8, True, True)])
def test_rows_of_quantised_weights_are_looked_up(
    engine_kernels: Kernels, bits: int, minimums: bool, wide: bool
) -> None:
    weights = Quantised(np.random.default_rng(bits), 70, 64, bits, minimums, wide)
    ids, to = np.array([3, 69, 0, 33, 70, -1]), poisoned(6, 64)
    tensors = {"ids": ids, "packed": weights.packed, "to": to}
    launch(engine_kernels, "outrider_quant_gather", tensors, {**weights.numbers, "count": 6, "outputs": 70}, 2)
    np.testing.assert_array_equal(to[:4], dequantize(*weights.parts)[ids[:4]])
    assert not to[4:].any()


@pytest.mark.parametrize("form", ["float32", "int8"])
@pytest.mark.parametrize("rows", [1, 19, 37])
def test_a_quantised_product_with_a_gated_unit_after_it(engine_kernels: Kernels, rows: int, form: str) -> None:
    rng = np.random.default_rng(rows)
    weights, x, written = Quantised(rng, 128, 96, 4), normal(rng, rows, 96), Written(form, rows, 64)
    weights.multiply(engine_kernels, x, written, unit=1)
    written.check(weights.gated(x))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [3, 6, 9])
def test_quantised_products_of_more_turns_than_are_on_their_way(engine_kernels: Kernels, rows: int, bits: int) -> None:
    """Places in shared memory are used again, also from one half of a gated unit to the other."""
    rng = np.random.default_rng(rows)
    weights, x, written = Quantised(rng, 64, 1312, bits, True), normal(rng, rows, 1312), Written("float32", rows, 32)
    weights.multiply(engine_kernels, x, written, unit=1, blocks=1)
    written.check(weights.gated(x))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_products_are_of_the_row_alone(engine_kernels: Kernels, dtype: str) -> None:
    """Near the exact product, and each row with the same bits in any company."""
    rng = np.random.default_rng(3)
    x, weight = normal(rng, max(ROWS), 288), narrowed(normal(rng, 75, 288), dtype)
    found = {}
    for rows in ROWS:
        own, halves, written = np.ascontiguousarray(x[-rows:]), Written(dtype, rows, 288), Written("float32", rows, 75)
        numbers = {"blocks": own.size // 32, "form": halves.number}
        launch(engine_kernels, "outrider_form", {"x": own, "to": halves.to}, numbers, 3)
        halves.check(own)
        multiply_halves(engine_kernels, halves.to, weight, dtype, written, blocks=3)
        exact = widened(halves.to, dtype) @ widened(weight, dtype).T
        np.testing.assert_allclose(written.to, exact, rtol=0, atol=2e-5 * np.sqrt(288))  # float32 sums of about 17
        found[rows] = written.to
    for rows in ROWS:
        np.testing.assert_array_equal(found[rows], found[max(ROWS)][-rows:])


def test_rows_of_half_weights_are_looked_up(engine_kernels: Kernels) -> None:
    weight = narrowed(normal(np.random.default_rng(1), 70, 64), "bfloat16")
    ids, to = np.array([3, 69, 0, 70, -1]), poisoned(5, 64)
    launch(
        engine_kernels, "outrider_half_gather", {"ids": ids, "weight": weight, "to": to},
        {"count": 5, "inputs": 64, "outputs": 70, "element": ELEMENTS.index("bfloat16")}, 2,
    )  # fmt: skip
    np.testing.assert_array_equal(to[:3], widened(weight, "bfloat16")[ids[:3]].astype(np.float32))
    assert not to[3:].any()


def test_a_half_product_with_a_gated_unit_after_it(engine_kernels: Kernels) -> None:
    """As the product of both halves, and then the unit."""
    rng, dtype = np.random.default_rng(4), "bfloat16"
    x, weight = (narrowed(normal(rng, n, 64), dtype) for n in (5, 64))
    whole, gated = Written("float32", 5, 64), Written(dtype, 5, 32)
    multiply_halves(engine_kernels, x, weight, dtype, whole)
    multiply_halves(engine_kernels, x, weight, dtype, gated, unit=1, blocks=1)
    gated.check(gated_unit(whole.to[:, :32], whole.to[:, 32:]))


@pytest.mark.parametrize("rows", [1, 37])
def test_products_are_added_to_the_residual_stream(engine_kernels: Kernels, rows: int) -> None:
    rng, dtype = np.random.default_rng(rows), "float16"
    weights, residual = Quantised(rng, 40, 96, 8), normal(rng, rows, 40)
    x, matrix = normal(rng, rows, 96), narrowed(normal(rng, 40, 96), dtype)
    for quantised in (True, False):
        plain, summed = Written("float32", rows, 40), Written("float32", rows, 40)
        for written, more in ((plain, {}), (summed, {"residual": residual})):
            if quantised:
                weights.multiply(engine_kernels, x, written, **more)
            else:
                multiply_halves(engine_kernels, narrowed(x, dtype), matrix, dtype, written, **more)
        summed.check(residual + plain.to)


def attend(
    kernels: Kernels,
    queries: NDArray[np.float32],
    caches: NDArray[np.generic],
    bias: NDArray[np.float32],
    splits: NDArray[np.int64],
    *,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    sinks: NDArray[np.float32] | None = None,
    at_once: int = 64,
    heads_at_once: int = 0,
    form: int = 0,
    keys_at_once: int = CHUNK,
) -> NDArray[np.generic]:
    """Attention of queries `[N, heads, D]` over KV caches `[2, R, kv_heads, C, D]`, as an engine launches it.

    Integers are returned times their scales.
    """
    tokens, heads, size = queries.shape
    _, rows, kv_heads, capacity, _ = caches.shape
    places, view = bias.shape[1:]
    lists, counts = np.full((tokens, view), -77, np.int32), np.full(tokens, -77, np.int32)
    launch(
        kernels, "outrider_visible", {"bias": bias, "row_splits": splits, "lists": lists, "counts": counts},
        {"rows": rows, "places": places, "view": view}, tokens,
    )  # fmt: skip
    chunks = -(-(min(view, window) if window else view) // CHUNK)
    out, group = np.zeros((tokens, heads, size), FORM_TYPES[form]), heads // kv_heads
    of_blocks = {"out_scales": poisoned(out.size // 32), "out_sums": np.zeros(out.size // 32, np.int32)}
    for first in range(0, tokens, at_once):
        count = min(at_once, tokens - first)
        own = heads_at_once or group
        room = attention_room(group, size, caches.dtype.itemsize) // CHUNK * keys_at_once
        partial, counters = poisoned(count, heads, chunks, 2 + size), np.zeros((count, heads // own), np.uint32)
        launch(
            kernels, "outrider_attend",
            {
                "queries": queries, "keys": caches[0], "values": caches[1], "row_splits": splits, "lists": lists,
                "counts": counts, "sinks": sinks, "partial": partial, "counters": counters, "out": out,
                **(of_blocks if form else {}),
            },
            {
                "rows": rows, "heads": heads, "kv_heads": kv_heads, "size": size, "capacity": capacity, "view": view,
                "chunks": chunks, "first_token": first, "window": window, "element": ELEMENTS.index(caches.dtype.name),
                "scale": real(scale), "softcap": real(softcap), "form": form, "at_once": own, "room": room,
            },
            count * heads // own * chunks, shared=attention_bytes(own, size, room),
        )  # fmt: skip
        assert not counters.any()
    if form != INTEGERS:
        return out
    np.testing.assert_array_equal(of_blocks["out_sums"], out.reshape(-1, 32).sum(-1))
    return (out.reshape(-1, 32) * of_blocks["out_scales"][:, None]).reshape(out.shape)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(
    ("softcap", "window", "sinks"), [(0.0, 0, False), (5.0, 0, False), (0.0, 300, False), (0.0, 7, True)]
)
def test_attention_has_the_bits_of_the_reference(
    engine_kernels: Kernels, dtype: type, softcap: float, window: int, sinks: bool
) -> None:
    """Two rows, keys that lie scattered, of tokens that see nothing, one key, or more than one chunk; launched at once,
    by two tokens, by head, and with little shared memory."""
    rng = np.random.default_rng(window)
    heads, kv_heads, size, capacity = 4, 2, 40, 640
    caches = rng.normal(size=(2, 2, kv_heads, capacity, size)).astype(dtype)
    splits = np.array([0, 3, 5])
    queries = rng.normal(size=(5, heads, size)).astype(np.float32)
    seen = rng.random((2, 3, 600)) < np.array([0.9, 0.5, 0.0])[:, None]
    seen[1, 1] = False
    seen[1, 1, 40] = True
    bias = np.where(seen, np.float32(0), np.finfo(np.float32).min)
    sink = rng.normal(size=heads).astype(np.float32) if sinks else None
    how = {"scale": 0.3, "softcap": softcap, "window": window, "sinks": sink}
    found = attend(engine_kernels, queries, caches, bias, splits, **how)  # type: ignore[arg-type]
    for ways in ({"at_once": 2}, {"heads_at_once": 1}, {"keys_at_once": 24}):
        again = attend(engine_kernels, queries, caches, bias, splits, **how, **ways)  # type: ignore[arg-type]
        np.testing.assert_array_equal(again, found)
    for token in range(5):
        row = int(token >= 3)
        slots = np.flatnonzero(seen[row, token - splits[row]])[-window:]
        for head in range(heads):
            own = caches[:, row, head // 2, slots].astype(np.float32)
            expected = lanes_attention.attend(
                queries[token, head], *own, scale=0.3, softcap=softcap, sink=None if sink is None else float(sink[head])
            )
            np.testing.assert_array_equal(found[token, head], expected, err_msg=f"token {token}, head {head}")


@pytest.mark.parametrize(
    ("group", "size", "form", "dtype"),
    [
        (16, 96, "int8", np.float16), (16, 64, "bfloat16", np.float32), (12, 128, "float16", ml_dtypes.bfloat16),
        (9, 80, "float32", np.float32), (7, 256, "float32", ml_dtypes.bfloat16), (1, 1024, "int8", np.float32),
    ],
)  # fmt: skip
def test_attention_of_wide_groups_leaves_what_products_read(
    engine_kernels: Kernels, group: int, size: int, form: str, dtype: type
) -> None:
    rng = np.random.default_rng(1)
    caches = rng.normal(size=(2, 1, 1, 600, size)).astype(dtype)
    queries = rng.normal(size=(2, group, size)).astype(np.float32)
    seen = rng.random((1, 2, 560)) < np.array([0.95, 0.0])[:, None]
    bias = np.where(seen, np.float32(0), np.finfo(np.float32).min)
    found = attend(engine_kernels, queries, caches, bias, np.array([0, 2]), scale=0.1, form=FORMS.index(form))
    slots = np.flatnonzero(seen[0, 0])
    expected = np.zeros_like(queries)
    for head in range(group):
        expected[0, head] = lanes_attention.attend(
            queries[0, head], *caches[:, 0, 0, slots].astype(np.float32), scale=0.1
        )
    if form == "int8":
        integers, scales = quantize_rows(expected.reshape(2, -1))
        expected = (integers.reshape(2, -1, 32).astype(np.int8) * scales[..., None]).reshape(expected.shape)
    elif form != "float32":
        expected = narrowed(expected, form)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("normed", [False, True])
def test_appending(engine_kernels: Kernels, dtype: str, normed: bool) -> None:
    """Queries and keys normed and half of each rotated, keys and values in the slots after those of each row."""
    rng = np.random.default_rng(6)
    heads, kv_heads, size, rotated, capacity = 4, 2, 24, 16, 9
    packed = rng.normal(size=(5, (heads + 2 * kv_heads) * size)).astype(np.float32)
    splits, past, positions = np.array([0, 2, 5]), np.array([7, 3]), np.array([4, 5, 0, 1, 9])
    angles = rng.random((10, rotated // 2)).astype(np.float32)
    cos, sin = np.cos(angles), np.sin(angles)
    norms = rng.normal(size=(2, size)).astype(np.float32)
    kind = np.dtype(np.float32) if dtype == "float32" else np.dtype(np.uint16)
    caches, queries = np.zeros((2, 2, kv_heads, capacity, size), kind), poisoned(5, heads, size)
    launch(
        engine_kernels, "outrider_append",
        {
            "query": packed, "key": packed, "value": packed, "row_splits": splits, "past_length": past,
            "positions": positions, "cos": cos, "sin": sin, "queries": queries, "keys": caches[0], "values": caches[1],
            **({"query_norm": norms[0], "key_norm": norms[1]} if normed else {}),
        },
        {
            "rows": 2, "heads": heads, "kv_heads": kv_heads, "size": size, "rotated": rotated, "capacity": capacity,
            "query_stride": packed.shape[1], "kv_stride": packed.shape[1], "query_place": 0,
            "key_place": heads * size, "value_place": (heads + kv_heads) * size, "element": ELEMENTS.index(dtype),
            "epsilon": real(1e-6), "limit": 10,
        },
        5 * (heads + kv_heads), 32,
    )  # fmt: skip
    split = packed.reshape(5, -1, size)

    def ready(head: NDArray[np.float32], token: int, weight: NDArray[np.float32]) -> NDArray[np.float32]:
        if normed:
            partial = np.zeros(8, np.float32)
            for part in head.reshape(-1, 8):
                partial = partial + part * part
            total = np.float32(0)
            for each in partial:
                total = total + each
            factor = np.float32(1) / np.sqrt(total / np.float32(size) + np.float32(1e-6))
            head = head * factor * weight
        c, s = cos[positions[token]], sin[positions[token]]
        first, second = head[:8], head[8:16]
        return np.concatenate((first * c - second * s, second * c + first * s, head[16:]))

    def kept(x: NDArray[np.float32]) -> NDArray[np.generic]:
        return x if dtype == "float32" else narrowed(x, dtype)

    used = np.zeros(caches.shape[1:], bool)
    for token, (row, slot) in enumerate([(0, 7), (0, 8), (1, 3), (1, 4), (1, 5)]):
        for head in range(heads):
            np.testing.assert_array_equal(queries[token, head], ready(split[token, head], token, norms[0]))
        for head in range(kv_heads):
            used[row, head, slot] = True
            key = ready(split[token, heads + head], token, norms[1])
            np.testing.assert_array_equal(caches[0, row, head, slot], kept(key))
            np.testing.assert_array_equal(caches[1, row, head, slot], kept(split[token, heads + kv_heads + head]))
    assert not caches[:, ~used].any()


def test_scattering(engine_kernels: Kernels) -> None:
    places = np.array([[3, 0, 99], [1, -1, 4]])
    given = np.arange(6, dtype=np.float32).reshape(2, 3) + 1
    to = poisoned(2, 5)
    numbers = {"rows": 2, "width": 5, "count": 3, "value": 0, "real": 1}
    launch(engine_kernels, "outrider_scatter", {"to": to, "places": places, "given": given}, numbers, 1)
    expected = poisoned(2, 5)
    expected[0, 3], expected[0, 0], expected[1, 1], expected[1, 4] = 1, 2, 4, 6
    np.testing.assert_array_equal(to, expected)


def test_small_tensors_are_evaluated(engine_kernels: Kernels) -> None:
    """On code as the emitter writes it: element i is 3 * i + N."""
    nodes, to = Nodes(), np.full(300, -77)
    rule = nodes.apply(Word.ADD, nodes.apply(Word.MULTIPLY, nodes.index, nodes.constant(3)), nodes.size(size("N")))
    code = np.array(write(rule).words, np.int64)
    ones = dict.fromkeys(ENGINE_KERNELS["outrider_evaluate"].numbers, 1)
    numbers = {**ones, "elements": 300, "length": len(code), "real": 0, "N": 7}
    launch(engine_kernels, "outrider_evaluate", {"to": to, "code": code}, numbers, 2)
    np.testing.assert_array_equal(to, 3 * np.arange(300) + 7)
