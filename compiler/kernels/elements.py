"""Nodes whose elements follow from others one by one: shapes, sums of two tensors.

They launch nothing by themselves. Where such a tensor is needed in memory, it is evaluated, with all that it is made
of, in one launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from outrider.compiler.kernels.code import Node, Word
from outrider.compiler.kernels.emitter import Emitter, Handler
from outrider.compiler.kernels.sizes import Size, product, size
from outrider.compiler.kernels.values import At, Kind, RuleTensor, Shape, Stored, Weight


def set_known(e: Emitter, output: ir.Value, elements: Sequence[Size], shape: Shape) -> None:
    """Set a tensor of integers whose elements are sizes."""
    nodes, made = e.nodes, tuple(elements)

    def at(index: Node) -> Node:
        result = nodes.size(made[-1]) if made else nodes.constant(0)
        for place in range(len(made) - 2, -1, -1):
            here = nodes.apply(Word.EQUAL, index, nodes.constant(place))
            result = nodes.apply(Word.CHOOSE, here, nodes.size(made[place]), result)
        return result

    e.set(output, RuleTensor("integer", shape, at, made))


def shape(e: Emitter, node: ir.Node) -> None:
    value = e.value(node.inputs[0])
    assert isinstance(value, RuleTensor | Stored | Weight)
    dims = tuple(map(size, value.shape))
    start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", len(dims))
    set_known(e, node.outputs[0], dims[start:end], (size(len(dims[start:end])),))


def _reshaped(e: Emitter, output: ir.Value, of: ir.Value | None, to: Shape) -> None:
    """Set the same elements in another shape."""
    value = e.value(of)
    if isinstance(value, Stored):
        e.set(output, Stored(value.name, value.kind, to))
    elif isinstance(value, Weight):
        elements = e.known(of)
        if elements is not None:
            set_known(e, output, elements, to)
        else:
            stored = e.stored(value)
            e.set(output, Stored(stored.name, stored.kind, to))
    else:
        ruled = e.ruled(value)
        e.set(output, RuleTensor(ruled.kind, to, ruled.at, ruled.known))


def reshape(e: Emitter, node: ir.Node) -> None:
    old, asked = dims_of(e, node.inputs[0]), e.known(node.inputs[1])
    if asked is None:
        raise e.refusal("a shape depends on data")
    kept = node.attributes.get_int("allowzero", 0) == 0
    dims = [old[place] if kept and dim.number == 0 else dim for place, dim in enumerate(asked)]
    if any(dim.number == -1 for dim in dims):
        rest = product(dim for dim in dims if dim.number != -1)
        missing = product(old).divided(rest)
        if missing is None:
            raise e.refusal(f"{product(old)} elements are not divided by {rest} where it is built")
        dims = [missing if dim.number == -1 else dim for dim in dims]
    _reshaped(e, node.outputs[0], node.inputs[0], tuple(dims))


def squeeze(e: Emitter, node: ir.Node) -> None:
    old = dims_of(e, node.inputs[0])
    axes = _axes(e, node, len(old))
    if axes is None:
        axes = [place for place, dim in enumerate(old) if dim.number == 1]
    dims = tuple(dim for place, dim in enumerate(old) if place not in axes)
    _reshaped(e, node.outputs[0], node.inputs[0], dims)


def unsqueeze(e: Emitter, node: ir.Node) -> None:
    old = dims_of(e, node.inputs[0])
    axes = _axes(e, node, len(old) + len(e.known(node.inputs[1]) or ()))
    assert axes is not None
    dims = list(old)
    for axis in sorted(axes):
        dims.insert(axis, size(1))
    _reshaped(e, node.outputs[0], node.inputs[0], tuple(dims))


def _axes(e: Emitter, node: ir.Node, rank: int) -> list[int] | None:
    if len(node.inputs) < 2 or node.inputs[1] is None:
        return None
    found = e.known(node.inputs[1])
    assert found is not None
    return [(axis.number or 0) % rank for axis in found]


def dims_of(e: Emitter, each: ir.Value | None) -> Shape:
    value = e.value(each)
    assert isinstance(value, RuleTensor | Stored | Weight)
    return tuple(map(size, value.shape))


def _spread_at(e: Emitter, of: RuleTensor, to: Shape) -> At:
    """Return the rule of a tensor that is spread to the shape `to`, as operators with two tensors spread them."""
    own = (size(1),) * (len(to) - len(of.shape)) + of.shape
    if own == to:
        return of.at
    strides: list[tuple[Size, Size, Size]] = []  # of each dimension that is kept: stride in `to`, size, stride in `of`
    outer, inner = size(1), size(1)
    for wanted, dim in zip(reversed(to), reversed(own), strict=True):
        if dim.number != 1:
            if strides and strides[-1][0] * strides[-1][1] == outer and strides[-1][2] * strides[-1][1] == inner:
                first, count, source = strides[-1]
                strides[-1] = (first, count * dim, source)
            else:
                strides.append((outer, dim, inner))
            inner = inner * dim
        outer = outer * wanted
    whole = outer

    def at(index: Node) -> Node:
        total = e.nodes.constant(0)
        for stride, count, source in strides:
            place = divided(e, index, stride)
            if stride * count != whole:
                place = e.nodes.apply(Word.MODULO, place, e.nodes.size(count))
            total = e.nodes.apply(Word.ADD, total, e.nodes.apply(Word.MULTIPLY, place, e.nodes.size(source)))
        return of.at(total)

    return at


def divided(e: Emitter, index: Node, by: Size) -> Node:
    return e.nodes.apply(Word.DIVIDE, index, e.nodes.size(by))


def _common(shapes: Sequence[Shape]) -> Shape:
    rank = max(map(len, shapes))
    padded = [(size(1),) * (rank - len(each)) + each for each in shapes]
    return tuple(next((dim for dim in dims if dim.number != 1), dims[0]) for dims in zip(*padded, strict=True))


def expand(e: Emitter, node: ir.Node) -> None:
    of, asked = e.ruled(e.value(node.inputs[0])), e.known(node.inputs[1])
    if asked is None:
        raise e.refusal("a shape depends on data")
    to = _common([of.shape, asked])
    e.set(node.outputs[0], RuleTensor(of.kind, to, _spread_at(e, of, to)))


def _by_elements(real: Word | None, integer: Word | None, of_sizes: Callable[[Size, Size], Size] | None) -> Handler:
    """Return the handler of an operator with two tensors, by the words for reals and for integers."""

    def handle(e: Emitter, node: ir.Node) -> None:
        values = [e.value(each) for each in node.inputs]
        a, b = (e.known(each) for each in node.inputs)
        shapes = [dims_of(e, each) for each in node.inputs]
        if of_sizes is not None and a is not None and b is not None and (len(a) == len(b) or 1 in (len(a), len(b))):
            count = max(len(a), len(b))
            both = zip(*(each * count if len(each) == 1 else each for each in (a, b)), strict=True)
            set_known(e, node.outputs[0], [of_sizes(x, y) for x, y in both], _common(shapes))
            return
        left, right = map(e.ruled, values)
        word = real if left.kind == "real" else integer
        if word is None:
            raise e.refusal(f"{node.op_type} of {left.kind} numbers")
        to = _common([left.shape, right.shape])
        first, second = _spread_at(e, left, to), _spread_at(e, right, to)
        truth = word in (Word.LESS, Word.EQUAL, Word.AND)
        kind: Kind = "integer" if truth else left.kind
        e.set(node.outputs[0], RuleTensor(kind, to, lambda index: e.nodes.apply(word, first(index), second(index))))

    return handle


def _one(words: dict[Kind, Word]) -> Handler:
    """Return the handler of an operator with one tensor."""

    def handle(e: Emitter, node: ir.Node) -> None:
        of = e.ruled(e.value(node.inputs[0]))
        word = words.get(of.kind)
        if word is None:
            raise e.refusal(f"{node.op_type} of {of.kind} numbers")
        e.set(node.outputs[0], RuleTensor(of.kind, of.shape, lambda index: e.nodes.apply(word, of.at(index))))

    return handle


def run_after(e: Emitter, node: ir.Node) -> None:
    """Set the same value: launches run in the order of nodes."""
    e.set(node.outputs[0], e.value(node.inputs[0]))


def softcap(e: Emitter, node: ir.Node) -> None:
    of, cap = e.ruled(e.value(node.inputs[0])), e.nodes.real(node.attributes.get_float("cap", 0.0))
    e.set(node.outputs[0], RuleTensor("real", of.shape, lambda index: e.nodes.apply(Word.CAP_REAL, cap, of.at(index))))


def cast(e: Emitter, node: ir.Node) -> None:
    known = e.known(node.inputs[0])
    to = ir.DataType(node.attributes.get_int("to", 1))
    if known is not None and to in (ir.DataType.INT64, ir.DataType.INT32):
        set_known(e, node.outputs[0], known, dims_of(e, node.inputs[0]))
        return
    of = e.ruled(e.value(node.inputs[0]))
    integer = to in (ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL)
    if not integer and to is not ir.DataType.FLOAT:
        raise e.refusal(f"Cast to {to}")
    kind: Kind = "integer" if integer else "real"
    if of.kind == "real" and to is ir.DataType.BOOL:
        raise e.refusal("Cast of numbers to truths")

    def at(index: Node) -> Node:
        number = of.at(index)
        if of.kind == "real" and integer:
            number = e.nodes.apply(Word.TO_INTEGER, number)
        elif of.kind == "integer" and not integer:
            number = e.nodes.apply(Word.TO_REAL, number)
        return e.nodes.apply(Word.TO_TRUTH, number) if to is ir.DataType.BOOL else number

    e.set(node.outputs[0], RuleTensor(kind, of.shape, at))


def range_(e: Emitter, node: ir.Node) -> None:
    ends = [e.known(each) for each in node.inputs]
    if any(each is None for each in ends):
        raise e.refusal("a range depends on data")
    start, limit, step = (each[0] for each in ends if each is not None)
    count = limit - start
    if step.number != 1:
        raise e.refusal("a range has another step than 1")
    nodes = e.nodes
    e.set(
        node.outputs[0],
        RuleTensor("integer", (count,), lambda index: nodes.apply(Word.ADD, nodes.size(start), index)),
    )


ELEMENTS: dict[str, Handler] = {
    "Shape": shape,
    "Reshape": reshape,
    "Squeeze": squeeze,
    "Unsqueeze": unsqueeze,
    "Expand": expand,
    "Add": _by_elements(Word.ADD_REAL, Word.ADD, lambda a, b: a + b),
    "Sub": _by_elements(Word.SUBTRACT_REAL, Word.SUBTRACT, lambda a, b: a - b),
    "Mul": _by_elements(Word.MULTIPLY_REAL, Word.MULTIPLY, lambda a, b: a * b),
    "Div": _by_elements(Word.DIVIDE_REAL, Word.DIVIDE, None),
    "Mod": _by_elements(None, Word.MODULO, None),
    "Less": _by_elements(None, Word.LESS, None),
    "Equal": _by_elements(None, Word.EQUAL, None),
    "And": _by_elements(None, Word.AND, None),
    "Neg": _one({"real": Word.NEGATE_REAL}),
    "Log": _one({"real": Word.LOG_REAL}),
    "Sigmoid": _one({"real": Word.SHARE_REAL}),
    "Cast": cast,
    "Range": range_,
}
"""Handlers of ONNX's operators."""
