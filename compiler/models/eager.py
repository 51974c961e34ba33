"""Run the decoder in PyTorch over whole sequences, for training and as the oracle of `outrider verify`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from compiler.models.config import DecoderConfig
from compiler.models.decoder import Decoder
from compiler.models.rope import rope_tables


class CausalExecution:
    """Plain causal attention without a cache over `batch` independent sequences of equal length, flattened."""

    def __init__(self, config: DecoderConfig, batch: int, length: int, device: str | torch.device = "cpu") -> None:
        cos, sin = rope_tables(config.rope_theta, config.head_dim, length, config.rope_scaling)
        self._config, self._batch, self._length = config, batch, length
        self._cos = torch.from_numpy(cos).to(device)[None, :, None, :]
        self._sin = torch.from_numpy(sin).to(device)[None, :, None, :]

    def rotate(self, x: Tensor, heads: int) -> Tensor:
        first, second = x.view(self._batch, self._length, heads, -1).chunk(2, dim=-1)
        cos, sin = self._cos.to(x.dtype), self._sin.to(x.dtype)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).view(x.shape)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        c = self._config

        def heads(x: Tensor, count: int) -> Tensor:
            return x.view(self._batch, self._length, count, c.head_dim).transpose(1, 2)

        out = F.scaled_dot_product_attention(
            heads(q, c.num_heads), heads(k, c.num_kv_heads), heads(v, c.num_kv_heads), is_causal=True, enable_gqa=True
        )
        return out.transpose(1, 2).reshape(q.shape)


@torch.no_grad()
def sequence_logits(model: Decoder, token_ids: list[int]) -> Tensor:
    """Compute the logits `[N, vocab]` (f32) of all positions of one sequence in one pass without a cache."""
    execution = CausalExecution(model.config, 1, len(token_ids), model.embedding.device)
    ids = torch.tensor(token_ids, dtype=torch.int64, device=model.embedding.device)
    logits: Tensor = model(ids, execution)
    return logits.float()
