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

from outrider.compiler.kernels.elements import ELEMENTS
from outrider.compiler.kernels.emitter import Emitter, Handler, spread
from outrider.compiler.kernels.sizes import Size, product, quotient, size
from outrider.compiler.kernels.values import (
    PendingProduct,
    ProductInput,
    ResidualSum,
    RuleTensor,
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
            part=f"input of {part}",
            moves=elements * (4 + _BYTES[form]),
        )
        e.formed[key] = made
    return replace(e.formed[key], shape=stored.shape)


# Products.


def _with_residual(e: Emitter, output: ir.Value, shape: Shape) -> tuple[Stored, Stored] | None:
    """Return what the norm after a product adds it to, and the memory of the sum, which the product then computes.

    None where nothing does, where another reads the product as well, or where the other summand comes later.
    """
    uses = output.uses()
    if len(uses) != 1 or output in e.graph.outputs:
        return None
    use = next(iter(uses))
    norm, place = use.node, use.idx
    if (norm.domain, norm.op_type) != (CPU_DOMAIN, "RmsNorm") or place not in (0, 2) or len(norm.inputs) < 3:
        return None
    other = norm.inputs[2 - place]
    value = e.value(other) if other is not None and e.has(other) else None
    if not isinstance(value, Stored | RuleTensor) or value.shape != shape:
        return None
    residual = real(e, other)
    total = norm.outputs[1] if len(norm.outputs) > 1 else None
    summed = e.new("real", shape, total)
    if total is not None:
        e.set(total, summed)
    e.set(output, ResidualSum(summed))
    return residual, summed


def _waits_for_unit(e: Emitter, node: ir.Node, outputs: int) -> bool:
    """Leave a product to the gated unit that alone reads it. Return whether there is one."""
    uses = node.outputs[0].uses()
    if len(uses) != 1 or outputs % (2 * _MATRIX) or node.outputs[0] in e.graph.outputs:
        return False
    reader = next(iter(uses)).node
    if (reader.domain, reader.op_type) != (CPU_DOMAIN, "GatedUnit"):
        return False
    e.set(node.outputs[0], PendingProduct(node))
    return True


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
        if not _waits_for_unit(e, node, outputs):
            _multiply_halves(e, node, node.outputs[0], 0)
        return
    x = real(e, node.inputs[0])
    rows, to = product(x.shape[:-1]), e.new("real", (*x.shape[:-1], size(outputs)), node.outputs[0])
    e.launch(
        "outrider_product",
        {"x": x.name, "weight": e.stored(weight).name, "to": to.name},
        {"rows": rows, "inputs": inputs, "outputs": outputs, "turned": int(turned)},
        f"{-(-outputs // THREADS)} * ({quotient(rows, _ROWS_AT_ONCE)})",
        part=_part_of_product(e, node),
        moves=rows * (4 * (inputs + outputs)) + 4 * inputs * outputs,
        operations=rows * (2 * inputs * outputs),
    )
    e.set(node.outputs[0], to)


def _multiply_halves(e: Emitter, node: ir.Node, output: ir.Value, unit: int) -> None:
    """Launch a product with weights of halves, and the gated `unit` after it, which gives `output`."""
    weight, turned = _weight_of(e, node)
    of_weight, inputs = weight.shape if turned else weight.shape[::-1]
    stored, element = e.half_weight(weight, turned=turned)
    part = _part_of_product(e, node)
    x = _input(e, node.inputs[0], element, part)
    of = _OnTensorCores(
        "half_product", {"weight": stored}, {"element": element}, part, inputs, of_weight,
        2 * inputs * of_weight, half_bytes,
    )  # fmt: skip
    _multiply(e, of, node, output, unit, x, {"x": x.name})


