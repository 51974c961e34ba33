"""Products with weights, look-ups of their rows, and the forms in which they read their inputs.

What norms numbers, or computes them, leaves them in the form that the products after it read, where nothing else reads
them: float32, halves, or integers of 8 bits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import onnx_ir as ir

from outrider.compiler.kernels import indexing
from outrider.compiler.kernels.emitter import Cost, Emitter, Handler, spread
from outrider.compiler.kernels.sizes import Size, product, quotient, size
from outrider.compiler.kernels.values import (
    PendingProduct,
    ProductInput,
    Shape,
    Stored,
    Weight,
)
from outrider.plugins.cuda.engine_kernels import (
    FORMS,
    INTEGERS,
    half_bytes,
    quant_bytes,
)
from outrider.plugins.cuda.launches import THREADS
from outrider.plugins.onnx_ops.layers import UNITS
from outrider.plugins.quant_layout import BLOCK, QuantLayout
from outrider.plugins.schema import CPU_DOMAIN

_ROWS_AT_ONCE = 8  # of a float32 product's block (kRowsAtOnce)
_MATRIX = 32  # rows, and outputs, of a block on tensor cores; inputs of a step (kQuantRows, kHalfRows ...)
_WARPS = THREADS // 32
_BYTES = (4, 2, 2, 1)  # of a number, by form


def part_of(name: str) -> str:
    """Return what a weight belongs to, for the reader: `layers.3.q+k+v` of the weights' names."""
    name = re.sub(r"\.int\d$", "", name)
    parts = [each.removesuffix(".weight").removeprefix("decoder.").removeprefix("model.") for each in name.split("+")]
    first, *others = parts
    return "+".join([first, *(each.rpartition(".")[2] for each in others)])


def _part_of_product(e: Emitter, node: ir.Node) -> str:
    """Return what a product belongs to: one whose weight is the embedding's too is the head of the model."""
    matrix = node.inputs[1]
    assert matrix is not None
    assert matrix.name
    shared = any(use.node.op_type in ("Gather", "QuantGather") for use in matrix.uses())
    return "lm_head" if shared else part_of(matrix.name)


def real(e: Emitter, each: ir.Value | None) -> Stored:
    """Return a tensor of float32 in memory."""
    found = e.stored(e.value(each))
    if found.kind != "real":
        raise e.refusal(f"{found.name} holds integers where numbers are multiplied")
    return found


# Forms.


def wanted_form(e: Emitter, output: ir.Value) -> int:
    """Return the form in which all that read a value of float32 want it."""
    if output in e.graph.outputs:
        return 0
    forms = {_form_of_reader(e, use.node, use.idx) for use in output.uses()}
    return forms.pop() if len(forms) == 1 else 0


def _form_of_reader(e: Emitter, node: ir.Node, place: int) -> int:
    if place != 0:
        return 0
    if (node.domain, node.op_type) == (CPU_DOMAIN, "QuantMatMul"):
        return INTEGERS
    matrix = node.inputs[1] if node.domain == "" and node.op_type in ("MatMul", "Gemm") else None
    if matrix is not None and matrix.const_value is not None:
        weight = e.value(matrix)
        turned = node.op_type == "Gemm" and node.attributes.get_int("transB", 0) == 1
        if isinstance(weight, Weight) and _is_half(e, weight, turned=turned):
            return FORMS.index(e.dtype)
    return 0


def _is_half(e: Emitter, weight: Weight, *, turned: bool) -> bool:
    """Return whether a product's weight is kept in halves."""
    return e.dtype != "float32" and len(weight.shape) == 2 and weight.shape[1 if turned else 0] % _MATRIX == 0


@dataclass(frozen=True)
class Output:
    """Memory for numbers in some form, as kernels that make them take it."""

    form: int
    to: str
    scales: str | None = None
    sums: str | None = None


def output_for(e: Emitter, output: ir.Value, shape: Shape) -> Output:
    """Return memory for `output` in the form that its readers want; it is what the value is from now on."""
    form = wanted_form(e, output) if (shape[-1].number or 1) % BLOCK == 0 else 0
    if form == 0:
        stored = e.new("real", shape, output)
        e.set(output, stored)
        return Output(0, stored.name)
    formed = e.new_formed(form, shape)
    e.set(output, formed)
    return Output(form, formed.name, formed.scales, formed.sums)


def bytes_of(output: Output) -> int:
    """Return the bytes of one of its numbers, but for scales."""
    return _BYTES[output.form]


