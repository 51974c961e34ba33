"""Nodes that take elements of others by place: slices, gathers, tensors side by side. A scatter is a launch."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from outrider.compiler.kernels.code import Node, Word
from outrider.compiler.kernels.elements import dims_of, divided, set_known
from outrider.compiler.kernels.emitter import Cost, Emitter, Handler, spread
from outrider.compiler.kernels.sizes import Size, least, product, size
from outrider.compiler.kernels.values import RuleTensor, Shape


def _axis(node: ir.Node, rank: int, default: int = 0) -> int:
    axis = node.attributes.get_int("axis", default)
    return axis + rank if axis < 0 else axis


def slice_(e: Emitter, node: ir.Node) -> None:
    dims = list(dims_of(e, node.inputs[0]))
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
            set_known(e, node.outputs[0], known[at : at + count], tuple(dims))
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
            place = divided(e, index, own[axis])
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
    dims = dims_of(e, table)
    axis = _axis(node, len(dims))
    if known is not None and where is not None and len(dims) == 1 and all(p.number is not None for p in where):
        chosen = tuple(known[(place.number or 0) % len(known)] for place in where)
        set_known(e, node.outputs[0], chosen, dims_of(e, places))
        return
    of, at_place = e.ruled(e.value(table)), e.ruled(e.value(places))
    inner, count = product(dims[axis + 1 :]), product(at_place.shape)
    nodes, length = e.nodes, dims[axis]

    def at(index: Node) -> Node:
        place = divided(e, index, inner)
        outer = divided(e, place, count) if axis else nodes.constant(0)
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
        outer = divided(e, index, inner * count)
        own = nodes.clamp(places.at(index), nodes.size(length))
        chosen = nodes.apply(Word.ADD, nodes.apply(Word.MULTIPLY, outer, nodes.size(length)), own)
        within = nodes.apply(Word.MODULO, index, nodes.size(inner))
        return of.at(nodes.apply(Word.ADD, nodes.apply(Word.MULTIPLY, chosen, nodes.size(inner)), within))

    e.set(node.outputs[0], RuleTensor(of.kind, places.shape, at))


def concat(e: Emitter, node: ir.Node) -> None:
    parts = [each for each in node.inputs if each is not None]
    known = [e.known(each) for each in parts]
    dims = [dims_of(e, each) for each in parts]
    axis = _axis(node, len(dims[0]))
    total = sum((each[axis] for each in dims), size(0))
    if all(each is not None for each in known) and len(dims[0]) == 1:
        set_known(e, node.outputs[0], [element for each in known if each is not None for element in each], (total,))
        return
    values = [e.ruled(e.value(each)) for each in parts]
    inner, nodes = product(dims[0][axis + 1 :]), e.nodes

    def at(index: Node) -> Node:
        place = nodes.apply(Word.MODULO, divided(e, index, inner), nodes.size(total))
        outer, within = divided(e, index, inner * total), nodes.apply(Word.MODULO, index, nodes.size(inner))
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
        Cost("indices and small tensors"),
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
        own = nodes.apply(Word.MODULO, divided(e, index, inner), nodes.constant(count))
        first = nodes.apply(Word.SUBTRACT, index, nodes.apply(Word.MULTIPLY, own, nodes.size(inner)))
        total = of.at(first)
        for j in range(1, count):
            reached = nodes.apply(Word.LESS, nodes.constant(j - 1), own)
            step = nodes.apply(Word.CHOOSE, reached, nodes.size(inner * j), nodes.constant(0))
            more = of.at(nodes.apply(Word.ADD, first, step))
            total = nodes.apply(Word.CHOOSE, reached, nodes.apply(Word.ADD_REAL, total, more), total)
        return total

    e.set(node.outputs[0], RuleTensor("real", of.shape, at))


INDEXING: dict[str, Handler] = {
    "Slice": slice_,
    "Split": split,
    "Gather": gather,
    "GatherElements": gather_elements,
    "Concat": concat,
    "ScatterElements": scatter_elements,
    "CumSum": cumsum,
}
"""Handlers of ONNX's operators."""
