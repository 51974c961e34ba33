"""PyTorch module to ONNX: the target graph of DESIGN section 4, with our ops as nodes of domain `outrider`.

The graph is target-independent: BranchAttention is one node, rows may be several. `lowering` makes it
an execution target's own.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import onnx_ir as ir
import onnxscript
import torch
from torch import Tensor, nn

import plugins.onnx_ops as onnx_ops
from compiler.models.decoder import Decoder
from compiler.models.rope import rope_tables
from plans import names


@torch.library.custom_op("outrider::branch_attention", mutates_args=())
def branch_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    attn_bias: Tensor,
    past_length: Tensor,
    row_splits: Tensor,
    num_heads: int,
    kv_num_heads: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """A node of the exported graph; never run in PyTorch (shapes: `plugins.schemas`, BranchAttention)."""
    raise NotImplementedError("outrider::branch_attention exists for export only")


@branch_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k_cache), torch.empty_like(v_cache)


class GraphExecution:
    """Rotation by the step's positions and attention over the KV arena, written as graph ops."""

    def __init__(self, graph: TargetGraph, positions: Tensor, bias: Tensor, past: Tensor, splits: Tensor) -> None:
        self._graph, self._positions = graph, positions.unsqueeze(0)
        self._bias, self._past, self._splits = bias, past, splits
        self.k_caches: Sequence[Tensor] = ()
        self.v_caches: Sequence[Tensor] = ()
        self.presents: list[Tensor] = []

    def rotate(self, x: Tensor, heads: int) -> Tensor:
        graph = self._graph
        rotated: Tensor = torch.onnx.ops.rotary_embedding(x, graph.cos, graph.sin, self._positions, num_heads=heads)
        return rotated

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        c = self._graph.decoder.config
        out, k_out, v_out = branch_attention(
            q, k, v, self.k_caches[layer], self.v_caches[layer], self._bias, self._past, self._splits,
            c.num_heads, c.num_kv_heads, c.head_dim**-0.5,
        )  # fmt: skip
        self.presents += (k_out, v_out)
        attended: Tensor = out
        return attended


class TargetGraph(nn.Module):
    """The decoder over a KV arena; its `forward` has the inputs and outputs of DESIGN section 4."""

    cos: Tensor
    sin: Tensor

    def __init__(self, decoder: Decoder, positions: int) -> None:
        super().__init__()
        self.decoder = decoder
        c = decoder.config
        cos, sin = rope_tables(c.rope_theta, c.head_dim, positions, c.rope_scaling)
        dtype = decoder.embedding.dtype
        self.register_buffer("cos", torch.from_numpy(cos).to(dtype))
        self.register_buffer("sin", torch.from_numpy(sin).to(dtype))

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        row_splits: Tensor,
        attn_bias: Tensor,
        past_length: Tensor,
        logit_rows: Tensor,
        k_caches: Sequence[Tensor],
        v_caches: Sequence[Tensor],
    ) -> tuple[Tensor, ...]:
        execution = GraphExecution(self, positions, attn_bias, past_length, row_splits)
        execution.k_caches, execution.v_caches = k_caches, v_caches
        logits = self.decoder(token_ids.unsqueeze(0), execution, logit_rows)
        return logits.float(), *execution.presents