def _input(e: Emitter, each: ir.Value | None, form: int, part: str) -> ProductInput:
    """Return a product's input in the form that it reads; products that share an input share it in that form."""
    value = e.value(each)
    if isinstance(value, ProductInput):
        assert value.form == form
        return value
    stored = real(e, each)
    key = f"form.{form}.{stored.name}"
    if key not in e.formed:
        made = e.new_formed(form, stored.shape)
        elements = product(stored.shape)
        blocks = elements.divided(size(BLOCK))
        assert blocks is not None
        e.launch(
            "outrider_form",
            {"x": stored.name, "to": made.name, "scales": made.scales, "sums": made.sums},
            {"blocks": blocks, "form": form},
            spread(blocks, _WARPS),
            Cost(f"input of {part}", elements * (4 + _BYTES[form])),
        )
        e.formed[key] = made
    return replace(e.formed[key], shape=stored.shape)


# Products.


def _weight_of(e: Emitter, node: ir.Node) -> tuple[Weight, bool]:
    """Return a product's weight, and whether it lies as `[outputs, inputs]`. Refuses products of other kinds."""
    weight = e.value(node.inputs[1])
    if not isinstance(weight, Weight) or len(weight.shape) != 2:
        raise e.refusal(f"{node.op_type} multiplies by a tensor that is no weight")
    if node.op_type == "MatMul":
        return weight, False
    asked = {name: attribute.value for name, attribute in node.attributes.items()}
    plain = asked.get("alpha", 1.0) == 1.0 and not asked.get("transA", 0)
    if not plain or (len(node.inputs) > 2 and node.inputs[2] is not None):
        raise e.refusal("Gemm scales, turns its input, or adds a bias")
    return weight, bool(asked.get("transB", 0))


def multiply(e: Emitter, node: ir.Node) -> None:
    """MatMul and Gemm with weights of floats."""
    weight, turned = _weight_of(e, node)
    outputs, inputs = weight.shape if turned else weight.shape[::-1]
    if _is_half(e, weight, turned=turned):
        stored, element = e.half_weight(weight, turned=turned)
        of = _OnTensorCores(
            "half_product", element, {"weight": stored}, {"element": element}, _part_of_product(e, node), inputs,
            outputs, 2 * inputs * outputs, half_bytes,
        )  # fmt: skip
        e.set(node.outputs[0], PendingProduct(outputs, partial(_multiply, e, of, node)))
        return
    x = real(e, node.inputs[0])
    rows, to = product(x.shape[:-1]), e.new("real", (*x.shape[:-1], size(outputs)), node.outputs[0])
    e.launch(
        "outrider_product",
        {"x": x.name, "weight": e.stored(weight).name, "to": to.name},
        {"rows": rows, "inputs": inputs, "outputs": outputs, "turned": int(turned)},
        f"{-(-outputs // THREADS)} * ({quotient(rows, _ROWS_AT_ONCE)})",
        Cost(
            _part_of_product(e, node),
            rows * (4 * (inputs + outputs)) + 4 * inputs * outputs,
            rows * (2 * inputs * outputs),
        ),
    )
    e.set(node.outputs[0], to)


@dataclass(frozen=True)
class _OnTensorCores:
    """A product's `kernel`, the form of its input, and what else its launch depends on."""

    kernel: str
    form: int
    weight: Mapping[str, str]
    numbers: Mapping[str, int]
    part: str
    inputs: int
    outputs: int
    """Those of the weight: with a gated unit after it, half as many come out."""
    weight_bytes: int
    shared: Callable[[str], str]
    """Bytes of dynamic shared memory of a block, by the rows of a step."""


def _multiply(
    e: Emitter,
    of: _OnTensorCores,
    node: ir.Node,
    output: ir.Value | None = None,
    *,
    unit: int = 0,
    residual: Stored | None = None,
) -> None:
    """Launch a product, with the gated `unit` after it or with its sum with the `residual` stream."""
    output = node.outputs[0] if output is None else output
    x, outputs = _input(e, node.inputs[0], of.form, of.part), of.outputs // 2 if unit else of.outputs
    rows, shape = product(x.shape[:-1]), (*x.shape[:-1], size(outputs))
    if residual is None:
        to = output_for(e, output, shape)
    else:
        total = e.new("real", shape, output)
        e.set(output, total)
        to = Output(0, total.name)
    given = {"integers": x.name, "scales": x.scales, "sums": x.sums} if of.form == INTEGERS else {"x": x.name}
    tensors = {**of.weight, "to": to.to, "to_scales": to.scales, "to_sums": to.sums}
    numbers: dict[str, Size | int | str] = {"rows": rows, "inputs": of.inputs, "outputs": outputs, **of.numbers}
    numbers |= {"unit": unit, "form": to.form}
    moves = rows * (bytes_of(to) * outputs) + of.weight_bytes
    if residual is not None:
        moves += rows * (4 * outputs)
    e.launch(
        f"outrider_{of.kernel}",
        {**given, **tensors, "residual": None if residual is None else residual.name},
        numbers,
        f"{-(-outputs // _MATRIX)} * ({quotient(rows, _MATRIX)})",
        Cost(of.part, rows * _row_bytes(x.form, of.inputs) + moves, rows * (2 * of.inputs * of.outputs)),
        shared=of.shared(f"({rows})"),
    )


