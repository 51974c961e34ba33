"""Recipes with partial KV that no plan can serve are refused, with the key and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.compiler.build import build
from outrider.compiler.recipe import load_recipe
from outrider.plans.errors import RecipeError

CHAINS = "drafters=[{name: a, kind: ngram, max_draft: 6}]"
ENABLED = "partial_kv.enabled=true"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["backends=[tensorrt-rtx]", CHAINS],
            r"backends\[0\] is tensorrt-rtx, whose engines read a KV cache of one size",
        ),
        (
            ["partial_kv.n_spec_tokens_buf=7", CHAINS],
            r"n_spec_tokens_buf is 7, but a step .* has up to 7 tokens, and one more must fit; raise it to 8 or more",
        ),
        (
            ["partial_kv.n_spec_tokens_buf=17", CHAINS],
            r"n_spec_tokens_buf is 17, but what waits there .* at most capacity\.prefill_chunk, 16; lower it",
        ),
        (
            ["partial_kv.n_spec_tokens_buf=16", "partial_kv.partial_threshold=90", CHAINS],
            r"n_retrieval_blocks is 256, which makes 4287 tokens .* more than the full KV cache's 384; lower it",
        ),
        (
            [
                "partial_kv.n_spec_tokens_buf=16",
                "partial_kv.n_retrieval_blocks=2",
                "partial_kv.n_draft_window_tokens=15",
                "partial_kv.partial_threshold=90",
                CHAINS,
            ],
            r"n_draft_window_tokens is 15, less than capacity\.prefill_chunk, 16",
        ),
        (
            ["partial_kv.n_spec_tokens_buf=16", CHAINS],
            r"partial_threshold is 4096, and no context of the plan is longer than 160; lower it",
        ),
        (
            ["partial_kv.n_spec_tokens_buf=16", "partial_kv.n_retrieval_blocks=2", "partial_kv.budget=3", CHAINS],
            r"budget is 3, but partial_kv\.n_retrieval_blocks leaves room for 2; lower it",
        ),
        (["partial_kv.reduction=median"], r"partial_kv\.reduction"),
        (["drafters=[{name: partial, kind: ngram}]"], r"is 'partial', which means its partial KV cache"),
    ],
)
def test_partial_kv_that_no_plan_serves_is_refused_with_the_key(
    toy_recipe: Path, tmp_path: Path, overrides: list[str], said: str
) -> None:
    with pytest.raises(RecipeError, match=said):
        build(load_recipe(toy_recipe, [ENABLED, *overrides]), toy_recipe, tmp_path / "plan")


def test_settings_of_partial_kv_that_is_off_are_no_part_of_a_plan(toy_recipe: Path) -> None:
    usual = load_recipe(toy_recipe).resolved()
    assert load_recipe(toy_recipe, ["partial_kv.block_size=8"]).resolved() == usual
    assert "partial_kv" in load_recipe(toy_recipe, [ENABLED]).resolved()
