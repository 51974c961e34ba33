"""The target graph: new tokens of any number of rows, over a KV cache, to logits and features.

BranchAttention is one node and takes several rows; `lowering` rewrites the graph for a backend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import onnx_ir as ir
import torch
from torch import Tensor, nn

from outrider.compiler.export.execution import (
    STATE_PATH,
    GraphExecution,
    KvCaches,
    LayerStates,
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

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        row_splits: Tensor,
        attn_bias: Tensor,
        past_length: Tensor,
        logit_indices: Tensor,
        k_caches: Sequence[Tensor],
        v_caches: Sequence[Tensor],
        parent: Tensor | None = None,
        branch: Tensor | None = None,
        replay: Tensor | None = None,
        replays: Tensor | None = None,
        fold: Tensor | None = None,
        conv_tails: Sequence[Tensor] | None = None,
        conv_logs: Sequence[Tensor] | None = None,
        states: Sequence[Tensor] | None = None,
        state_logs: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, ...]:
        caches = KvCaches(k_caches, v_caches)
        path = [each for each in (parent, branch, replay, replays, fold) if each is not None]
        given = zip((*names.STATES[0], *names.STATES[1]), (conv_tails, conv_logs, states, state_logs), strict=True)
        kept = LayerStates({name: tensors for name, tensors in given if tensors is not None}, path)
        execution = GraphExecution(
            self.decoder.config, self.tables, caches, positions.unsqueeze(0), attn_bias, past_length, row_splits,
            states=kept,
        )  # fmt: skip
        hidden, tapped = self.decoder.hidden(token_ids.unsqueeze(0), execution, self.taps)
        picked = torch.index_select(hidden, -2, logit_indices).squeeze(0)  # a product of 2-D tensors becomes one Gemm
        features = (torch.cat(tapped, -1).squeeze(0).float(),) if tapped else ()
        queries = tuple(q.float() for q in execution.queries) if self.queries else ()
        return (
            self.decoder.logits(picked).float(),
            *features,
            *caches.presents,
            *queries,
            *chain(*kept.presents.values()),
        )


def export_target(
    decoder: Decoder,
    capacity: int,
    taps: Sequence[int] = (),
    *,
    queries: bool = False,
    states: Geometry | None = None,
) -> ir.Model:
    """Export `decoder` over KV caches of `capacity` slots.

    With `taps`, the output `features` holds the residual streams that enter these layers, side by side (EAGLE3's
    input). With `queries`, each layer has an output `queries.i`: its queries as attention compares them with keys.
    `states` has the sizes of states, of a decoder whose layers keep some.
    """
    config = decoder.config
    cache: Shape = (names.ROWS, config.num_kv_heads, capacity, config.head_dim)
    layers = range(len(config.attention_layers))
    shapes = {} if states is None else state_shapes(states)
    kept = {names.of_layer(name, i): shapes[name] for name in shapes for i in range(len(config.mixer_layers))}
    return trace_target(
        TargetGraph(decoder, capacity, taps, queries=queries),
        cache,
        len(layers),
        decoder.embedding.dtype,
        states={**_path_shapes(states), **kept} if states is not None and kept else {},
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
    return dict(zip(STATE_PATH, shapes, strict=True))


def trace_target(
    module: nn.Module,
    cache: Shape,
    layers: int,
    dtype: torch.dtype,
    outputs: Mapping[str, Shape],
    states: Mapping[str, Shape],
) -> ir.Model:
    """Trace a module with the inputs of the target graph; `cache` is the shape of the caches of `layers` layers.

    `states` are inputs beside them, of layers that keep a state.
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
    model = trace(module, *arguments(module, inputs, sizes, dtype), outputs=outputs)
    name_inputs(model, inputs)
    return model
