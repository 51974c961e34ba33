"""Geometry of a layer's experts, and which layers have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.compiler.models.config_reader import Reader
from outrider.compiler.models.families import Family
from outrider.plans.errors import CheckpointError


@dataclass(frozen=True)
class ClampedUnit:
    """The unit of gpt-oss: `(up + 1) * gate * sigmoid(alpha * gate)`, gate at most `limit`, up from -limit to limit.

    Products before and behind it have biases, and so has the router.
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


def read_experts(
    raw: Mapping[str, Any], path: Path, get: Reader, family: Family, layers: int
) -> tuple[ExpertsConfig | None, frozenset[int]]:
    """Return the experts of `layers` layers and the layers that have them; None where none has.

    A layer has experts where `decoder_sparse_step` divides its number, counted from 1, unless `mlp_only_layers` lists
    it, counted from 0. Raises `CheckpointError`.
    """
    usual = family.experts
    if usual is None:
        return None, frozenset()
    config = ExpertsConfig(
        count=_count(raw, path, get, usual.count),
        top_k=get.integer("num_experts_per_tok", usual.top_k),
        size=get.integer(usual.size_key, usual.size),
        normalise=get.boolean("norm_topk_prob", usual.normalise),
        clamped=None if usual.clamped is None else _clamped(get, *usual.clamped),
    )
    if config.top_k > config.count:
        raise CheckpointError(f"{path}: num_experts_per_tok is {config.top_k}, and there are {config.count} experts")
    dense = raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(not isinstance(layer, int) or isinstance(layer, bool) for layer in dense):
        raise CheckpointError(f"{path}: mlp_only_layers must list numbers of layers, found {dense!r:.80}")
    step = get.integer("decoder_sparse_step", 1)
    sparse = frozenset(layer for layer in range(layers) if (layer + 1) % step == 0 and layer not in dense)
    return (config if sparse else None), sparse


def _clamped(get: Reader, alpha: float, limit: float) -> ClampedUnit:
    return ClampedUnit(get.factor("swiglu_alpha", alpha), get.factor("swiglu_limit", limit))


def _count(raw: Mapping[str, Any], path: Path, get: Reader, usual: int) -> int:
    """Return the number of experts, under the older name, or under the one that transformers 5 writes."""
    older, newer = raw.get("num_experts"), raw.get("num_local_experts")
    if older is not None and newer is not None and older != newer:
        raise CheckpointError(f"{path}: num_experts is {older!r} and num_local_experts {newer!r}; remove the wrong one")
    return get.integer("num_local_experts" if older is None else "num_experts", usual)
