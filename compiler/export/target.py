"""The target graph: new tokens of any number of rows, over a KV cache, to logits and features.

BranchAttention is one node and takes several rows; `lowering` rewrites the graph for a backend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir
import torch
from torch import Tensor, nn

from outrider.compiler.export.execution import (
    GraphExecution,
    KvCaches,
    LayerStates,
    PassTokens,
    RopeTables,
    cache_outputs,
)
from outrider.compiler.export.tracing import Shape, arguments, name_inputs, trace
from outrider.compiler.models.decoder import Decoder
from outrider.plans import names
from outrider.plans.manifest import Geometry
from outrider.plans.step_buffers import state_shapes


class TargetGraph(nn.Module):
    """The decoder over a KV cache."""

    def __init__(self, decoder: Decoder, positions: int, taps: Sequence[int], *, queries: bool) -> None:
        super().__init__()
        self.decoder, self.taps, self.queries = decoder, tuple(taps), queries
        self.tables = RopeTables(decoder.config, positions, decoder.embedding.dtype)

    def forward(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Map the graph's inputs, by name, to its outputs, in order."""
        caches, states = KvCaches(inputs), LayerStates(inputs)
        tokens = PassTokens(
            inputs[names.POSITIONS].unsqueeze(0),
            inputs[names.ATTN_BIAS],
            inputs[names.PAST_LENGTH],
            inputs[names.ROW_SPLITS],
        )
        execution = GraphExecution(self.decoder.config, self.tables, caches, tokens, states)
        hidden, tapped = self.decoder.hidden(inputs[names.TOKEN_IDS].unsqueeze(0), execution, self.taps)
        # A product of 2-D tensors becomes one Gemm.
        picked = torch.index_select(hidden, -2, inputs[names.LOGIT_INDICES]).squeeze(0)
        features = (torch.cat(tapped, -1).squeeze(0).float(),) if tapped else ()
        queries = tuple(q.float() for q in execution.queries) if self.queries else ()
        return self.decoder.logits(picked).float(), *features, *caches.presents, *queries, *states.presents.values()


def export_target(
    decoder: Decoder,
    capacity: int,
    taps: Sequence[int] = (),
    *,
    queries: bool = False,
    sizes: Geometry | None = None,
) -> ir.Model:
    """Export `decoder` over KV caches of `capacity` slots.

    With `taps`, the output `features` holds the residual streams that enter these layers, side by side (EAGLE3's
    input). With `queries`, each layer has an output `queries.i`: its queries as attention compares them with keys.
    `sizes` has those of states, of a decoder whose layers keep some.
    """
    config = decoder.config
    cache: Shape = (names.ROWS, config.num_kv_heads, capacity, config.head_dim)
    layers = range(len(config.attention_layers))
    shapes = {} if sizes is None else state_shapes(sizes)
    # A layer has its states one after another, in the order in which it runs them.
    kept: dict[str, Shape] = {
        names.of_layer(name, i): shapes[name] for i in range(len(config.mixer_layers)) for name in shapes
    }
    return trace_target(
        TargetGraph(decoder, capacity, taps, queries=queries),
        cache,
        len(layers),
        decoder.embedding.dtype,
        states={**_path_shapes(sizes), **kept} if sizes is not None and kept else {},
        outputs={
            names.LOGITS_OUT: (names.LOGITS, config.vocab_size),
            **({names.FEATURES: (names.NEW, len(taps) * config.hidden_size)} if taps else {}),
            **dict.fromkeys(cache_outputs(len(layers), 1), cache),
            **({names.queries(i): (names.NEW, config.query_size) for i in layers} if queries else {}),
            **{names.cache_output(name): shape for name, shape in kept.items()},
        },
    )


def _path_shapes(geometry: Geometry) -> dict[str, Shape]:
    assert geometry.states is not None
    branches = (geometry.branches,)
    shapes: tuple[Shape, ...] = (names.NEW,), (names.NEW,), (*branches, geometry.states.log), branches, branches
    return dict(zip(names.STATE_PATH, shapes, strict=True))


def trace_target(
    module: nn.Module,
    cache: Shape,
    layers: int,
    dtype: torch.dtype,
    outputs: Mapping[str, Shape],
    states: Mapping[str, Shape],
) -> ir.Model:
    """Trace a module with the inputs of the target graph; `cache` is the shape of the caches of `layers` layers.

    `states` are further inputs, of layers with a recurrent state.
    """
    inputs: dict[str, Shape] = {
        names.TOKEN_IDS: (names.NEW,),
        names.POSITIONS: (names.NEW,),
        names.ROW_SPLITS: (names.ROW_EDGES,),
        names.ATTN_BIAS: (names.ROWS, 1, names.PLACES, names.VIEW),
        names.PAST_LENGTH: (names.ROWS,),
        names.LOGIT_INDICES: (names.LOGITS,),
        **{names.k_cache(i): cache for i in range(layers)},
        **{names.v_cache(i): cache for i in range(layers)},
        **states,
    }
    sizes = {names.NEW: 4, names.ROWS: 2, names.ROW_EDGES: 3, names.PLACES: 2, names.VIEW: 8, names.LOGITS: 3}
    model = trace(module, *arguments(inputs, sizes, dtype), outputs=outputs)
    name_inputs(model, inputs)
    return model
