"""A mixture of experts in place of a layer's gated unit, and its two ops as PyTorch runs and traces them.

What the ops mean stands in `plugins.ops`. In PyTorch they compute the chosen experts, each for its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.compiler.models.experts_config import ExpertsConfig


class Experts(nn.Module):
    """Tokens `[..., hidden]` to what their experts make of them, `[..., hidden]`.

    Weights of experts are stacked, `[experts, in, out]`, and biases `[experts, out]`.
    """

    def __init__(self, config: ExpertsConfig, hidden: int) -> None:
        super().__init__()
        self.config, c = config, config
        self.router = nn.Parameter(torch.empty(hidden, c.count))
        self.gate = nn.Parameter(torch.empty(c.count, hidden, c.size))
        self.up = nn.Parameter(torch.empty(c.count, hidden, c.size))
        self.down = nn.Parameter(torch.empty(c.count, c.size, hidden))
        if c.clamped is not None:
            self.router_bias = nn.Parameter(torch.zeros(c.count))
            self.gate_bias = nn.Parameter(torch.zeros(c.count, c.size))
            self.up_bias = nn.Parameter(torch.zeros(c.count, c.size))
            self.down_bias = nn.Parameter(torch.zeros(c.count, hidden))

    def forward(self, x: Tensor) -> Tensor:
        c = self.config
        out: Tensor
        if c.clamped is None:
            weights = route(x, self.router, c.top_k, int(c.normalise))
            out = mixture_of_experts(x, weights, [self.gate, self.up, self.down])
        else:
            weights = biased_route(x, self.router, self.router_bias, c.top_k, int(c.normalise))
            products = [self.gate, self.up, self.down]
            biases = [self.gate_bias, self.up_bias, self.down_bias]
            out = clamped_mixture_of_experts(x, weights, products, biases, c.clamped.alpha, c.clamped.limit)
        return out


@torch.library.custom_op("outrider::route", mutates_args=())
def route(x: Tensor, router: Tensor, top_k: int, normalise: int) -> Tensor:
    """Return the weights f32 `[..., experts]` of tokens `x`."""
    return _weights(x @ router, top_k, normalise)


@torch.library.custom_op("outrider::biased_route", mutates_args=())
def biased_route(x: Tensor, router: Tensor, bias: Tensor, top_k: int, normalise: int) -> Tensor:
    """Return the weights as `route`, of logits with a bias."""
    return _weights(x @ router + bias, top_k, normalise)


@route.register_fake
@biased_route.register_fake
def _(x: Tensor, router: Tensor, *_: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], router.shape[1]), dtype=torch.float32)


@torch.library.custom_op("outrider::mixture_of_experts", mutates_args=())
def mixture_of_experts(x: Tensor, weights: Tensor, products: Sequence[Tensor]) -> Tensor:
    """Return what the experts of non-zero weight make of `x`, summed in ascending order, by gate, up and down."""
    gate, up, down = products

    def compute(rows: Tensor, e: int) -> Tensor:
        return (F.silu(rows @ gate[e]) * (rows @ up[e])) @ down[e]

    return _sum(x, weights, compute)


@torch.library.custom_op("outrider::clamped_mixture_of_experts", mutates_args=())
def clamped_mixture_of_experts(
    x: Tensor, weights: Tensor, products: Sequence[Tensor], biases: Sequence[Tensor], alpha: float, limit: float
) -> Tensor:
    """Return the same with biases and the clamped unit."""
    (gate, up, down), (gate_bias, up_bias, down_bias) = products, biases

    def compute(rows: Tensor, e: int) -> Tensor:
        low = (rows @ gate[e] + gate_bias[e]).clamp(max=limit)
        both = (rows @ up[e] + up_bias[e]).clamp(-limit, limit)
        return ((both + 1) * low * torch.sigmoid(alpha * low)) @ down[e] + down_bias[e]

    return _sum(x, weights, compute)


@mixture_of_experts.register_fake
@clamped_mixture_of_experts.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


EXPERT_OPS = tuple(
    getattr(torch.ops.outrider, name).default
    for name in ("route", "biased_route", "mixture_of_experts", "clamped_mixture_of_experts")
)


def _weights(logits: Tensor, top_k: int, normalise: int) -> Tensor:
    logits = logits.float()
    best, chosen = logits.sort(dim=-1, descending=True, stable=True)  # of equal ones the lower id first
    best, chosen = best[..., :top_k], chosen[..., :top_k]
    shares = best.softmax(-1) if normalise else (best - logits.logsumexp(-1, keepdim=True)).exp()
    return torch.zeros_like(logits).scatter(-1, chosen, shares)


def _sum(x: Tensor, weights: Tensor, compute: Callable[[Tensor, int], Tensor]) -> Tensor:
    rows, shares = x.flatten(0, -2), weights.flatten(0, -2).to(x.dtype)
    out = torch.zeros_like(rows)
    for e in range(shares.shape[1]):
        chosen = shares[:, e].nonzero()[:, 0]
        if len(chosen):
            out.index_add_(0, chosen, compute(rows[chosen], e) * shares[chosen, e, None])
    return out.view(x.shape)
