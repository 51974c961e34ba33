"""An EAGLE3 head over several steps on its own hidden states, as drafting runs it (EAGLE-3, training-time test).

Step 0 at pair i is (feature i, token i+1) under causal attention. Step j is (the same chain's hidden state of step
j-1, token i+1+j) at position i+j; its query sees the keys that step 0 left at pairs up to i, and those of steps 1
to j of its own chain.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from outrider.compiler.models.eagle3 import Eagle3Head
from outrider.compiler.models.eagle3_config import Eagle3Config
from outrider.compiler.models.rope import rope_tables

RECOMPUTED = 512
"""Pairs from which a step's attention weights are computed again in the backward pass rather than kept."""


class UnrolledExecution:
    """All chains of `batch` sequences at once: `pairs` chains each, the step being the layer's index."""

    def __init__(self, config: Eagle3Config, batch: int, pairs: int, steps: int, device: torch.device) -> None:
        c = self._config = config
        cos, sin = rope_tables(c.rope_theta, c.head_dim, pairs + steps, c.rope_scaling)
        self._cos, self._sin = torch.from_numpy(cos).to(device), torch.from_numpy(sin).to(device)
        self._batch, self._pairs = batch, pairs
        group = c.num_heads // c.num_kv_heads
        hidden = torch.ones(pairs, pairs, dtype=torch.bool, device=device).triu(1)
        self._bias = torch.zeros(pairs, pairs, device=device).masked_fill(hidden, float("-inf")).repeat(group, 1)
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def rotate(self, layer: int, x: Tensor, heads: int) -> Tensor:
        step = len(self._keys)
        first, second = x.view(self._batch, self._pairs, heads, -1).chunk(2, dim=-1)
        cos, sin = (t[step : step + self._pairs, None].to(x.dtype) for t in (self._cos, self._sin))
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).view(x.shape)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        assert sinks is None, "heads have none"
        c = self._config
        self._keys.append(self._heads(k, c.num_kv_heads))
        self._values.append(self._heads(v, c.num_kv_heads))
        queries = self._heads(q, c.num_heads)
        if layer == 0:
            out = F.scaled_dot_product_attention(
                queries, self._keys[0], self._values[0], is_causal=True, enable_gqa=True
            )
        elif self._pairs > RECOMPUTED and q.requires_grad:
            out = checkpoint(self._attend_chains, queries, *self._keys, *self._values, use_reentrant=False)
        else:
            out = self._attend_chains(queries, *self._keys, *self._values)
        return out.transpose(1, 2).reshape(q.shape)

    def _attend_chains(self, queries: Tensor, *cached: Tensor) -> Tensor:
        """`queries` `[batch, heads, pairs, head_dim]` over step 0's keys up to their own pair's, and their chain's."""
        c, keys, values = self._config, cached[: len(cached) // 2], cached[len(cached) // 2 :]
        rows = self._batch * c.num_kv_heads
        scale = c.head_dim**-0.5
        flat = queries.reshape(rows, -1, c.head_dim)  # the query heads of a group, one after another
        shared = torch.baddbmm(self._bias, flat, keys[0].reshape(rows, -1, c.head_dim).mT, alpha=scale)
        grouped = flat.view(self._batch, c.num_kv_heads, -1, self._pairs, c.head_dim)
        own = [(grouped * key.unsqueeze(2)).sum(-1).reshape(rows, -1, 1) * scale for key in keys[1:]]
        weights = torch.cat((shared, *(x.to(shared.dtype) for x in own)), dim=-1).softmax(dim=-1).to(queries.dtype)
        out = torch.bmm(weights[..., : self._pairs], values[0].reshape(rows, -1, c.head_dim)).view(grouped.shape)
        for step, value in enumerate(values[1:]):
            weight = weights[..., self._pairs + step].view(*grouped.shape[:-1], 1)
            out = out + weight * value.unsqueeze(2)
        return out.reshape(queries.shape)

    def _heads(self, x: Tensor, count: int) -> Tensor:
        return x.view(self._batch, self._pairs, count, self._config.head_dim).transpose(1, 2)


def unroll(head: Eagle3Head, embedding: Tensor, features: Tensor, token_ids: Tensor, steps: int) -> list[Tensor]:
    """The head's hidden states of every step, `[batch, pairs, H]`, as `Eagle3Head.logits` reads them.

    `features` `[batch, pairs, 3 * Ht]`; `token_ids` int64 `[batch, >= pairs + steps - 1]`, whose column i + j is the
    token of pair i at step j; `embedding` `[vocab, H]` is the head's own, or the target's.
    """
    batch, pairs = features.shape[:2]
    execution = UnrolledExecution(head.config, batch, pairs, steps, features.device)
    h = head.fuse(features.reshape(batch * pairs, -1)).to(features.dtype)  # the residual stream stays in f32
    states = []
    for step in range(steps):
        embedded = F.embedding(token_ids[:, step : step + pairs].reshape(-1), embedding)
        h = head.layer(h, embedded, execution, step)
        states.append(h.view(batch, pairs, -1))
    return states
