"""The one decoder module: every family of `families.FAMILIES` is a setting of it.

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

from outrider.compiler.models.block_config import BlockConfig
from outrider.compiler.models.config import DecoderConfig
from outrider.compiler.models.experts import Experts
from outrider.compiler.models.experts_config import ExpertsConfig
from outrider.compiler.models.mixers import ShortConvConfig
from outrider.compiler.models.ops import gelu_unit, silu_unit, softcap


class Execution(Protocol):
    """The part of a layer that depends on its tokens' sequences.

    Queries, keys and values are `[..., heads * head_dim]`. Each head of queries and keys is normed by `norms`, where
    there are some, and then rotated. `sinks` `[heads]` are scores of a key without a value that every query sees beside
    its own.
    """

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, norms: HeadNorms = (None, None), sinks: Tensor | None = None
    ) -> Tensor: ...

    def convolve(self, layer: int, x: Tensor, taps: Tensor, bias: Tensor | None) -> Tensor:
        """Convolve each channel of `[..., channels]` with the tokens before on its path; `taps` `[kernel, channels]`,
        the oldest first. Executions of models without such layers have none."""
        raise TypeError("the layers of this model attend alone")


LayerConfig = DecoderConfig | BlockConfig
"""Geometry of one layer: a decoder's, or a drafter's with layers of the same kind."""


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


HeadNorms = tuple[RmsNorm | None, RmsNorm | None]
"""Norms of each head of queries and of keys."""


class Taps(nn.Module):
    """The weights of a causal depthwise convolution, `[kernel, channels]`, the oldest token's first."""

    def __init__(self, channels: int, config: ShortConvConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.kernel, channels))
        self.bias = nn.Parameter(torch.zeros(channels)) if config.bias else None


class ShortConv(nn.Module):
    """A gated short convolution (LFM2, arXiv 2511.23404): before, after | x = in(h); out(after * conv(before * x))."""

    def __init__(self, hidden: int, config: ShortConvConfig) -> None:
        super().__init__()
        self.in_proj = Linear(hidden, 3 * hidden, config.bias)
        self.taps = Taps(hidden, config)
        self.out_proj = Linear(hidden, hidden, config.bias)

    def forward(self, h: Tensor, index: int, execution: Execution) -> Tensor:
        before, after, x = self.in_proj(h).chunk(3, dim=-1)
        out: Tensor = self.out_proj(after * execution.convolve(index, before * x, self.taps.weight, self.taps.bias))
        return out


