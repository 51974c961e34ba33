"""What a recipe may say and no plan can do yet."""

from __future__ import annotations

from collections.abc import Sequence

from compiler.recipe import Recipe
from compiler.recipe_backends import OnnxRuntimeCpuSection, TensorRtRtxSection
from compiler.recipe_drafters import NgramSection
from plans.manifest import Drafter, Geometry, longest_draft
from plans.partial_kv import PartialKv


def check_served(recipe: Recipe) -> None:
    """Raises `RecipeError`, naming the first key that asks for it."""
    several = recipe.capacity.branches
    if several > 1 and any(not isinstance(backend, OnnxRuntimeCpuSection) for backend in recipe.backends):
        raise recipe.error(
            ("capacity", "branches"),
            f"is {several}; backends other than onnxruntime-cpu serve one branch for now, set it to 1",
        )
    if recipe.partial_kv.enabled:
        _check_beside_partial(recipe)
    for index, backend in enumerate(recipe.backends):
        if isinstance(backend, OnnxRuntimeCpuSection) and recipe.dtype(backend) != "float32":
            where = ("target", "dtype") if backend.dtype is None else ("backends", index, "dtype")
            raise recipe.error(
                where,
                f"is {recipe.dtype(backend)}; onnxruntime-cpu computes in float32: set it to float32 (a checkpoint in "
                "any of the types is read), and give other backends a dtype of their own in their sections",
            )
        if isinstance(backend, TensorRtRtxSection):
            for place, drafter in enumerate(recipe.drafters):
                if not isinstance(drafter, NgramSection) and drafter.acceptance == "rejection":
                    raise recipe.error(
                        ("drafters", place, "acceptance"),
                        "is rejection, which sums in float64, and TensorRT has none; leave it coupled, or the backend "
                        "tensorrt-rtx out",
                    )


def check_partial(recipe: Recipe, geometry: Geometry, drafters: Sequence[Drafter], partial: PartialKv) -> None:
    """Whether the partial arena is large enough for a step, and no larger than the full one (FEATURES row 36).

    Raises `RecipeError`, naming the key.
    """
    step, chunk = 1 + longest_draft(drafters), geometry.prefill_chunk
    waiting, window = partial.n_spec_tokens_buf, recipe.partial_kv.n_draft_window_tokens
    if waiting < step + 1:
        raise recipe.error(
            ("partial_kv", "n_spec_tokens_buf"),
            f"is {waiting}, but a step of the plan's drafters has up to {step} tokens, and one more must fit; raise it "
            f"to {step + 1} or more",
        )
    if waiting > chunk:
        raise recipe.error(
            ("partial_kv", "n_spec_tokens_buf"),
            f"is {waiting}, but what waits there goes into one pass over the full arena, which takes at most "
            f"capacity.prefill_chunk, {chunk}; lower it, or raise that",
        )
    if isinstance(partial.budget, int) and partial.budget > partial.n_retrieval_blocks:
        raise recipe.error(
            ("partial_kv", "budget"),
            f"is {partial.budget}, but partial_kv.n_retrieval_blocks leaves room for {partial.n_retrieval_blocks}; "
            "lower it, or raise that",
        )
    if max(partial.partial_threshold, 1) >= geometry.context:
        raise recipe.error(
            ("partial_kv", "partial_threshold"),
            f"is {partial.partial_threshold}, and no context of the plan is longer than {geometry.context}; lower it, "
            "or raise capacity.context",
        )
    if partial.largest > geometry.capacity:
        raise recipe.error(
            ("partial_kv", "n_retrieval_blocks"),
            f"is {partial.n_retrieval_blocks}, which makes {partial.largest} tokens with sink, window and buffer, more "
            f"than the full arena's {geometry.capacity}; lower it, or raise capacity.context",
        )
    if geometry.branches == 1 and window < chunk:
        raise recipe.error(
            ("partial_kv", "n_draft_window_tokens"),
            f"is {window}, less than capacity.prefill_chunk, {chunk}, which a drafter takes in at once; raise it",
        )


def _check_beside_partial(recipe: Recipe) -> None:
    """What partial KV asks of the rest of a recipe."""
    for index, backend in enumerate(recipe.backends):
        if not isinstance(backend, OnnxRuntimeCpuSection):
            raise recipe.error(
                ("backends", index), f"is {backend.kind}; partial_kv runs on onnxruntime-cpu for now: leave one out"
            )
