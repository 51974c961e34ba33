"""Geometry of a layer's experts, and which layers have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from outrider.compiler.models.config_reader import Count, Factor, Heads, InnerWidth, Keys
from outrider.compiler.models.families import Family


@dataclass(frozen=True)
class ClampedUnit:
    """The unit of gpt-oss: `(up + 1) * gate * sigmoid(alpha * gate)`, gate at most `limit`, up from -limit to limit.

    Products before and after it have biases, and so has the router.
    """

    alpha: float
    limit: float


@dataclass(frozen=True)
class ExpertsConfig:
    """`count` experts of width `size`, of which a token takes `top_k`; `normalise`: with weights that add up to 1."""

    count: int
    top_k: int
    size: int
    normalise: bool
    clamped: ClampedUnit | None = None


class _Keys(Keys):
    num_experts: Heads | None = None
    num_local_experts: Heads | None = None  # as transformers 5 writes it
    num_experts_per_tok: Count
    moe_intermediate_size: InnerWidth | None = None
    intermediate_size: InnerWidth
    norm_topk_prob: bool
    swiglu_alpha: Factor = 1.0
    swiglu_limit: Factor = 1.0
    mlp_only_layers: list[int] = Field(default_factory=list)
    decoder_sparse_step: Count = 1


def read_experts(
    raw: Mapping[str, Any], file: Path, family: Family, layers: int
) -> tuple[ExpertsConfig | None, frozenset[int]]:
    """Return the experts of `layers` layers and the layers that have them; None where none has.

    A layer has experts where `decoder_sparse_step` divides its number, counted from 1, unless `mlp_only_layers` lists
    it, counted from 0.
    """
    usual = family.experts
    if usual is None:
        return None, frozenset()
    keys = _Keys.read(usual.absent | {key: value for key, value in raw.items() if value is not None}, file)
    older, newer = keys.num_experts, keys.num_local_experts
    if older and newer and older != newer:
        raise keys.wrong(f"num_experts is {older} and num_local_experts {newer}; remove the wrong one")
    count = older or newer or usual.count
    if keys.num_experts_per_tok > count:
        raise keys.wrong(f"num_experts_per_tok is {keys.num_experts_per_tok}, and there are {count} experts")
    config = ExpertsConfig(
        count=count,
        top_k=keys.num_experts_per_tok,
        size=getattr(keys, usual.size_key),
        normalise=keys.norm_topk_prob,
        clamped=None if usual.clamped is None else ClampedUnit(keys.swiglu_alpha, keys.swiglu_limit),
    )
    step, dense = keys.decoder_sparse_step, keys.mlp_only_layers
    sparse = frozenset(layer for layer in range(layers) if (layer + 1) % step == 0 and layer not in dense)
    return (config if sparse else None), sparse
