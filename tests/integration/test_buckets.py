"""Steps that are rounded up, on the CPU: what fills a bucket changes no token."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from outrider import Runtime
from outrider.compiler.build import build
from outrider.compiler.recipe import load_recipe
from outrider.plans.manifest import Buckets
from outrider.runtime.options.options import Options
from tests.conftest import PARTIAL_KV, TOY_DRAFTERS
from tests.plans.damage import edit

PROMPT = [(37 * i) % 299 + 1 for i in range(20)] * 2
NEW, VIEWS = (1, 4, 7, 12), (128, 256)


@pytest.fixture(scope="module")
def bucketed(toy_plan: Path, tmp_path_factory: pytest.TempPathFactory) -> Runtime:
    """The toy, with buckets for its target that no draft of n-grams has the size of."""
    plan = shutil.copytree(toy_plan, tmp_path_factory.mktemp("buckets") / "plan")

    def change(manifest: dict[str, Any]) -> None:
        buckets = Buckets(new=NEW, view=VIEWS).model_dump(mode="json")
        manifest["backends"]["onnxruntime-cpu"]["buckets"] = {"target": buckets}

    edit(plan, change)
    return Runtime.load(plan, threads=1)


@pytest.mark.parametrize("drafter", ["none", *TOY_DRAFTERS])
@pytest.mark.parametrize("sampling", [Options(temperature=0.0), Options(temperature=0.8, top_k=20, seed=7)], ids=str)
def test_the_tokens_are_the_same(bucketed: Runtime, toy: Runtime, drafter: str, sampling: Options) -> None:
    options = sampling | Options(max_new_tokens=150, ignore_eos=True, auto_disable=False, drafter=drafter)
    expected, found = toy.generate(PROMPT, **options), bucketed.generate(PROMPT, **options)
    assert found.token_ids == expected.token_ids
    assert found.finish_reason == expected.finish_reason
    if drafter not in ("none", "chain", "block"):  # on devices a chain keeps its length to the end
        assert (found.stats.drafted, found.stats.accepted) == (expected.stats.drafted, expected.stats.accepted)


def test_drafts_are_rounded_up_as_far_as_there_is_room(bucketed: Runtime) -> None:
    session = bucketed.session()
    step, seen = session.loop.target_step, list[tuple[int, int, int]]()
    options = Options(max_new_tokens=200, ignore_eos=True, auto_disable=False, drafter="ngram")
    with closing(session.stream(PROMPT, **options)) as stream:
        for _ in stream:
            seen.append((int(step.past_length[0]), 1 + step.drafted, step.new_tokens))
    _, *rounds = seen  # the first also computes the prompt
    for past, size, rounded in rounds:
        bucket = min(b for b in NEW if b >= size)
        assert rounded == (bucket if past + bucket <= session.loop.target_step.largest_view else size)
    assert {size for _, size, _ in rounds} > {1}
    assert any(size < rounded for _, size, rounded in rounds)


def test_what_a_round_tells_leaves_out_what_fills_it_up(bucketed: Runtime, toy: Runtime) -> None:
    told = []
    for runtime in (toy, bucketed):
        rounds: list[Any] = []
        options = Options(max_new_tokens=40, ignore_eos=True, auto_disable=False, drafter="ngram")
        runtime.generate(PROMPT, on_round=rounds.append, **options)
        told.append(rounds)
    assert told[0] == told[1]


@pytest.mark.usefixtures("run_ahead")
def test_a_step_over_the_partial_cache_sees_no_more_than_that_has(toy_recipe: Path, tmp_path: Path) -> None:
    """Views are rounded up far, to more keys than the partial cache has slots."""
    scaling = "target.rope_scaling={rope_type: yarn, factor: 3.0, original_max_position_embeddings: 256}"
    recipe = load_recipe(toy_recipe, [f"partial_kv={PARTIAL_KV}", "capacity.context=600", "drafters=[]", scaling])
    plan = build(recipe, toy_recipe, tmp_path / "plan").plan
    room = plan.manifest.backends["onnxruntime-cpu"].symbols["target"]["T"]
    options = Options(max_new_tokens=40, ignore_eos=True, partial_kv="lossless", auto_disable=False)
    expected = Runtime.load(plan.root, threads=1).generate(PROMPT, **options)

    def change(manifest: dict[str, Any]) -> None:
        buckets = Buckets(new=NEW, view=(room,)).model_dump(mode="json")
        manifest["backends"]["onnxruntime-cpu"]["buckets"] = {"target": buckets}

    edit(plan.root, change)
    found = Runtime.load(plan.root, threads=1).generate(PROMPT, **options)
    assert found.token_ids == expected.token_ids
    assert found.stats.partial_rounds == expected.stats.partial_rounds > 0
