"""Our graph ops as PyTorch custom ops: never run, only traced and translated to the ONNX ops of the same names.

Those of experts and of `models.ops` run in PyTorch too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnxscript
import torch
from torch import Tensor

import outrider.compiler.models.experts  # noqa: F401  registers its ops
from outrider.compiler.models.ops import composite
from outrider.plugins.onnx_ops import DOMAIN, VERSION
from outrider.plugins.ops import OPS


@torch.library.custom_op("outrider::branch_attention", mutates_args=())
def branch_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    attn_bias: Tensor,
    past_length: Tensor,
    row_splits: Tensor,
    num_heads: int,
    kv_num_heads: int,
    scale: float,
    later: int,
    asks: int,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Shapes: `plugins.ops`, BranchAttention."""
    raise NotImplementedError("outrider::branch_attention exists for export only")


@branch_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k_cache), torch.empty_like(v_cache)


@torch.library.custom_op("outrider::path_conv", mutates_args=())
def path_conv(
    x: Tensor,
    weight: Tensor,
    tail: Tensor,
    log: Tensor,
    path: list[Tensor],
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Shapes: `plugins.ops`, PathConv; `path` are the integers that it reads."""
    raise NotImplementedError("outrider::path_conv exists for export only")


@path_conv.register_fake
def _(x: Tensor, weight: Tensor, tail: Tensor, log: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(tail), torch.empty_like(log)


@torch.library.custom_op("outrider::window_bias", mutates_args=())
def window_bias(attn_bias: Tensor, window: int) -> Tensor:
    """Shapes: `plugins.ops`, WindowBias."""
    raise NotImplementedError("outrider::window_bias exists for export only")


@window_bias.register_fake
def _(attn_bias: Tensor, window: int) -> Tensor:
    return torch.empty_like(attn_bias)


@composite
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    attn_bias: Tensor,
    past_length: Tensor,
    row_splits: Tensor,
    sinks: Tensor | None,
    positions: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    num_heads: int,
    kv_num_heads: int,
    scale: float,
    later: int,
    asks: int,
    softcap: float,
    window: int,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Shapes: `plugins.ops`, BranchAttention, whose parts beside attending are PyTorch's ops here."""
    if q_norm is not None and k_norm is not None:
        q, k = (_norm_heads(x, weight, epsilon) for x, weight in ((q, q_norm), (k, k_norm)))
    if cos is not None and sin is not None:
        part = 0 if 2 * cos.shape[1] == k_cache.shape[3] else 2 * cos.shape[1]
        q, k = (
            torch.onnx.ops.rotary_embedding(x, cos, sin, positions, num_heads=heads, rotary_embedding_dim=part)
            for x, heads in ((q, num_heads), (k, kv_num_heads))
        )
    out, k_out, v_out = branch_attention(
        q, k, v, k_cache, v_cache, window_bias(attn_bias, window) if window else attn_bias, past_length, row_splits,
        num_heads, kv_num_heads, scale, later, asks, softcap, sinks,
    )  # fmt: skip
    return out, k_out, v_out, q.squeeze(0)


def _norm_heads(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    heads: Tensor = x.unflatten(-1, (-1, len(weight)))  # type: ignore[no-untyped-call]
    return torch.nn.functional.rms_norm(heads, weight.shape, weight, epsilon).flatten(-2)


@torch.library.custom_op("outrider::tree_expand", mutates_args=())
def tree_expand(
    logits: Tensor,
    score: Tensor,
    noise: Tensor,
    draft_sampling: Tensor,
    top_k: int,
    doubt: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Shapes: `plugins.ops`, TreeExpand."""
    raise NotImplementedError("outrider::tree_expand exists for export only")


@tree_expand.register_fake
def _(logits: Tensor, score: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    (trees, nodes), top_k = score.shape, rest[2]
    return (
        logits.new_empty((trees, nodes * top_k), dtype=torch.int64),
        logits.new_empty((trees, nodes * top_k)),
        logits.new_empty((trees, top_k), dtype=torch.int64),
    )


@torch.library.custom_op("outrider::draft_sample", mutates_args=())
def draft_sample(logits: Tensor, noise: Tensor, draft_sampling: Tensor) -> tuple[Tensor, Tensor]:
    """Shapes: `plugins.ops`, DraftSample."""
    raise NotImplementedError("outrider::draft_sample exists for export only")


@draft_sample.register_fake
def _(logits: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return logits.new_empty(logits.shape[:2], dtype=torch.int64), torch.empty_like(logits)


@torch.library.custom_op("outrider::tree_rerank", mutates_args=())
def tree_rerank(
    candidate_token: Tensor, candidate_score: Tensor, candidate_parent: Tensor, candidate_depth: Tensor, nodes: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Shapes: `plugins.ops`, TreeRerank."""
    raise NotImplementedError("outrider::tree_rerank exists for export only")


@tree_rerank.register_fake
def _(
    candidate_token: Tensor, candidate_score: Tensor, candidate_parent: Tensor, candidate_depth: Tensor, nodes: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    shape = (candidate_token.shape[0], nodes - 1)
    integers = [candidate_token.new_empty(shape) for _ in range(4)]
    return integers[0], integers[1], integers[2], integers[3], candidate_score.new_empty(shape)


def _translated(op: str, attributes: tuple[str, ...]) -> Callable[..., Any]:
    def translate(*inputs: Any) -> Any:
        tensors, values = inputs[: len(inputs) - len(attributes)], inputs[len(inputs) - len(attributes) :]
        domain = onnxscript.values.Opset(DOMAIN, VERSION)
        return getattr(domain, op)(*tensors, **dict(zip(attributes, values, strict=True)))

    return translate


def _translate_path_conv(x: Any, weight: Any, tail: Any, log: Any, path: Any, bias: Any = None) -> Any:
    return onnxscript.values.Opset(DOMAIN, VERSION).PathConv(x, weight, tail, log, *path, bias)


def _translate_cast(x: Any, dtype: int) -> Any:
    return onnxscript.opset23.Cast(x, to=dtype)


def _translate_subtracted(x: Any, other: Any) -> Any:
    return onnxscript.opset23.Sub(onnxscript.opset23.CastLike(other, x), x)


def _translate_detach(x: Any) -> Any:
    return x


TRANSLATIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.to.dtype: _translate_cast,
    torch.ops.aten.rsub.Scalar: _translate_subtracted,
    torch.ops.aten.detach_.default: _translate_detach,
    torch.ops.outrider.attention.default: _translated(
        "BranchAttention", tuple(spec.name for spec in OPS["BranchAttention"].schema.attributes)
    ),
    torch.ops.outrider.path_conv.default: _translate_path_conv,
    torch.ops.outrider.route.default: _translated("Route", ("top_k", "normalise")),
    torch.ops.outrider.biased_route.default: _translated("BiasedRoute", ("top_k", "normalise")),
    torch.ops.outrider.mixture_of_experts.default: _translated("MixtureOfExperts", ()),
    torch.ops.outrider.clamped_mixture_of_experts.default: _translated("ClampedMixtureOfExperts", ("alpha", "limit")),
    torch.ops.outrider.silu_unit.default: _translated("SiluUnit", ()),
    torch.ops.outrider.gelu_unit.default: _translated("GeluUnit", ()),
    torch.ops.outrider.softcap.default: _translated("Softcap", ("cap",)),
    torch.ops.outrider.tree_expand.default: _translated("TreeExpand", ("top_k", "doubt")),
    torch.ops.outrider.draft_sample.default: _translated("DraftSample", ()),
    torch.ops.outrider.tree_rerank.default: _translated("TreeRerank", ("nodes",)),
}
