"""`acceptance: rejection`: classical speculative sampling draws from the target's distribution."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from compiler.build import build
from compiler.recipe import load_recipe
from plans.errors import RecipeError
from runtime import Runtime
from runtime.request import Options

DRAFTERS = (
    "drafters=[{name: classical, kind: model, checkpoint: drafter, gamma: 3, acceptance: rejection}, "
    "{name: head, kind: eagle3, checkpoint: head, tree: {top_k: 1, depth: 1, nodes: 3}, acceptance: rejection}]"
)
PROMPT = [(37 * i) % 299 + 1 for i in range(40)]


@pytest.fixture(scope="module")
def runtime(toy_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Runtime:
    out = tmp_path_factory.mktemp("rejection") / "plan"
    build(load_recipe(toy_recipe, [DRAFTERS]), toy_recipe, out)
    return Runtime.load(out)


def test_greedy_rejection_gives_the_tokens_of_plain_decoding(runtime: Runtime) -> None:
    """All of p lies on one token: it is accepted or corrected to."""
    options = Options(max_new_tokens=60, ignore_eos=True, auto_disable=False)
    plain = runtime.generate(PROMPT, drafter="none", **options).token_ids
    for drafter in ("classical", "head"):
        run = runtime.generate(PROMPT, drafter=drafter, **options)
        assert run.token_ids == plain
        assert run.stats.drafted > 0
    assert runtime.generate(PROMPT, drafter="classical", **options).stats.accepted > 0


def statistic(observed: Counter[int], expected: np.ndarray, draws: int) -> float:
    """Chi-square over the tokens that come up often, and the rest together."""
    often = [token for token in range(len(expected)) if expected[token] * draws >= 10]
    cells = [(observed[token], expected[token] * draws) for token in often]
    rest = draws - sum(count for count, _ in cells), draws - sum(mean for _, mean in cells)
    return sum((count - mean) ** 2 / max(mean, 1e-9) for count, mean in [*cells, rest] if mean > 5)


def third_tokens(runtime: Runtime, drafter: str, draws: int, **options: object) -> tuple[Counter[int], list[int]]:
    """Second drafted-or-corrected tokens behind one fixed start, over many seeds."""
    session = runtime.session()
    found: Counter[int] = Counter()
    for seed in range(draws):
        run = session.generate(
            PROMPT, whole=True, drafter=drafter, max_new_tokens=2, ignore_eos=True, temperature=1.0, top_k=12,
            seed=seed, auto_disable=False, **options,  # type: ignore[arg-type]
        )  # fmt: skip
        found[run.token_ids[1]] += 1
    return found, run.token_ids


@pytest.mark.parametrize("drafter", ["classical", "head"])
def test_tokens_have_the_distribution_of_plain_sampling(runtime: Runtime, drafter: str) -> None:
    """Against plain sampling of the same seeds' number: two samples, so twice the variance of one."""
    draws = 1500
    plain, _ = third_tokens(runtime, "none", 4 * draws)
    expected = np.array([plain[token] for token in range(300)]) / (4 * draws)
    found, _ = third_tokens(runtime, drafter, draws)
    often = int((expected * draws >= 10).sum())
    # Degrees of freedom `often`; the baseline's own noise adds a quarter. Five standard deviations.
    assert statistic(found, expected, draws) < 1.25 * (often + 5 * np.sqrt(2 * often))


def test_rejection_of_a_tree_is_refused(toy_recipe: Path, tmp_path: Path) -> None:
    recipe = load_recipe(
        toy_recipe,
        ["drafters=[{name: a, kind: model, checkpoint: drafter, tree: {top_k: 2, depth: 1, nodes: 4}, "
         "acceptance: rejection}]"],
    )  # fmt: skip
    with pytest.raises(RecipeError, match="chains"):
        build(recipe, toy_recipe, tmp_path / "plan")
