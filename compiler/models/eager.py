"""Run the decoder in PyTorch over whole sequences, for training and as the oracle of `outrider verify`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.compiler.models.attention import Attention
from outrider.compiler.models.decoder import Decoder, HeadNorms, norm_heads
from outrider.compiler.models.rope import Rope


class CausalExecution:
    """Plain causal attention without a cache over `batch` independent sequences of equal length, flattened."""

    def __init__(self, config: Attention, batch: int, length: int, device: str | torch.device = "cpu") -> None:
        self._config, self._batch, self._length, self._device = config, batch, length, device
        self._tables: dict[Rope, tuple[Tensor, Tensor]] = {}
        for rope in {kind.rope for kind in config.kinds if kind.rope is not None}:
            cos, sin = (torch.from_numpy(table).to(device)[None, :, None, :] for table in rope.tables(length))
            self._tables[rope] = cos, sin
        self._seen: dict[int, Tensor] = {}

    def _rotate(self, layer: int, x: Tensor, heads: int) -> Tensor:
        rope = self._config.kinds[layer].rope
        if rope is None:
            return x
        apart = x.view(self._batch, self._length, heads, -1)
        return rotated(apart, *self._tables[rope]).view(x.shape)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, norms: HeadNorms = (None, None), sinks: Tensor | None = None
    ) -> Tensor:
        c = self._config
        q = self._rotate(layer, norm_heads(q, norms[0]), c.num_heads)
        k = self._rotate(layer, norm_heads(k, norms[1]), c.num_kv_heads)

        def heads(x: Tensor, count: int) -> Tensor:
            return x.view(self._batch, self._length, count, c.head_dim).transpose(1, 2)

        queries, keys, values = heads(q, c.num_heads), heads(k, c.num_kv_heads), heads(v, c.num_kv_heads)
        out = attended(queries, keys, values, c, self._visible(c.kinds[layer].window), sinks)
        return out.transpose(1, 2).reshape(q.shape)

    def convolve(self, layer: int, x: Tensor, taps: Tensor, bias: Tensor | None) -> Tensor:
        kernel, channels = taps.shape
        apart = F.pad(x.view(self._batch, self._length, channels).mT, (kernel - 1, 0))
        return F.conv1d(apart, taps.mT[:, None], bias, groups=channels).mT.reshape(x.shape)

    def _visible(self, window: int | None) -> Tensor | None:
        """Return which keys each query sees, `[length, length]`; None: all up to its own."""
        if window is None or window >= self._length:
            return None
        if window not in self._seen:
            ones = torch.ones(self._length, self._length, dtype=torch.bool, device=self._device)
            self._seen[window] = ones.tril() & ones.triu(1 - window)
        return self._seen[window]


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads `[..., head_dim]` by halves of the first numbers, of which `cos` and `sin` `[..., r]` are for 2r."""
    size = 2 * cos.shape[-1]
    first, second = x[..., :size].chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, x[..., size:]), dim=-1)


def attended(
    q: Tensor, k: Tensor, v: Tensor, config: Attention, seen: Tensor | None, sinks: Tensor | None = None
) -> Tensor:
    """Attend with queries `[batch, heads, n, head_dim]` over keys and values `[batch, kv_heads, m, head_dim]`.

    `seen` bool `[n, m]` says which keys a query sees; None: those up to its own, for n = m. `sinks` `[heads]` are
    scores, under no cap, of a key without a value that all queries see.
    """
    scale, cap = config.attention_scale, config.attention_softcap
    if cap is None and sinks is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, is_causal=seen is None, enable_gqa=True, scale=scale
        )
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    if seen is None:
        seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    scores = q @ k.mT * scale
    if cap is not None:
        scores = torch.tanh(scores / cap) * cap
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is None:
        return scores.softmax(-1) @ v
    sink = sinks[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat((scores, sink), -1).softmax(-1)[..., :-1] @ v


@torch.no_grad()
def sequence_logits(model: Decoder, token_ids: list[int]) -> Tensor:
    """Compute the logits `[N, vocab]` (f32) of all positions of one sequence in one pass without a cache."""
    execution = CausalExecution(model.config, 1, len(token_ids), model.embedding.device)
    ids = torch.tensor(token_ids, dtype=torch.int64, device=model.embedding.device)
    logits: Tensor = model(ids, execution)
    return logits.float()