@dataclass(frozen=True)
class _OnTensorCores:
    """A product's `kernel`, and what its launch depends on."""

    kernel: str
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
    output: ir.Value,
    unit: int,
    x: ProductInput,
    given: Mapping[str, str],
) -> None:
    """Launch a product whose rows were `given` in the form that it reads, and the gated `unit` after it, which gives
    `output`."""
    outputs = of.outputs // 2 if unit else of.outputs
    rows, shape = product(x.shape[:-1]), (*x.shape[:-1], size(outputs))
    summed = None if unit else _with_residual(e, output, shape)
    to = output_for(e, output, shape) if summed is None else Output(0, summed[1].name)
    tensors = {**of.weight, "to": to.to, "to_scales": to.scales, "to_sums": to.sums}
    numbers: dict[str, Size | int | str] = {"rows": rows, "inputs": of.inputs, "outputs": outputs, **of.numbers}
    numbers |= {"unit": unit, "form": to.form}
    blocks = f"{-(-outputs // _MATRIX)} * ({quotient(rows, _MATRIX)})"
    moves, operations = rows * (bytes_of(to) * outputs) + of.weight_bytes, rows * (2 * of.inputs * of.outputs)
    if summed is not None:
        moves += rows * (4 * outputs)
    e.launch(
        f"outrider_{of.kernel}",
        {**given, **tensors, "residual": None if summed is None else summed[0].name},
        numbers,
        blocks,
        shared=of.shared(f"({rows})"),
        part=of.part,
        moves=rows * _row_bytes(x.form, of.inputs) + moves,
        operations=operations,
    )


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
    if not _waits_for_unit(e, node, _layout(node).outputs):
        _multiply_integers(e, node, node.outputs[0], 0)


def _multiply_integers(e: Emitter, node: ir.Node, output: ir.Value, unit: int) -> None:
    """Launch a product with quantised weights, and the gated `unit` after it, which gives `output`."""
    layout, packed, part = _layout(node), _packed(e, node), _part_of_product(e, node)
    x = _input(e, node.inputs[0], INTEGERS, part)
    assert x.scales is not None
    assert x.sums is not None
    of = _OnTensorCores(
        "quant_product", {"packed": packed}, _of_layout(layout), part, layout.inputs, layout.outputs, layout.size,
        partial(quant_bytes, layout.bits),
    )  # fmt: skip
    _multiply(e, of, node, output, unit, x, {"integers": x.name, "scales": x.scales, "sums": x.sums})


def gated_unit(e: Emitter, node: ir.Node) -> None:
    unit = 1 + list(UNITS.values()).index(node.attributes.get_string("activation", "silu"))
    value = e.value(node.inputs[0])
    if isinstance(value, PendingProduct):
        launch = _multiply_integers if value.node.domain == CPU_DOMAIN else _multiply_halves
        launch(e, value.node, node.outputs[0], unit)
        return
    both = real(e, node.inputs[0])
    width, rows = (both.shape[-1].number or 0) // 2, product(both.shape[:-1])
    to = e.new("real", (*both.shape[:-1], size(width)), node.outputs[0])
    e.launch(
        "outrider_gated_unit",
        {"both": both.name, "to": to.name},
        {"rows": rows, "size": width, "unit": unit},
        spread(rows * width),
        part="gated unit",
        moves=rows * (12 * width),
        operations=rows * (20 * width),
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
        part=part_of(packed),
        moves=count * (5 * layout.inputs),
    )
    e.set(node.outputs[0], to)


def gather(e: Emitter, node: ir.Node) -> None:
    """Look rows of a weight up that is kept in halves; other Gathers follow from a rule."""
    table = e.value(node.inputs[0])
    halves = isinstance(table, Weight) and table.dtype.kind == "f" and len(table.shape) == 2 and e.dtype != "float32"
    if not halves or node.attributes.get_int("axis", 0) != 0:
        return ELEMENTS["Gather"](e, node)
    assert isinstance(table, Weight)
    (outputs, inputs), ids = table.shape, e.stored(e.value(node.inputs[1]))
    stored, element = e.half_weight(table, turned=True)
    count, to = product(ids.shape), e.new("real", (*ids.shape, size(inputs)), node.outputs[0])
    e.launch(
        "outrider_half_gather",
        {"ids": ids.name, "weight": stored, "to": to.name},
        {"count": count, "inputs": inputs, "outputs": outputs, "element": element},
        spread(count * inputs),
        part=part_of(table.name),
        moves=count * (6 * inputs),
    )
    e.set(node.outputs[0], to)
    return None


PRODUCTS: dict[tuple[str, str], Handler] = {
    ("", "MatMul"): multiply,
    ("", "Gemm"): multiply,
    ("", "Gather"): gather,
    (CPU_DOMAIN, "QuantMatMul"): quant_matmul,
    (CPU_DOMAIN, "QuantGather"): quant_gather,
    (CPU_DOMAIN, "GatedUnit"): gated_unit,
}
"""Handlers by domain and operator."""
