"""The target graph: new tokens of any number of rows, over a KV cache, to logits and features.

BranchAttention is one node and takes several rows; `lowering` rewrites the graph for a backend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir
import torch
from torch import Tensor, nn

from outrider.compiler.export.execution import (
    STATE_PATH,
    ConvStates,
    GraphExecution,
    KvCaches,
    RopeTables,
    cache_outputs,
)
from outrider.compiler.export.tracing import Shape, arguments, name_inputs, trace
from outrider.compiler.models.config import DecoderConfig
from outrider.compiler.models.decoder import Decoder
from outrider.plans import names


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
    ) -> tuple[Tensor, ...]:
        caches = KvCaches(k_caches, v_caches)
        path = [each for each in (parent, branch, replay, replays, fold) if each is not None]
        states = ConvStates(conv_tails or (), conv_logs or (), path)
        execution = GraphExecution(
            self.decoder.config, self.tables, caches, positions.unsqueeze(0), attn_bias, past_length, row_splits,
            states=states,
        )  # fmt: skip
        hidden, tapped = self.decoder.hidden(token_ids.unsqueeze(0), execution, self.taps)
        picked = torch.index_select(hidden, -2, logit_indices).squeeze(0)  # a product of 2-D tensors becomes one Gemm
        features = (torch.cat(tapped, -1).squeeze(0).float(),) if tapped else ()
        queries = tuple(q.float() for q in execution.queries) if self.queries else ()
        return self.decoder.logits(picked).float(), *features, *caches.presents, *queries, *states.presents


def export_target(
    decoder: Decoder,
    capacity: int,
    taps: Sequence[int] = (),
    *,
    queries: bool = False,
    states: tuple[int, int] = (0, 0),
) -> ir.Model:
    """Export `decoder` over KV caches of `capacity` slots.

    With `taps`, the output `features` holds the residual streams that enter these layers, side by side (EAGLE3's
    input). With `queries`, each layer has an output `queries.i`: its queries as attention compares them with keys.
    `states` are branches, and records that each logs, of a decoder that convolves.
    """
    config = decoder.config
    cache: Shape = (names.ROWS, config.num_kv_heads, capacity, config.head_dim)
    layers = range(len(config.attention_layers))
    kept = _conv_states(config, *states)
    path: dict[str, Shape] = {
        names.PARENT: (names.NEW,),
        names.BRANCH: (names.NEW,),
        names.REPLAY: states,
        **dict.fromkeys((names.REPLAYS, names.FOLD), states[:1]),
    }
    return trace_target(
        TargetGraph(decoder, capacity, taps, queries=queries),
        cache,
        len(layers),
        decoder.embedding.dtype,
        states={**{name: path[name] for name in STATE_PATH}, **kept} if kept else {},
        outputs={
            names.LOGITS_OUT: (names.LOGITS, config.vocab_size),
            **({names.FEATURES: (names.NEW, len(taps) * config.hidden_size)} if taps else {}),
            **dict.fromkeys(cache_outputs(len(layers), 1), cache),
            **({names.queries(i): (names.NEW, config.query_size) for i in layers} if queries else {}),
            **{
                names.cache_output(name): kept[name]
                for i in range(len(config.conv_layers))
                for name in (names.conv_tail(i), names.conv_log(i))
            },
        },
    )


def _conv_states(config: DecoderConfig, branches: int, log: int) -> dict[str, Shape]:
    """Return the shapes of the tails, then of the logs, of all layers that convolve."""
    if config.conv is None:
        return {}
    layers, hidden = range(len(config.conv_layers)), config.hidden_size
    tails = {names.conv_tail(i): (branches, config.conv.kernel - 1, hidden) for i in layers}
    return {**tails, **{names.conv_log(i): (branches, log, hidden) for i in layers}}


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
