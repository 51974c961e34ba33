"""Many blocks of a block head at once, each as drafting runs it: its anchor's token, and masks after it.

The block at anchor a has its slots at positions a, a+1 and so on. Each slot sees the context at positions up to a-1
and all slots of its own block. The keys and values of the context are made once for all blocks, and no block sees
another: a query's scores over the context are one product, masked by its anchor, and those over its block another.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.compiler.models.block import BlockHead
from outrider.compiler.models.drafting import BlockDraft
from outrider.compiler.models.rope import rope_tables


class BlocksExecution:
    """The blocks at `anchors` int64 `[blocks]` in each of `batch` sequences with features `[batch, length, taps * Ht]`.

    The head's rows are `[batch * blocks * slots, ...]`.
    """

    def __init__(self, head: BlockHead, features: Tensor, anchors: Tensor) -> None:
        c = self._config = head.config
        device, (batch, length) = features.device, features.shape[:2]
        self._batch, self._blocks, self._length = batch, len(anchors), length
        tables = rope_tables(c.rope_theta, c.head_dim, length + c.block_size, c.rope_scaling)
        self._cos, self._sin = (torch.from_numpy(table).to(device) for table in tables)
        self._positions = slot_positions(anchors, c.block_size).flatten()
        hidden = torch.arange(length, device=device) >= anchors[:, None, None]
        bias = torch.zeros(hidden.shape, device=device).masked_fill(hidden, float("-inf"))
        self._bias = bias.expand(-1, c.num_heads // c.num_kv_heads * c.block_size, -1).reshape(-1, length)
        context = head.fuse(features)
        self._context = [self._keep(*head.context_kv(context, layer)) for layer in range(c.num_layers)]

    def rotate(self, layer: int, x: Tensor, heads: int) -> Tensor:
        return self._rotate(x, heads, self._positions)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        assert sinks is None, "heads have none"
        c, (keys, values) = self._config, self._context[layer]
        group, rows, scale = c.num_heads // c.num_kv_heads, self._batch * c.num_kv_heads, c.head_dim**-0.5
        queries, own_keys, own_values = self._per_block(q, group), self._per_block(k, 1), self._per_block(v, 1)
        shared = torch.baddbmm(self._bias, queries.reshape(rows, -1, c.head_dim), keys.mT, alpha=scale)
        own = torch.bmm(queries, own_keys.mT).view(rows, -1, c.block_size) * scale
        weights = torch.cat((shared, own.to(shared.dtype)), dim=-1).softmax(dim=-1).to(v.dtype)
        of_context, of_block = weights[..., : self._length], weights[..., self._length :]
        out = torch.bmm(of_context, values).view(queries.shape)
        out = out + torch.bmm(of_block.reshape(len(queries), -1, c.block_size), own_values)
        apart = out.view(self._batch, c.num_kv_heads, self._blocks, group, c.block_size, c.head_dim)
        return apart.permute(0, 2, 4, 1, 3, 5).reshape(q.shape)

    def _per_block(self, x: Tensor, group: int) -> Tensor:
        """Return heads `[..., kv_heads * group * d]` as `[batch * kv_heads * blocks, group * slots, d]`."""
        c = self._config
        apart = x.view(self._batch, self._blocks, c.block_size, c.num_kv_heads, group, c.head_dim)
        return apart.permute(0, 3, 1, 4, 2, 5).reshape(-1, group * c.block_size, c.head_dim)

    def _keep(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return both as `[batch * kv_heads, length, head_dim]`, the keys rotated."""
        c = self._config
        keys = self._rotate(keys, c.num_kv_heads, torch.arange(self._length, device=keys.device))
        per_head = (x.view(self._batch, self._length, c.num_kv_heads, c.head_dim) for x in (keys, values))
        kept_keys, kept_values = (x.transpose(1, 2).reshape(-1, self._length, c.head_dim) for x in per_head)
        return kept_keys, kept_values

    def _rotate(self, x: Tensor, heads: int, positions: Tensor) -> Tensor:
        first, second = x.view(self._batch, len(positions), heads, -1).chunk(2, dim=-1)
        cos, sin = (table[positions, None].to(x.dtype) for table in (self._cos, self._sin))
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).view(x.shape)


def slot_positions(anchors: Tensor, slots: int) -> Tensor:
    """Return the positions int64 `[blocks, slots]` of the first `slots` slots of the blocks at `anchors` `[blocks]`."""
    return anchors[:, None] + torch.arange(slots, device=anchors.device)


def run_blocks(draft: BlockDraft, ids: Tensor, features: Tensor, anchors: Tensor) -> Tensor:
    """Return the hidden states `[batch, blocks, slots, H]` of the blocks at `anchors` int64 `[blocks]`.

    `ids` int64 `[batch, >= length]` and `features` `[batch, length, taps * Ht]` are of the same sequences.
    """
    c = draft.head.config
    tokens = ids.new_full((len(ids), len(anchors), c.block_size), c.mask_token_id)
    tokens[..., 0] = ids[:, anchors]
    execution = BlocksExecution(draft.head, features, anchors)
    embedded = draft.embed(tokens.flatten()).to(features.dtype)  # the residual stream stays in f32
    return draft.head.run(embedded, execution).view(*tokens.shape, -1)