class DecoderLayer(nn.Module):
    """Attention, or a convolution, and a gated MLP, or a mixture of experts, each with a norm before it, after it, or
    both."""

    def __init__(
        self,
        config: LayerConfig,
        experts: ExpertsConfig | None = None,
        sinks: bool = False,
        conv: ShortConvConfig | None = None,
    ) -> None:
        super().__init__()
        hidden, c = config.hidden_size, config
        self.config = config

        def norm(wanted: bool, size: int = hidden) -> RmsNorm | None:
            return RmsNorm(size, c.rms_norm_eps) if wanted else None

        self.attention_norm = norm(c.norm_before)
        self.conv = None if conv is None else ShortConv(hidden, conv)
        if conv is None:
            self.q = Linear(hidden, c.query_size, c.qkv_bias)
            self.k = Linear(hidden, c.kv_size, c.qkv_bias)
            self.v = Linear(hidden, c.kv_size, c.qkv_bias)
            self.o = Linear(c.query_size, hidden, c.output_bias)
            self.sinks = nn.Parameter(torch.zeros(c.num_heads)) if sinks else None
            whole = c.qk_norm == "whole"
            self.q_norm = norm(c.qk_norm != "none", c.query_size if whole else c.head_dim)
            self.k_norm = norm(c.qk_norm != "none", c.kv_size if whole else c.head_dim)
        self.attention_out_norm = norm(c.norm_after)
        self.mlp_norm = norm(c.norm_before)
        self.mlp_out_norm = norm(c.norm_after)
        self.experts = None if experts is None else Experts(experts, hidden)
        if experts is None:
            self.gate = Linear(hidden, c.intermediate_size, c.mlp_bias)
            self.up = Linear(hidden, c.intermediate_size, c.mlp_bias)
            self.down = Linear(c.intermediate_size, hidden, c.mlp_bias)

    def forward(self, h: Tensor, index: int, execution: Execution) -> Tensor:
        x = _normed(h, self.attention_norm)
        mixed = self._attend(x, index, execution) if self.conv is None else self.conv(x, index, execution)
        h = self._add(h, mixed, self.attention_out_norm)
        x = _normed(h, self.mlp_norm)
        if self.experts is not None:
            return self._add(h, self.experts(x), self.mlp_out_norm)
        unit = silu_unit if self.config.activation == "silu" else gelu_unit
        return self._add(h, self.down(unit(self.gate(x), self.up(x))), self.mlp_out_norm)

    def _attend(self, x: Tensor, index: int, execution: Execution) -> Tensor:
        q, k, norms = self.q(x), self.k(x), (self.q_norm, self.k_norm)
        if self.config.qk_norm == "whole":
            q, k, norms = _normed(q, self.q_norm), _normed(k, self.k_norm), (None, None)
        out: Tensor = self.o(execution.attend(index, q, k, self.v(x), norms, self.sinks))
        return out

    def _add(self, h: Tensor, out: Tensor, norm: RmsNorm | None) -> Tensor:
        """Return the residual stream `h` with what attention or the MLP adds to it."""
        scale, out = self.config.residual_scale, _normed(out, norm)
        return h + (out if scale == 1.0 else out * scale)


class Decoder(nn.Module):
    """Tokens to logits: int64 `[N]` to `[M, vocab]`."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.layers = nn.ModuleList(
            DecoderLayer(
                config,
                config.experts if index in config.expert_layers else None,
                config.sinks,
                config.conv if index in config.conv_layers else None,
            )
            for index in range(config.num_layers)
        )
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = None if config.tie_embeddings else Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, token_ids: Tensor, execution: Execution) -> Tensor:
        """Return the logits of all tokens."""
        return self.logits(self.hidden(token_ids, execution)[0])

    def hidden(self, token_ids: Tensor, execution: Execution, taps: Sequence[int] = ()) -> tuple[Tensor, list[Tensor]]:
        """Return the residual stream after the last layer, `[N, hidden]`, and the streams that enter layers in `taps`.

        `token_ids` may be `[1, N]`, for `[1, N, hidden]`.
        """
        h, tapped = self.embed(token_ids), {}
        for index, layer in enumerate(self.layers):
            tapped[index] = h
            h = layer(h, index, execution)
        return h, [tapped[index] for index in taps]

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return the residual stream that enters the first layer, `[..., hidden]` for tokens int64 `[...]`."""
        h, scale = F.embedding(token_ids, self.embedding), self.config.embedding_scale
        return h if scale == 1.0 else h * scale

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits `[..., vocab]` of a residual stream after the last layer."""
        c, h = self.config, self.norm(hidden)
        logits: Tensor = F.linear(h, self.embedding) if self.lm_head is None else self.lm_head(h)
        if c.logit_divisor != 1.0:
            logits = logits / c.logit_divisor
        return logits if c.logit_softcap is None else softcap(logits, c.logit_softcap)


def _normed(x: Tensor, norm: RmsNorm | None) -> Tensor:
    return x if norm is None else norm(x)


def norm_heads(x: Tensor, norm: RmsNorm | None) -> Tensor:
    """Norm each head of `[..., heads * head_dim]` by itself."""
    if norm is None:
        return x
    heads: Tensor = x.unflatten(-1, (-1, norm.size))  # type: ignore[no-untyped-call]
    normed: Tensor = norm(heads)
    return normed.flatten(-2)
