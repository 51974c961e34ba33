"""A head whose step holds fewer pairs than a round may leave it: they go in with several passes."""

from __future__ import annotations

from pathlib import Path

from outrider import Runtime
from outrider.compiler.build import build
from outrider.compiler.recipe import load_recipe
from outrider.runtime.options.options import Options

HEAD = "drafters=[{name: head, kind: eagle3, checkpoint: head, tree: {top_k: 16, depth: 1, nodes: 64}}]"


def test_a_head_goes_on_behind_what_it_had_accepted(toy_recipe: Path, tmp_path: Path) -> None:
    build(load_recipe(toy_recipe, [HEAD, "capacity.prefill_chunk=1"]), toy_recipe, tmp_path / "plan")
    runtime = Runtime.load(tmp_path / "plan", threads=1)
    accepted = 0
    for seed in range(4):
        options = Options(max_new_tokens=100, temperature=1.0, seed=seed, ignore_eos=True, auto_disable=False)
        drafted = runtime.generate([5, 6, 7] * 5, drafter="head", **options)
        assert drafted.token_ids == runtime.generate([5, 6, 7] * 5, drafter="none", **options).token_ids
        accepted += drafted.stats.accepted
    assert accepted, "no round left more pairs than a step holds"