def add_by_product(e: Emitter, norm: ir.Node) -> Stored | None:
    """Return the sum before a norm, computed by the product that is one of its summands, if one waits for the norm."""
    for summand, other in ((2, 0), (0, 2)):
        pending = e.pending(norm.inputs[summand])
        if pending is not None:
            pending.launch(norm.outputs[1], residual=real(e, norm.inputs[other]))
            return e.stored(e.value(norm.outputs[1]))
    return None


def _row_bytes(form: int, inputs: int) -> int:
    """Return the bytes of a row of a product's input: integers have a scale and a sum for each block."""
    return _BYTES[form] * inputs + (8 * (inputs // BLOCK) if form == INTEGERS else 0)


def _layout(node: ir.Node) -> QuantLayout:
    number = {name: node.attributes.get_int(name, 0) for name in ("N", "K", "bits", "wide", "minimums")}
    return QuantLayout(number["N"], number["K"], number["bits"], bool(number["wide"]), bool(number["minimums"]))


def _packed(e: Emitter, node: ir.Node) -> str:
    weight = e.value(node.inputs[1])
    assert isinstance(weight, Weight)
    return e.constant(weight.name, prod(weight.shape), weight.read)


def _of_layout(layout: QuantLayout) -> dict[str, int]:
    return {"bits": layout.bits, "wide": int(layout.wide), "minimums": int(layout.minimums)}


def quant_matmul(e: Emitter, node: ir.Node) -> None:
    layout, part = _layout(node), _part_of_product(e, node)
    of = _OnTensorCores(
        "quant_product", INTEGERS, {"packed": _packed(e, node)}, _of_layout(layout), part, layout.inputs,
        layout.outputs, layout.size, partial(quant_bytes, layout.bits),
    )  # fmt: skip
    e.set(node.outputs[0], PendingProduct(layout.outputs, partial(_multiply, e, of, node)))


def gated_unit(e: Emitter, node: ir.Node) -> None:
    unit = 1 + list(UNITS.values()).index(node.attributes.get_string("activation", "silu"))
    pending = e.pending(node.inputs[0])
    if pending is not None and pending.outputs % (2 * _MATRIX) == 0:
        pending.launch(node.outputs[0], unit=unit)
        return
    both = real(e, node.inputs[0])
    width, rows = (both.shape[-1].number or 0) // 2, product(both.shape[:-1])
    to = e.new("real", (*both.shape[:-1], size(width)), node.outputs[0])
    e.launch(
        "outrider_gated_unit",
        {"both": both.name, "to": to.name},
        {"rows": rows, "size": width, "unit": unit},
        spread(rows * width),
        Cost("gated unit", rows * (12 * width), rows * (20 * width)),
    )
    e.set(node.outputs[0], to)


# Look-ups.


def quant_gather(e: Emitter, node: ir.Node) -> None:
    ids, layout, packed = e.stored(e.value(node.inputs[0])), _layout(node), _packed(e, node)
    count, to = product(ids.shape), e.new("real", (*ids.shape, size(layout.inputs)), node.outputs[0])
    e.launch(
        "outrider_quant_gather",
        {"ids": ids.name, "packed": packed, "to": to.name},
        {"count": count, "inputs": layout.inputs, "outputs": layout.outputs, **_of_layout(layout)},
        spread(count * layout.inputs),
        Cost(part_of(packed), count * (5 * layout.inputs)),
    )
    e.set(node.outputs[0], to)


def gather(e: Emitter, node: ir.Node) -> None:
    """Look rows of a weight up that is kept in halves; other Gathers follow from a rule."""
    table = e.value(node.inputs[0])
    halves = isinstance(table, Weight) and table.dtype.kind == "f" and len(table.shape) == 2 and e.dtype != "float32"
    if not halves or node.attributes.get_int("axis", 0) != 0:
        indexing.gather(e, node)
        return
    assert isinstance(table, Weight)
    (outputs, inputs), ids = table.shape, e.stored(e.value(node.inputs[1]))
    stored, element = e.half_weight(table, turned=True)
    count, to = product(ids.shape), e.new("real", (*ids.shape, size(inputs)), node.outputs[0])
    e.launch(
        "outrider_half_gather",
        {"ids": ids.name, "weight": stored, "to": to.name},
        {"count": count, "inputs": inputs, "outputs": outputs, "element": element},
        spread(count * inputs),
        Cost(part_of(table.name), count * (6 * inputs)),
    )
    e.set(node.outputs[0], to)


PRODUCTS: dict[tuple[str, str], Handler] = {
    ("", "MatMul"): multiply,
    ("", "Gemm"): multiply,
    ("", "Gather"): gather,
    (CPU_DOMAIN, "QuantMatMul"): quant_matmul,
    (CPU_DOMAIN, "QuantGather"): quant_gather,
    (CPU_DOMAIN, "GatedUnit"): gated_unit,
}
"""Handlers by domain and operator."""
