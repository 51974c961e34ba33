"""The one decoder module: Llama, Qwen2 and Qwen3 are settings of it.

The module computes on flat tokens `[N, hidden]` (`[1, N, hidden]` in graphs) and leaves rotation and attention, which
need a sequence, to an `Execution`: `export.GraphExecution` writes KV-cache ops, `eager.CausalExecution` plain
attention. The module's code decides the exported graph: weights are `[in, out]` so that a projection is one MatMul
under its own name, and `F.rms_norm` / `F.embedding` become single ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compiler.models.config import DecoderConfig


class Execution(Protocol):
    """The parts of a layer that depend on its tokens' sequences. `x` is `[..., heads * head_dim]`."""

    def rotate(self, x: Tensor, heads: int) -> Tensor: ...

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


class LayerConfig(Protocol):
    """Geometry of one layer: a decoder's, or a drafter's with layers of the same kind."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def intermediate_size(self) -> int: ...

    @property
    def num_heads(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def query_size(self) -> int: ...

    @property
    def kv_size(self) -> int: ...

    @property
    def rms_norm_eps(self) -> float: ...

    @property
    def qkv_bias(self) -> bool: ...

    @property
    def output_bias(self) -> bool: ...

    @property
    def mlp_bias(self) -> bool: ...

    @property
    def qk_norm(self) -> bool: ...


class Linear(nn.Module):
    """`x @ weight (+ bias)` with `weight` stored `[in, out]`, the transpose of `nn.Linear`'s."""

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight
        return y if self.bias is None else y + self.bias


class RmsNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.size, self.eps = size, eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self.size,), self.weight, self.eps)


class DecoderLayer(nn.Module):
    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        hidden, c = config.hidden_size, config
        self.config = config
        self.attention_norm = RmsNorm(hidden, c.rms_norm_eps)
        self.q = Linear(hidden, c.query_size, c.qkv_bias)
        self.k = Linear(hidden, c.kv_size, c.qkv_bias)
        self.v = Linear(hidden, c.kv_size, c.qkv_bias)
        self.o = Linear(c.query_size, hidden, c.output_bias)
        self.q_norm = RmsNorm(c.head_dim, c.rms_norm_eps) if c.qk_norm else None
        self.k_norm = RmsNorm(c.head_dim, c.rms_norm_eps) if c.qk_norm else None
        self.mlp_norm = RmsNorm(hidden, c.rms_norm_eps)
        self.gate = Linear(hidden, c.intermediate_size, c.mlp_bias)
        self.up = Linear(hidden, c.intermediate_size, c.mlp_bias)
        self.down = Linear(c.intermediate_size, hidden, c.mlp_bias)

    def forward(self, h: Tensor, index: int, execution: Execution) -> Tensor:
        c = self.config
        x = self.attention_norm(h)
        q = execution.rotate(_per_head(self.q(x), self.q_norm, c.head_dim), c.num_heads)
        k = execution.rotate(self.key(x), c.num_kv_heads)
        h = h + self.o(execution.attend(index, q, k, self.v(x)))
        x = self.mlp_norm(h)
        out: Tensor = h + self.down(F.silu(self.gate(x)) * self.up(x))
        return out

    def key(self, x: Tensor) -> Tensor:
        """Return the keys `[..., kv_heads * head_dim]` of normed inputs `[..., hidden]`, normed and not yet rotated."""
        return _per_head(self.k(x), self.k_norm, self.config.head_dim)


class Decoder(nn.Module):
    """Tokens to logits: int64 `[N]` to `[M, vocab]`."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = None if config.tie_embeddings else Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, token_ids: Tensor, execution: Execution) -> Tensor:
        """Return the logits of all tokens."""
        return self.logits(self.hidden(token_ids, execution)[0])

    def hidden(self, token_ids: Tensor, execution: Execution, taps: Sequence[int] = ()) -> tuple[Tensor, list[Tensor]]:
        """Return the residual stream behind the last layer, `[N, hidden]`, and the streams that enter layers in `taps`.

        `token_ids` may be `[1, N]`, for `[1, N, hidden]`.
        """
        h, tapped = F.embedding(token_ids, self.embedding), {}
        for index, layer in enumerate(self.layers):
            tapped[index] = h
            h = layer(h, index, execution)
        return h, [tapped[index] for index in taps]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits `[..., vocab]` of a residual stream behind the last layer."""
        h = self.norm(hidden)
        return F.linear(h, self.embedding) if self.lm_head is None else self.lm_head(h)


def _per_head(x: Tensor, norm: RmsNorm | None, head_dim: int) -> Tensor:
    """Apply a per-head norm to `[..., heads * head_dim]`; identity where the family has none."""
    if norm is None:
        return x
    heads: Tensor = x.unflatten(-1, (-1, head_dim))  # type: ignore[no-untyped-call]
    normed: Tensor = norm(heads)
    return normed.flatten(-2)