def export_target(decoder: Decoder, capacity: int) -> ir.Model:
    """Export `decoder` over arenas of `capacity` slots; the dimension names are those of `plans.names`."""
    config = decoder.config
    graph = TargetGraph(decoder.eval(), capacity).requires_grad_(False)
    rows, new, view, picked = 2, 4, 8, 3  # any sizes that differ; all become symbols
    index = torch.int64
    cache_shape = (rows, config.num_kv_heads, capacity, config.head_dim)
    layers = range(config.num_layers)

    def caches() -> list[Tensor]:  # distinct memory each: equal tensors would become one graph input
        return [torch.empty(cache_shape, dtype=decoder.embedding.dtype) for _ in layers]

    inputs = (
        torch.zeros(new, dtype=index),
        torch.zeros(new, dtype=index),
        torch.zeros(rows + 1, dtype=index),
        torch.zeros(rows, 1, new - 2, view),
        torch.zeros(rows, dtype=index),
        torch.zeros(picked, dtype=index),
        caches(),
        caches(),
    )
    free = torch.export.Dim.DYNAMIC
    shapes = (
        {0: free}, {0: free}, {0: free}, {0: free, 2: free, 3: free}, {0: free}, {0: free},
        [{0: free} for _ in layers], [{0: free} for _ in layers],
    )  # fmt: skip
    with _quiet():
        program = torch.onnx.export(
            graph,
            inputs,
            dynamo=True,
            dynamic_shapes=shapes,
            opset_version=onnx_ops.OPSET,
            custom_translation_table={torch.ops.outrider.branch_attention.default: _translate},
            verbose=False,
        )
    assert program is not None
    model = program.model
    _name(model, config.num_layers)
    _strip(model)
    return model


def _translate(*inputs: Any) -> Any:
    *tensors, num_heads, kv_num_heads, scale = inputs
    op = onnxscript.values.Opset(onnx_ops.DOMAIN, onnx_ops.VERSION)
    return op.BranchAttention(*tensors, num_heads=num_heads, kv_num_heads=kv_num_heads, scale=scale)


def _name(model: ir.Model, layers: int) -> None:
    """Give inputs, outputs and symbolic dimensions the names of the contract."""
    graph = model.graph
    caches = [names.k_cache(i) for i in range(layers)], [names.v_cache(i) for i in range(layers)]
    plain = (
        names.TOKEN_IDS, names.POSITIONS, names.ROW_SPLITS, names.ATTN_BIAS, names.PAST_LENGTH, names.LOGIT_ROWS,
    )  # fmt: skip
    for value, name in zip(graph.inputs, [*plain, *caches[0], *caches[1]], strict=True):
        value.name = name
    presents = [names.cache_output(name) for pair in zip(*caches, strict=True) for name in pair]
    for value, name in zip(graph.outputs, [names.LOGITS_OUT, *presents], strict=True):
        value.name = name
    symbols: dict[str, list[int | str]] = {
        names.TOKEN_IDS: [names.NEW],
        names.POSITIONS: [names.NEW],
        names.ROW_SPLITS: [names.ROW_EDGES],
        names.ATTN_BIAS: [names.ROWS, 1, names.PLACES, names.VIEW],
        names.PAST_LENGTH: [names.ROWS],
        names.LOGIT_ROWS: [names.LOGITS],
    }
    for value in graph.inputs:
        assert value.name
        assert value.shape is not None
        value.shape = ir.Shape(symbols.get(value.name) or [names.ROWS, *_fixed(value.shape)])
    for value in graph.outputs:
        assert value.name
        assert value.shape is not None
        first = names.LOGITS if value.name == names.LOGITS_OUT else names.ROWS
        value.shape = ir.Shape([first, *_fixed(value.shape)])


def _fixed(shape: ir.Shape) -> list[int]:
    """Dimensions behind the first, which the plan fixes."""
    return [int(d) for d in shape[1:]]  # type: ignore[arg-type]


def _strip(model: ir.Model) -> None:
    """Drop stack traces, docs and inferred inner shapes: exports of the same module become identical bytes."""
    model.metadata_props.clear()
    model.producer_name, model.producer_version, model.doc_string = "outrider", None, None
    keep = {id(v) for v in (*model.graph.inputs, *model.graph.outputs, *model.graph.initializers.values())}
    for node in model.graph:
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
            if id(value) not in keep:
                value.shape = None
    for value in (*model.graph.inputs, *model.graph.outputs):
        value.metadata_props.clear()
    model.graph.metadata_props.clear()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter reports missing optional packages on every run; errors still come as exceptions."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logger.setLevel(level)
