"""Nodes that are kernels of their own beside products: norms, attention, draft trees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from outrider.compiler.kernels.code import Word
from outrider.compiler.kernels.elements import run_after, softcap
from outrider.compiler.kernels.emitter import Cost, Emitter, Handler
from outrider.compiler.kernels.products import Output, add_by_product, bytes_of, output_for, part_of, real
from outrider.compiler.kernels.sizes import Size, product, quotient, size
from outrider.compiler.kernels.values import RuleTensor, Shape, Stored, Weight
from outrider.plans import names
from outrider.plans.formulas import formula
from outrider.plans.kernel_engine import TURN, Launch
from outrider.plugins.cuda.engine_kernels import (
    CHUNK,
    HEAD_STEP,
    MOST_HEAD,
    MOST_SHARED,
    attention_bytes,
    attention_room,
    norm_bytes,
)
from outrider.plugins.cuda.launches import ELEMENTS as CACHE_TYPES
from outrider.plugins.cuda.launches import THREADS, as_number
from outrider.plugins.onnx_ops import DOMAIN
from outrider.plugins.ops import OPS
from outrider.plugins.quant_layout import BLOCK
from outrider.plugins.schema import CPU_DOMAIN

_PARTIAL_BYTES = 64 * 2**20  # of chunks of attention that are not put together yet
_FEW_TOKENS = 4  # a head of each of which is a block's
_MOST_TOKENS = 64  # whose chunks are computed before they are put together


def _optional(e: Emitter, node: ir.Node, place: int) -> Stored | None:
    each = node.inputs[place] if place < len(node.inputs) else None
    return None if each is None else e.stored(e.value(each))


def _name_of(stored: Stored | None) -> str | None:
    return None if stored is None else stored.name


def rms_norm(e: Emitter, node: ir.Node) -> None:
    weight = e.value(node.inputs[1])
    assert isinstance(weight, Weight)
    summed = add_by_product(e, node) if len(node.inputs) > 2 else None
    x, added = (real(e, node.inputs[0]), _optional(e, node, 2)) if summed is None else (summed, None)
    rows, width = product(x.shape[:-1]), x.shape[-1]
    if width.number is None or norm_bytes(width.number) > MOST_SHARED:
        raise e.refusal(f"a norm of {width} numbers; rows of up to {MOST_SHARED // norm_bytes(1)} fit into every GPU")
    normed = output_for(e, node.outputs[0], x.shape)
    epsilon = as_number(float, node.attributes.get_float("epsilon", 1e-5))
    total = None
    if added is not None:
        total = e.new("real", x.shape, node.outputs[1])
        e.set(node.outputs[1], total)
    e.launch(
        "outrider_rms_norm",
        {
            "x": x.name, "weight": e.stored(weight).name, "added": _name_of(added), "normed": normed.to,
            "scales": normed.scales, "sums": normed.sums, "sum": _name_of(total),
        },
        {"size": width, "epsilon": epsilon, "form": normed.form},
        str(rows),
        Cost(part_of(weight.name), rows * width * ((4 if added is None else 12) + bytes_of(normed)), rows * width * 4),
        shared=norm_bytes(width.number),
    )  # fmt: skip


@dataclass(frozen=True)
class _Heads:
    """The sizes and numbers of one attention node."""

    heads: int
    kv_heads: int
    size: int
    rows: Size
    places: Size
    view: Size
    tokens: Size
    capacity: Size
    window: int
    element: int
    scale: int
    softcap: int


def unfit_heads(group: int, size: int) -> str | None:
    """Say why heads of `size` numbers, `group` query heads of which share keys, cannot attend; None where they can."""
    if not 0 < size <= MOST_HEAD or size % HEAD_STEP:
        return f"heads have {size} numbers; it takes multiples of {HEAD_STEP} up to {MOST_HEAD}"
    shared = formula(attention_bytes(group, size, attention_room(group, size, 4))).value({})
    if shared > MOST_SHARED:
        return (
            f"{group} query heads of {size} numbers share keys: that takes {shared} bytes of shared memory, and some "
            f"GPUs have {MOST_SHARED}"
        )
    return None


def attention(e: Emitter, node: ir.Node) -> None:
    """Append keys and values, and attend over the keys that each token sees: see `csrc/cuda/engine/attention.cu.h`."""
    query, key, value, k_cache, v_cache, bias, past, splits = [*node.inputs, None][:8]
    number = {name: node.attributes.get_int(name, 0) for name in ("num_heads", "kv_num_heads", "window")}
    asks = node.attributes.get_int("asks", 1) == 1
    keys, values, seen = e.value(k_cache), e.value(v_cache), real(e, bias)
    given = real(e, query) if asks or key is None else None
    assert isinstance(keys, Stored)
    assert isinstance(values, Stored)
    assert k_cache is not None
    of_tokens = given if given is not None else real(e, key)
    h = _Heads(
        number["num_heads"], number["kv_num_heads"], keys.shape[3].number or 0, seen.shape[0], seen.shape[2],
        seen.shape[3], product(of_tokens.shape[:-1]), keys.shape[2], number["window"], _element(e, k_cache),
        as_number(float, node.attributes.get_float("scale", 1.0)),
        as_number(float, node.attributes.get_float("softcap", 0.0)),
    )  # fmt: skip
    if (unfit := unfit_heads(h.heads // h.kv_heads, h.size)) is not None:
        raise e.refusal(unfit)
    row_splits = e.stored(e.value(splits)) if splits is not None else _one_row(e, h.tokens)
    part = keys.name.replace("k_cache", "attention")
    width = h.heads * h.size
    queries = _queries(e, node, h) if asks else None
    packed = key is None
    split = (0, width, width + h.kv_heads * h.size) if packed else (0, 0, 0)
    turned = _optional(e, node, 9)
    rotated = 0 if turned is None else 2 * (turned.shape[1].number or 0)
    e.launch(
        "outrider_append",
        {
            "query": _name_of(given), "key": of_tokens.name if packed else real(e, key).name,
            "value": of_tokens.name if packed else real(e, value).name, "row_splits": row_splits.name,
            "past_length": e.stored(e.value(past)).name, "positions": _name_of(_optional(e, node, 8)),
            "cos": _name_of(turned), "sin": _name_of(_optional(e, node, 10)),
            "query_norm": _name_of(_optional(e, node, 11)), "key_norm": _name_of(_optional(e, node, 12)),
            "queries": _name_of(queries), "keys": keys.name, "values": values.name,
        },
        {
            "rows": h.rows, "heads": h.heads if asks else 0, "kv_heads": h.kv_heads, "size": h.size, "rotated": rotated,
            "capacity": h.capacity, "query_stride": of_tokens.shape[-1],
            "kv_stride": of_tokens.shape[-1] if packed else h.kv_heads * h.size, "query_place": split[0],
            "key_place": split[1], "value_place": split[2], "element": h.element,
            "epsilon": as_number(float, node.attributes.get_float("epsilon", 0.0)),
            "limit": 0 if turned is None else turned.shape[0],
        },
        h.tokens * ((h.heads if asks else 0) + h.kv_heads),
        Cost(f"{part}, appending", h.tokens * (8 * width + 12 * h.kv_heads * h.size)),
        threads=min(THREADS, max(32, -(-h.size // 32) * 32)),
    )  # fmt: skip
    if queries is None:
        zero = e.nodes.constant(0)
        shape = (*of_tokens.shape[:-1], size(width))
        e.set(node.outputs[0], RuleTensor("real", shape, lambda index: zero))
        return
    lists, counts = _visible(e, seen, row_splits, h)
    out = _output_of_heads(e, node.outputs[0], (*of_tokens.shape[:-1], size(width)), h.size)
    tensors = {
        "queries": queries.name, "keys": keys.name, "values": values.name, "row_splits": row_splits.name,
        "lists": lists.name, "counts": counts.name, "sinks": _name_of(_optional(e, node, 13)),
    }  # fmt: skip
    _attend(e, h, part, tensors, out)


def _output_of_heads(e: Emitter, output: ir.Value, shape: Shape, head: int) -> Output:
    """Return memory for what heads attend to: blocks of numbers that share a scale are of one head."""
    if head % BLOCK == 0:
        return output_for(e, output, shape)
    stored = e.new("real", shape, output)
    e.set(output, stored)
    return Output(0, stored.name)


def _element(e: Emitter, cache: ir.Value) -> int:
    assert cache.dtype is not None
    name = str(cache.dtype.name).lower()
    name = {"float": "float32"}.get(name, name)
    if name not in CACHE_TYPES:
        raise e.refusal(f"KV caches of {name}; it has {', '.join(CACHE_TYPES)}")
    return CACHE_TYPES.index(name)


def _one_row(e: Emitter, tokens: Size) -> Stored:
    """Return the splits of a step whose only row has all tokens."""
    key = f"splits.{tokens}"
    if key not in e.shared:
        nodes = e.nodes
        rule = RuleTensor("integer", (size(2),), lambda index: nodes.apply(Word.MULTIPLY, index, nodes.size(tokens)))
        e.shared[key] = e.stored(rule)
    return e.shared[key]


def _queries(e: Emitter, node: ir.Node, h: _Heads) -> Stored:
    """Return memory for the queries that are compared with keys: an output of the engine, where it is one."""
    output = node.outputs[3] if len(node.outputs) > 3 else None
    made = e.new("real", (h.tokens, size(h.heads * h.size)), output)
    if output is not None and output.name:
        e.set(output, made)
    return made


def _visible(e: Emitter, bias: Stored, row_splits: Stored, h: _Heads) -> tuple[Stored, Stored]:
    """Return the slots that each token sees, int32 `[tokens, view]`, and how many: once for all layers of a pass."""
    key = f"visible.{bias.name}.{row_splits.name}"
    if key not in e.shared:
        lists = e.new("integer", (h.tokens, h.view), itemsize=4)
        counts = e.new("integer", (h.tokens,), itemsize=4)
        e.launch(
            "outrider_visible",
            {"bias": bias.name, "row_splits": row_splits.name, "lists": lists.name, "counts": counts.name},
            {"rows": h.rows, "places": h.places, "view": h.view},
            h.tokens,
            Cost("visible keys", h.tokens * h.view * 8),
        )
        e.shared |= {key: lists, f"{key}.counts": counts}
    return e.shared[key], e.shared[f"{key}.counts"]


def _attend(e: Emitter, h: _Heads, part: str, tensors: Mapping[str, str | None], out: Output) -> None:
    """Attend with some tokens at a time, so that what chunks of keys leave stays small."""
    group, most_view = h.heads // h.kv_heads, e.limits[names.VIEW]
    widest = min(h.window, most_view) if h.window else most_view
    chunk_bytes = h.heads * -(-widest // CHUNK) * (2 + h.size) * 4
    at_once = max(1, min(_MOST_TOKENS, _PARTIAL_BYTES // chunk_bytes))
    view: Size | str = f"min({h.view}, {h.window})" if h.window else h.view
    chunks = f"({view} + {CHUNK - 1}) // {CHUNK}"
    partial = e.new("real", (size(at_once * chunk_bytes // 4),))
    counters = e.counter(f"finished.{h.heads}", 4 * _MOST_TOKENS * h.heads)
    first = f"{TURN} * {at_once}"
    tokens = f"min({h.tokens} - {first}, {at_once})"
    itemsize = 4 if h.element == 0 else 2
    room = attention_room(group, h.size, itemsize)
    # Few tokens are shared out to more blocks, which read keys again for each head.
    heads = f"1 + {group - 1} * min(1, max(0, {h.tokens} - {_FEW_TOKENS}))"
    parts = f"({h.heads} // ({heads}))"

    def body() -> None:
        e.launch(
            "outrider_attend",
            {
                **tensors, "partial": partial.name, "counters": counters, "out": out.to,
                "out_scales": out.scales, "out_sums": out.sums,
            },
            {
                "rows": h.rows, "heads": h.heads, "kv_heads": h.kv_heads, "size": h.size, "capacity": h.capacity,
                "view": h.view, "chunks": chunks, "first_token": first, "window": h.window, "element": h.element,
                "scale": h.scale, "softcap": h.softcap, "form": out.form, "at_once": heads, "room": room,
            },
            f"{tokens} * {parts} * ({chunks})",
            Cost(
                part,
                f"({view}) * {2 * h.kv_heads * h.size * itemsize}",
                f"{tokens} * ({view}) * {4 * h.heads * h.size}",
            ),
            shared=attention_bytes(heads, h.size, room),
        )  # fmt: skip

    e.loop(quotient(h.tokens, at_once), body)


def draft_op(e: Emitter, node: ir.Node) -> None:
    """Launch one of our ops' kernels on the tensors of a draft."""
    schema, launch = OPS[node.op_type].schema, OPS[node.op_type].launch
    assert launch is not None
    sizes: dict[str, Any] = {}
    tensors: dict[str, Stored] = {}
    for spec, each in zip(schema.inputs, node.inputs, strict=True):
        stored = e.stored(e.value(each))
        tensors[spec.name] = stored
        for dim, extent in zip(spec.shape, stored.shape, strict=True):
            if isinstance(dim, str):
                sizes.setdefault(dim, extent)
    for attribute in schema.attributes:
        given = node.attributes.get(attribute.name)
        value = attribute.default if given is None else given.value
        sizes[attribute.name] = as_number(attribute.kind, value or 0)
    if "nodes" in sizes and "nodes - 1" not in sizes:
        sizes["nodes - 1"] = size(sizes["nodes"]) - 1
    for spec, output in zip(schema.outputs, node.outputs, strict=True):
        shape = tuple(
            size(sizes[dim]) if isinstance(dim, str) and dim in sizes else _extent(dim, sizes) for dim in spec.shape
        )
        tensors[spec.name] = e.new("integer" if spec.dtype == "int64" else "real", shape, output)
        e.set(output, tensors[spec.name])
    named = {name: stored.name for name, stored in tensors.items()}
    for name, scratch in launch.scratch.items():
        assert scratch.zeroed, "an op of a draft needs no memory but a counter"
        named[name] = e.counter(name, scratch.size({}))
    e.add(
        Launch(
            kernel=launch.kernel,
            tensors=tuple(named[name] for name in launch.pointers),
            numbers=tuple(str(sizes[name]) for name in launch.numbers),
            blocks=str(launch.blocks(sizes)),
            threads=launch.threads(sizes),
            part=node.op_type,
        )
    )


def _extent(dim: int | str, sizes: Mapping[str, Any]) -> Size:
    if isinstance(dim, int):
        return size(dim)
    if dim == "candidates":
        return size(sizes["frontier"]) * size(sizes["top_k"])
    raise KeyError(dim)


LAYERS: dict[tuple[str, str], Handler] = {
    (CPU_DOMAIN, "RmsNorm"): rms_norm,
    (CPU_DOMAIN, "BranchAttention"): attention,
    (CPU_DOMAIN, "Softcap"): softcap,
    (CPU_DOMAIN, "TreeExpand"): draft_op,
    (CPU_DOMAIN, "TreeRerank"): draft_op,
    (DOMAIN, "DraftSample"): draft_op,
    (DOMAIN, "RunAfter"): run_after,
}
"""Handlers by domain and operator."""
