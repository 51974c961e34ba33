"""In what numbers of bits weights are compared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from compiler.recipe import Recipe

Precision = Literal["fp32", "int8", "int4"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)


def weights_section(precision: Precision) -> dict[str, object]:
    """Return what a recipe's target, or a drafter, has beside its checkpoint."""
    return {} if precision == "fp32" else {"weights": {"type": precision}}


def precision_of(recipe: Recipe) -> Precision:
    """Return the precision of a recipe's target in float32 engines."""
    weights = recipe.target.weights
    return "fp32" if weights is None else weights.type
