"""In what numbers of bits weights are compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

Precision = Literal["fp32", "int8", "int4"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)


def weights_section(precision: Precision) -> dict[str, object]:
    """Return what a recipe's target, or a drafter, has beside its checkpoint."""
    return {} if precision == "fp32" else {"weights": {"type": precision}}


def precision_of(section: Mapping[str, Any]) -> Precision:
    """Return the precision of the section of a target or draft model, in float32 engines, of a resolved recipe."""
    weights = section.get("weights")
    return "fp32" if weights is None else weights["type"]
