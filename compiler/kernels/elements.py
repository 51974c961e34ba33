"""Nodes whose elements follow from others one by one: shapes, indices, gathers, sums of two tensors.

They launch nothing by themselves, but for a scatter. Where such a tensor is needed in memory, it is evaluated, with all
that it is made of, in one launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from outrider.compiler.kernels.code import Node, Word
from outrider.compiler.kernels.emitter import Emitter, Handler, spread
from outrider.compiler.kernels.sizes import Size, least, product, size
from outrider.compiler.kernels.values import At, Kind, RuleTensor, Shape, Stored, Weight, ZeroedSum


def _axis(node: ir.Node, rank: int, default: int = 0) -> int:
    axis = node.attributes.get_int("axis", default)
    return axis + rank if axis < 0 else axis


def _set_known(e: Emitter, output: ir.Value, elements: Sequence[Size], shape: Shape) -> None:
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
    _set_known(e, node.outputs[0], dims[start:end], (size(len(dims[start:end])),))


def _reshaped(e: Emitter, output: ir.Value, of: ir.Value | None, to: Shape) -> None:
    """Set the same elements in another shape."""
    value = e.value(of)
    if isinstance(value, Stored):
        e.set(output, Stored(value.name, value.kind, to))
    elif isinstance(value, Weight):
        elements = e.known(of)
        if elements is not None:
            _set_known(e, output, elements, to)
        else:
            stored = e.stored(value)
            e.set(output, Stored(stored.name, stored.kind, to))
    else:
        ruled = e.ruled(value)
        e.set(output, RuleTensor(ruled.kind, to, ruled.at, ruled.known))


def reshape(e: Emitter, node: ir.Node) -> None:
    old, asked = _shape(e, node.inputs[0]), e.known(node.inputs[1])
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
    old = _shape(e, node.inputs[0])
    axes = _axes(e, node, len(old))
    if axes is None:
        axes = [place for place, dim in enumerate(old) if dim.number == 1]
    dims = tuple(dim for place, dim in enumerate(old) if place not in axes)
    _reshaped(e, node.outputs[0], node.inputs[0], dims)


def unsqueeze(e: Emitter, node: ir.Node) -> None:
    old = _shape(e, node.inputs[0])
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


def _shape(e: Emitter, each: ir.Value | None) -> Shape:
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
            place = _divided(e, index, stride)
            if stride * count != whole:
                place = e.nodes.apply(Word.MODULO, place, e.nodes.size(count))
            total = e.nodes.apply(Word.ADD, total, e.nodes.apply(Word.MULTIPLY, place, e.nodes.size(source)))
        return of.at(total)

    return at


def _divided(e: Emitter, index: Node, by: Size) -> Node:
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
        if any(isinstance(value, ZeroedSum) for value in values):
            return _multiply_by_zero(e, node)
        a, b = (e.known(each) for each in node.inputs)
        shapes = [_shape(e, each) for each in node.inputs]
        if of_sizes is not None and a is not None and b is not None and (len(a) == len(b) or 1 in (len(a), len(b))):
            count = max(len(a), len(b))
            both = zip(*(each * count if len(each) == 1 else each for each in (a, b)), strict=True)
            return _set_known(e, node.outputs[0], [of_sizes(x, y) for x, y in both], _common(shapes))
        left, right = map(e.ruled, values)
        word = real if left.kind == "real" else integer
        if word is None:
            raise e.refusal(f"{node.op_type} of {left.kind} numbers")
        to = _common([left.shape, right.shape])
        first, second = _spread_at(e, left, to), _spread_at(e, right, to)
        truth = word in (Word.LESS, Word.EQUAL, Word.AND)
        kind: Kind = "integer" if truth else left.kind
        e.set(node.outputs[0], RuleTensor(kind, to, lambda index: e.nodes.apply(word, first(index), second(index))))
        return None

    return handle


def _multiply_by_zero(e: Emitter, node: ir.Node) -> None:
    """Set the product of a sum of everything and zero."""
    others = [each for each in node.inputs if not isinstance(e.value(each), ZeroedSum)]
    if node.op_type == "Mul" and len(others) == 1:
        ruled = e.ruled(e.value(others[0]))
        factor = ruled.at(e.nodes.index)
        if factor.word is Word.CONSTANT and factor.of == 0:
            zero = e.nodes.constant(0)
            e.set(node.outputs[0], RuleTensor("real", ruled.shape, lambda index: zero))
            return
    raise e.refusal(f"{node.op_type} of a sum of everything")


def reduce_sum(e: Emitter, node: ir.Node) -> None:
    """Compute nothing: a sum waits for the product by zero that it was made for."""
    e.set(node.outputs[0], ZeroedSum())


def _one(words: dict[Kind, Word]) -> Handler:
    """Return the handler of an operator with one tensor."""

    def handle(e: Emitter, node: ir.Node) -> None:
        of = e.ruled(e.value(node.inputs[0]))
        word = words.get(of.kind)
        if word is None:
            raise e.refusal(f"{node.op_type} of {of.kind} numbers")
        e.set(node.outputs[0], RuleTensor(of.kind, of.shape, lambda index: e.nodes.apply(word, of.at(index))))

    return handle


def softcap(e: Emitter, node: ir.Node) -> None:
    of, cap = e.ruled(e.value(node.inputs[0])), e.nodes.real(node.attributes.get_float("cap", 0.0))
    e.set(node.outputs[0], RuleTensor("real", of.shape, lambda index: e.nodes.apply(Word.CAP_REAL, cap, of.at(index))))


def cast(e: Emitter, node: ir.Node) -> None:
    known = e.known(node.inputs[0])
    to = ir.DataType(node.attributes.get_int("to", 1))
    if known is not None and to in (ir.DataType.INT64, ir.DataType.INT32):
        _set_known(e, node.outputs[0], known, _shape(e, node.inputs[0]))
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


def slice_(e: Emitter, node: ir.Node) -> None:
    dims = list(_shape(e, node.inputs[0]))
    starts, ends = e.known(node.inputs[1]), e.known(node.inputs[2])
    given = [e.known(each) if each is not None else None for each in [*node.inputs[3:], None, None][:2]]
    if starts is None or ends is None:
        raise e.refusal("a slice depends on data")
    axes = given[0] or tuple(map(size, range(len(starts))))
    if any(step.number != 1 for step in given[1] or ()):
        raise e.refusal("a slice has another step than 1")
    first = [size(0)] * len(dims)
    for start, end, axis in zip(starts, ends, axes, strict=True):
        place = (axis.number or 0) % len(dims)
        first[place] = _bound(e, start, dims[place])
        dims[place] = _bound(e, end, dims[place]) - first[place]
    known = e.known(node.inputs[0])
    if known is not None and len(dims) == 1:
        at, count = first[0].number, dims[0].number
        if at is not None and count is not None:
            _set_known(e, node.outputs[0], known[at : at + count], tuple(dims))
            return
    e.set(node.outputs[0], _part(e, e.ruled(e.value(node.inputs[0])), first, dims))


def _bound(e: Emitter, place: Size, dim: Size) -> Size:
    """Return a place within a dimension: counted from the end where it is negative, the end where it is beyond it."""
    number = place.number
    if number is None:
        return place
    if number >= 2**31 or (dim.number is not None and number > dim.number):
        return dim
    if abs(number) > least(dim):
        raise e.refusal(f"a slice at {number} of a dimension {dim}, which may be shorter")
    return dim + number if number < 0 else place


def _part(e: Emitter, of: RuleTensor, first: Sequence[Size], dims: Sequence[Size]) -> RuleTensor:
    """Return the elements from `first` on, as many in each dimension as `dims` says."""
    nodes, strides, own = e.nodes, _strides(of.shape), _strides(tuple(dims))

    def at(index: Node) -> Node:
        total = nodes.constant(0)
        for axis, dim in enumerate(dims):
            place = _divided(e, index, own[axis])
            if axis:
                place = nodes.apply(Word.MODULO, place, nodes.size(dim))
            place = nodes.apply(Word.ADD, place, nodes.size(first[axis]))
            total = nodes.apply(Word.ADD, total, nodes.apply(Word.MULTIPLY, place, nodes.size(strides[axis])))
        return of.at(total)

    return RuleTensor(of.kind, tuple(dims), at)


def _strides(shape: Shape) -> list[Size]:
    return [product(shape[axis + 1 :]) for axis in range(len(shape))]


def split(e: Emitter, node: ir.Node) -> None:
    of = e.ruled(e.value(node.inputs[0]))
    axis = _axis(node, len(of.shape))
    counts = e.known(node.inputs[1]) if len(node.inputs) > 1 else None
    if counts is None:
        each = of.shape[axis].divided(size(len(node.outputs)))
        if each is None:
            raise e.refusal("a Split is uneven")
        counts = (each,) * len(node.outputs)
    first = size(0)
    for output, count in zip(node.outputs, counts, strict=True):
        places, dims = [size(0)] * len(of.shape), list(of.shape)
        places[axis], dims[axis] = first, count
        e.set(output, _part(e, of, places, dims))
        first = first + count


def gather(e: Emitter, node: ir.Node) -> None:
    table, places = node.inputs
    known, where = e.known(table), e.known(places)
    dims = _shape(e, table)
    axis = _axis(node, len(dims))
    if known is not None and where is not None and len(dims) == 1 and all(p.number is not None for p in where):
        chosen = tuple(known[(place.number or 0) % len(known)] for place in where)
        _set_known(e, node.outputs[0], chosen, _shape(e, places))
        return
    of, at_place = e.ruled(e.value(table)), e.ruled(e.value(places))
    inner, count = product(dims[axis + 1 :]), product(at_place.shape)
    nodes, length = e.nodes, dims[axis]

    def at(index: Node) -> Node:
        place = _divided(e, index, inner)
        outer = _divided(e, place, count) if axis else nodes.constant(0)
        if axis:
            place = nodes.apply(Word.MODULO, place, nodes.size(count))
        chosen = nodes.clamp(at_place.at(place), nodes.size(length))
        if axis:
            chosen = nodes.apply(Word.ADD, nodes.apply(Word.MULTIPLY, outer, nodes.size(length)), chosen)
        within = nodes.apply(Word.MODULO, index, nodes.size(inner))
        return of.at(nodes.apply(Word.ADD, nodes.apply(Word.MULTIPLY, chosen, nodes.size(inner)), within))

    e.set(node.outputs[0], RuleTensor(of.kind, (*dims[:axis], *at_place.shape, *dims[axis + 1 :]), at))


def gather_elements(e: Emitter, node: ir.Node) -> None:
    of, places = e.ruled(e.value(node.inputs[0])), e.ruled(e.value(node.inputs[1]))
    axis, nodes = _axis(node, len(of.shape)), e.nodes
    inner, count, length = product(places.shape[axis + 1 :]), places.shape[axis], of.shape[axis]

    def at(index: Node) -> Node:
        outer = _divided(e, index, inner * count)
        own = nodes.clamp(places.at(index), nodes.size(length))
        chosen = nodes.apply(Word.ADD, nodes.apply(Word.MULTIPLY, outer, nodes.size(length)), own)
        within = nodes.apply(Word.MODULO, index, nodes.size(inner))
        return of.at(nodes.apply(Word.ADD, nodes.apply(Word.MULTIPLY, chosen, nodes.size(inner)), within))

    e.set(node.outputs[0], RuleTensor(of.kind, places.shape, at))


def concat(e: Emitter, node: ir.Node) -> None:
    parts = [each for each in node.inputs if each is not None]
    known = [e.known(each) for each in parts]
    dims = [_shape(e, each) for each in parts]
    axis = _axis(node, len(dims[0]))
    total = sum((each[axis] for each in dims), size(0))
    if all(each is not None for each in known) and len(dims[0]) == 1:
        _set_known(e, node.outputs[0], [element for each in known if each is not None for element in each], (total,))
        return
    values = [e.ruled(e.value(each)) for each in parts]
    inner, nodes = product(dims[0][axis + 1 :]), e.nodes

    def at(index: Node) -> Node:
        place = nodes.apply(Word.MODULO, _divided(e, index, inner), nodes.size(total))
        outer, within = _divided(e, index, inner * total), nodes.apply(Word.MODULO, index, nodes.size(inner))
        result: Node | None = None
        ends = [sum((each[axis] for each in dims[: i + 1]), size(0)) for i in range(len(dims))]
        for i in range(len(values) - 1, -1, -1):
            start = ends[i] - dims[i][axis]
            own = nodes.apply(Word.SUBTRACT, place, nodes.size(start))
            own = nodes.apply(Word.ADD, nodes.apply(Word.MULTIPLY, outer, nodes.size(dims[i][axis])), own)
            if result is not None:
                # What is not chosen is computed too: its place must be one of its own.
                mine = nodes.apply(Word.LESS, place, nodes.size(ends[i]))
                own = nodes.apply(Word.CHOOSE, mine, own, nodes.constant(0))
            if i:
                inside = nodes.apply(Word.LESS, nodes.size(start - 1), place)
                own = nodes.apply(Word.CHOOSE, inside, own, nodes.constant(0))
            element = values[i].at(nodes.apply(Word.ADD, nodes.apply(Word.MULTIPLY, own, nodes.size(inner)), within))
            if result is None:
                result = element
            else:
                mine = nodes.apply(Word.LESS, place, nodes.size(ends[i]))
                result = nodes.apply(Word.CHOOSE, mine, element, result)
        assert result is not None
        return result

    e.set(node.outputs[0], RuleTensor(values[0].kind, (*dims[0][:axis], total, *dims[0][axis + 1 :]), at))


def scatter_elements(e: Emitter, node: ir.Node) -> None:
    """Write numbers into places of each row of a copy."""
    of, _, given = (e.ruled(e.value(each)) for each in node.inputs)
    axis = _axis(node, len(of.shape))
    if axis != len(of.shape) - 1 or node.attributes.get_string("reduction", "none") != "none":
        raise e.refusal("ScatterElements along another dimension than the last")
    stored, same = e.stored(e.value(node.inputs[1])), given.at(e.nodes.index)
    known = same.word is Word.CONSTANT
    numbers = None if known else e.stored(e.value(node.inputs[2])).name
    to = e.new(of.kind, of.shape, node.outputs[0])
    e.evaluate(of, to)
    rows, count = product(stored.shape[:-1]), stored.shape[-1]
    e.launch(
        "outrider_scatter",
        {"to": to.name, "places": stored.name, "given": numbers},
        {
            "rows": rows, "width": of.shape[-1], "count": count, "value": int(same.of) if known else 0,
            "real": int(of.kind == "real"),
        },
        spread(rows * count),
        part="indices and small tensors",
    )  # fmt: skip
    e.set(node.outputs[0], to)


def cumsum(e: Emitter, node: ir.Node) -> None:
    """Sum along a dimension of few elements, in their order."""
    of, axis = e.ruled(e.value(node.inputs[0])), e.known(node.inputs[1])
    assert axis is not None
    place = (axis[0].number or 0) % len(of.shape)
    count = of.shape[place].number
    if count is None or of.kind != "real" or any(node.attributes.get_int(n, 0) for n in ("exclusive", "reverse")):
        raise e.refusal("CumSum of as many numbers as a step has, or of another kind")
    inner, nodes = product(of.shape[place + 1 :]), e.nodes

    def at(index: Node) -> Node:
        own = nodes.apply(Word.MODULO, _divided(e, index, inner), nodes.constant(count))
        first = nodes.apply(Word.SUBTRACT, index, nodes.apply(Word.MULTIPLY, own, nodes.size(inner)))
        total = of.at(first)
        for j in range(1, count):
            reached = nodes.apply(Word.LESS, nodes.constant(j - 1), own)
            step = nodes.apply(Word.CHOOSE, reached, nodes.size(inner * j), nodes.constant(0))
            more = of.at(nodes.apply(Word.ADD, first, step))
            total = nodes.apply(Word.CHOOSE, reached, nodes.apply(Word.ADD_REAL, total, more), total)
        return total

    e.set(node.outputs[0], RuleTensor("real", of.shape, at))


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
    "Slice": slice_,
    "Split": split,
    "Gather": gather,
    "GatherElements": gather_elements,
    "Concat": concat,
    "ScatterElements": scatter_elements,
    "CumSum": cumsum,
    "ReduceSum": reduce_sum,
}
"""Handlers of ONNX's operators."""
