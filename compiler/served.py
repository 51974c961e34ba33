"""What a recipe may say and no plan can do yet."""

from __future__ import annotations

from compiler.recipe import Recipe
from compiler.recipe_drafters import EntropySection, ModelSection, NgramSection
from compiler.recipe_targets import OnnxRuntimeCpuSection, TensorRtRtxSection


def check_served(recipe: Recipe) -> None:
    """Raises `RecipeError`, naming the first key that asks for it."""
    several = recipe.capacity.branches
    if several > 1:
        says = None
        for index, drafter in enumerate(recipe.drafters):
            if isinstance(drafter, NgramSection):
                continue
            if drafter.acceptance == "rejection":
                key, what = "acceptance", "is rejection"
            elif isinstance(drafter, ModelSection) and isinstance(drafter.gamma, EntropySection):
                key, what = "gamma", "is as long as the drafter is sure"
            else:
                continue
            raise recipe.error(
                ("drafters", index, key), f"{what}, which serves one branch; capacity.branches is {several}"
            )
        if any(not isinstance(target, OnnxRuntimeCpuSection) for target in recipe.targets):
            says = "targets other than onnxruntime-cpu serve one branch for now"
        if says is not None:
            raise recipe.error(("capacity", "branches"), f"is {several}; {says}, set it to 1")
    if recipe.partial_kv.enabled:
        _check_partial(recipe)
    for index, target in enumerate(recipe.targets):
        if isinstance(target, OnnxRuntimeCpuSection) and recipe.dtype(target) != "float32":
            where = ("target", "dtype") if target.dtype is None else ("targets", index, "dtype")
            raise recipe.error(where, f"is {recipe.dtype(target)}; onnxruntime-cpu computes in float32, set it to that")
        if isinstance(target, TensorRtRtxSection):
            for place, drafter in enumerate(recipe.drafters):
                if not isinstance(drafter, NgramSection) and drafter.acceptance == "rejection":
                    raise recipe.error(
                        ("drafters", place, "acceptance"),
                        "is rejection, which sums in float64, and TensorRT has none; leave it coupled, or the target "
                        "tensorrt-rtx out",
                    )


def _check_partial(recipe: Recipe) -> None:
    """What partial KV asks of the rest of a recipe."""
    if recipe.capacity.branches > 1:
        raise recipe.error(
            ("partial_kv", "enabled"),
            f"is true, and capacity.branches is {recipe.capacity.branches}; a small arena is of one sequence, and a "
            "branch would need one of its own: set one of them to the other's default",
        )
    for index, drafter in enumerate(recipe.drafters):
        if not isinstance(drafter, NgramSection) and drafter.acceptance == "rejection":
            raise recipe.error(
                ("drafters", index, "acceptance"),
                "is rejection, by which tokens depend on what was drafted and where it was verified; partial_kv needs "
                "coupled",
            )
    for index, target in enumerate(recipe.targets):
        if not isinstance(target, OnnxRuntimeCpuSection):
            raise recipe.error(
                ("targets", index), f"is {target.kind}; partial_kv runs on onnxruntime-cpu for now: leave one out"
            )
