"""The target graph: new tokens of any number of rows, over a KV cache, to logits and features.

BranchAttention is one node and takes several rows; `lowering` rewrites the graph for a backend.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
import torch
from torch import Tensor, nn

from outrider.compiler.export.execution import GraphExecution, KvCaches, RopeTables, cache_outputs
from outrider.compiler.export.tracing import Shape, name_inputs, trace
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
    ) -> tuple[Tensor, ...]:
        caches = KvCaches(k_caches, v_caches)
        execution = GraphExecution(
            self.decoder.config, self.tables, caches, positions.unsqueeze(0), attn_bias, past_length, row_splits
        )
        hidden, tapped = self.decoder.hidden(token_ids.unsqueeze(0), execution, self.taps)
        picked = torch.index_select(hidden, -2, logit_indices).squeeze(0)  # a product of 2-D tensors becomes one Gemm
        features = (torch.cat(tapped, -1).squeeze(0).float(),) if tapped else ()
        queries = tuple(q.squeeze(0).float() for q in execution.queries) if self.queries else ()
        return self.decoder.logits(picked).float(), *features, *caches.presents, *queries


def export_target(decoder: Decoder, capacity: int, taps: Sequence[int] = (), *, queries: bool = False) -> ir.Model:
    """Export `decoder` over KV caches of `capacity` slots.

    With `taps`, the output `features` holds the residual streams that enter these layers, side by side (EAGLE3's
    input). With `queries`, each layer has an output `queries.i`: its queries as attention compares them with keys.
    """
    config = decoder.config
    rows, new, view, picked = 2, 4, 8, 3  # example sizes, all different; all become symbols
    index = torch.int64
    cache: Shape = (names.ROWS, config.num_kv_heads, capacity, config.head_dim)
    layers = range(config.num_layers)

    def caches() -> list[Tensor]:  # each in its own memory: equal tensors would become one graph input
        return [torch.empty((rows, *cache[1:]), dtype=decoder.embedding.dtype) for _ in layers]  # type: ignore[arg-type]

    free = torch.export.Dim.DYNAMIC
    model = trace(
        TargetGraph(decoder, capacity, taps, queries=queries),
        inputs={
            "token_ids": torch.zeros(new, dtype=index),
            "positions": torch.zeros(new, dtype=index),
            "row_splits": torch.zeros(rows + 1, dtype=index),
            "attn_bias": torch.zeros(rows, 1, new - 2, view),
            "past_length": torch.zeros(rows, dtype=index),
            "logit_indices": torch.zeros(picked, dtype=index),
            "k_caches": caches(),
            "v_caches": caches(),
        },
        dynamic={
            "token_ids": {0: free},
            "positions": {0: free},
            "row_splits": {0: free},
            "attn_bias": {0: free, 2: free, 3: free},
            "past_length": {0: free},
            "logit_indices": {0: free},
            "k_caches": [{0: free} for _ in layers],
            "v_caches": [{0: free} for _ in layers],
        },
        outputs={
            names.LOGITS_OUT: (names.LOGITS, config.vocab_size),
            **({names.FEATURES: (names.NEW, len(taps) * config.hidden_size)} if taps else {}),
            **dict.fromkeys(cache_outputs(config.num_layers, 1), cache),
            **({names.queries(i): (names.NEW, config.query_size) for i in layers} if queries else {}),
        },
    )
    name_inputs(
        model,
        {
            names.TOKEN_IDS: (names.NEW,),
            names.POSITIONS: (names.NEW,),
            names.ROW_SPLITS: (names.ROW_EDGES,),
            names.ATTN_BIAS: (names.ROWS, 1, names.PLACES, names.VIEW),
            names.PAST_LENGTH: (names.ROWS,),
            names.LOGIT_INDICES: (names.LOGITS,),
            **{names.k_cache(i): cache for i in layers},
            **{names.v_cache(i): cache for i in layers},
        },
    )
    return model
