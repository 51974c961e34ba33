"""Lower the exported graph to one backend."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from outrider.compiler.backends import BACKEND_CLASSES
from outrider.compiler.lowering.attention import CpuAttention
from outrider.compiler.lowering.experts import CpuExperts, CpuRoute, PackExperts
from outrider.compiler.lowering.own_ops import CpuNorms, OwnKernels
from outrider.compiler.lowering.products import FuseProjections, GatedUnitOfProduct
from outrider.compiler.lowering.quantized import PackQuantized
from outrider.compiler.lowering.rule import Lowering, Rule, apply_rules
from outrider.plans import names
from outrider.plans.buffers import DType
from outrider.plans.kv_slots import slot_size
from outrider.plans.manifest import RuleReport

OUR_ARITHMETIC: tuple[Rule, ...] = (
    FuseProjections(),
    GatedUnitOfProduct(),
    OwnKernels(),
    PackQuantized(),
    CpuRoute(),
    CpuExperts(),
    PackExperts(),
    CpuAttention(),
    CpuNorms(),
)
"""Rules to the operators that we have kernels of our own for, on the CPU and on a GPU, with the same bits."""


def lower(
    engine: str, model: ir.Model, target: str, rows: int, *, caches: int = 1, kv_cache: str | None = None
) -> list[RuleReport]:
    """Lower `model` in place for the backend `target`, with `rows` rows in its KV cache, which is of type `kv_cache`,
    or of the model's own.

    With several `caches`, any of them may be bound.
    """
    lowering = Lowering(engine, model, rows)
    reports = apply_rules(lowering, BACKEND_CLASSES[target].rules())
    RemoveUnusedNodesPass()(model)
    if rows == 1:
        _fix_single_row(model)
    if caches > 1:
        _free_capacity(model)
    if kv_cache is not None:
        _set_cache_type(model, DType(kv_cache))
    return reports


def _fix_single_row(model: ir.Model) -> None:
    """Fix the symbols of one row (R is 1, E is 2, S is N), and drop inputs that no node reads."""
    known: dict[str, int | str] = {names.ROWS: 1, names.ROW_EDGES: 2, names.PLACES: names.NEW}
    for value in (*model.graph.inputs, *model.graph.outputs):
        assert value.shape is not None
        value.shape = ir.Shape([d if isinstance(d, int) else known.get(str(d), str(d)) for d in value.shape])
    for value in [v for v in model.graph.inputs if not v.uses() and v not in model.graph.outputs]:
        model.graph.inputs.remove(value)


def _free_capacity(model: ir.Model) -> None:
    """Make the number of slots of caches a symbol; only attention needs it, and reads it from the bound tensor."""
    for value, (rows, heads, _, size) in _caches(model):
        value.shape = ir.Shape([rows, heads, names.CAPACITY, size])


_CACHE_TYPES = {
    DType.FLOAT32: ir.DataType.FLOAT,
    DType.FLOAT16: ir.DataType.FLOAT16,
    DType.BFLOAT16: ir.DataType.BFLOAT16,
    DType.INT8: ir.DataType.INT8,
}


def _set_cache_type(model: ir.Model, dtype: DType) -> None:
    """Give the caches the type that they have in memory; only attention, which has a kernel for each, looks inside."""
    for value, (*slots, head_dim) in _caches(model):
        assert isinstance(head_dim, int)
        value.dtype = _CACHE_TYPES[dtype]
        value.shape = ir.Shape([*slots, slot_size(dtype, head_dim)])


def _caches(model: ir.Model) -> Iterator[tuple[ir.Value, tuple[int | ir.SymbolicDim, ...]]]:
    """Yield the graph's cache inputs and outputs with their shapes."""
    for value in (*model.graph.inputs, *model.graph.outputs):
        if (value.name or "").startswith(("k_cache.", "v_cache.")):
            assert value.shape is not None
            yield value, tuple(value.shape)
