"""Partial KV of models with sliding layers, which see over the partial cache what they see over the full one."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from outrider import PrefixCacheConfig, Runtime
from outrider.compiler.build import build
from outrider.compiler.inspect import describe, print_description
from outrider.compiler.recipe import load_recipe
from outrider.plans import names
from outrider.plans.errors import RecipeError, RequestError
from outrider.runtime.options.request import resolve
from outrider.runtime.session import Session
from tests.conftest import PARTIAL_KV, BuildOnce, made_once
from tests.integration.families import DRAFTERS, write_toy
from tests.integration.long_context import prompt
from tests.integration.test_families import CUDA, emulated_engines
from tests.integration.test_random_use import expect_the_tokens_of_the_target_alone
from tests.plugins.emulator import Emulator
from tests.runtime.emulated_device import EmulatedDevice

WINDOW = 17  # with two window blocks of 4 tokens, two of the three blocks that are retrieved are in its reach
OF_THE_DRAFTER = 30  # longer than what its KV cache surely keeps after the gap, 20 tokens
SLIDING = {
    "gemma3": (True, False, True),
    "ministral": (True, False),
    "gpt_oss": (True, False),
}

pytestmark = pytest.mark.usefixtures("run_ahead")


def _set_window(checkpoint: Path, window: int) -> None:
    path = checkpoint / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(config | {"sliding_window": window}), encoding="utf-8")


@pytest.fixture(
    scope="module", params=["gemma3", *(pytest.param(n, marks=pytest.mark.long) for n in ("ministral", "gpt_oss"))]
)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def recipe_of(family: str, toy_recipe: Path, factory: pytest.TempPathFactory) -> Path:
    def write(folder: Path) -> None:
        write_toy(family, folder, toy_recipe.parent / "target")
        _set_window(folder / "target", WINDOW)
        _set_window(folder / "drafter", OF_THE_DRAFTER)

    return made_once(factory, f"sliding-{family}", write) / "model.yaml"


@pytest.fixture(scope="module")
def recipe(family: str, toy_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recipe_of(family, toy_recipe, tmp_path_factory)


@pytest.fixture(scope="module")
def plan(recipe: Path) -> Path:
    return build(load_recipe(recipe, [f"partial_kv={PARTIAL_KV}"]), recipe, recipe.parent / "plan").plan.root


@pytest.fixture(scope="module")
def one(plan: Path) -> Runtime:
    return Runtime.load(plan, threads=1)


def kv_of(session: Session, model: str, planes: slice, start: int, count: int) -> np.ndarray:
    """KV of `count` slots from `start` on, `[planes, heads, count, slot_size]`."""
    return session.buffers.kv(model)[0].array(start, count)[planes].copy()


def buffered(one: Runtime, family: str, *, windowed: bool) -> tuple[np.ndarray, np.ndarray]:
    """KV that passes over the partial cache have put into its buffer, and that of the same tokens over the full one: of
    the layers up to the first that sees every token, whose keys do not depend on retrieved blocks.

    Unless `windowed`, blocks are retrieved for sliding layers too.
    """
    length, new = 100, 5
    options = {"max_new_tokens": new, "drafter": "none", "ignore_eos": True, "auto_disable": False}
    session = one.session()
    windows = session.buffers.array(names.PARTIAL, names.LAYER_WINDOWS)
    kept = windows.copy()
    assert (kept > 0).tolist() == list(SLIDING[family])
    try:
        windows[:] = kept if windowed else 0
        found = session.generate(prompt(3, length), whole=True, partial_kv="lossy", **options)  # type: ignore[arg-type]
    finally:
        windows[:] = kept
    assert found.stats.refreshes == 1
    assert found.stats.partial_rounds == new - 1
    planes = slice(0, 2 * (SLIDING[family].index(False) + 1))
    over_partial = kv_of(session, names.PARTIAL, planes, 4 + 12 + 8, new - 1)
    text = [*prompt(3, length), *found.token_ids]
    full = one.session()
    full.generate(text, whole=True, partial_kv="off", **options | {"max_new_tokens": 1})  # type: ignore[arg-type]
    return over_partial, kv_of(full, names.TARGET, planes, length, new - 1)


def expect_the_windows_kept(one: Runtime, family: str, tolerance: float = 0.0) -> None:
    """Sliding layers compute over the partial cache what they compute over the full one."""
    ours, theirs = buffered(one, family, windowed=True)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance)
    ours, theirs = buffered(one, family, windowed=False)
    assert np.abs(ours - theirs).max() > 0.01  # retrieved blocks are no recent ones


def test_sliding_layers_compute_over_the_partial_cache_what_they_compute_over_the_full_one(
    one: Runtime, family: str
) -> None:
    expect_the_windows_kept(one, family)


@pytest.mark.long
def test_kernels_choose_blocks_by_the_windows(
    toy_recipe: Path, emulator: Emulator, built: BuildOnce, tmp_path_factory: pytest.TempPathFactory
) -> None:
    pytest.importorskip("cuda.core")
    recipe = recipe_of("gemma3", toy_recipe, tmp_path_factory)
    backends = f"backends=[{{kind: {CUDA}, compute_capabilities: [sm_80]}}]"
    one_row = ["capacity={context: 160, prefill_chunk: 16}", f"partial_kv={PARTIAL_KV}", backends]
    plan = built("sliding-cuda", one_row, recipe)
    device = EmulatedDevice(emulator)
    with emulated_engines(device), Runtime.load(plan) as one:
        expect_the_windows_kept(one, "gemma3", 2e-5)
        assert device.launched["outrider_block_select"] > 0
        for drafter in DRAFTERS:
            options = {"max_new_tokens": 40, "temperature": 0.8, "seed": 3, "ignore_eos": True}
            plain = one.session().generate(prompt(2, 70), drafter="none", partial_kv="off", **options)  # type: ignore[arg-type]
            found = one.session().generate(prompt(2, 70), drafter=drafter, auto_disable=False, **options)  # type: ignore[arg-type]
            assert found.token_ids == plain.token_ids
            assert found.stats.partial_rounds > 5


def test_tokens_depend_on_neither_drafter_nor_company_nor_cache(plan: Path) -> None:
    """Branches, requests and sessions with a row each, draft trees, the prefix cache, cuts, at any temperature."""
    cache = PrefixCacheConfig(memory_bytes=1 << 19, max_cached_tokens=200)
    with Runtime.load(plan, threads=1) as alone:
        expect_the_tokens_of_the_target_alone(
            alone, plan, "batching", 25, seed=5, cache=cache, coupled=DRAFTERS, rejecting=()
        )


def test_budgets_that_do_not_reach_the_window_are_refused(one: Runtime) -> None:
    with pytest.raises(RequestError, match=r"partial_budget is 1; pass auto, or 2 to 3 blocks: .* the last 17 tokens"):
        one.generate("x", partial_budget=1)
    assert resolve({"partial_budget": 2}, one.manifest, one.grammars).partial_budget == 2


def test_inspect_shows_windows(plan: Path, family: str) -> None:
    described = describe(plan)
    assert described["models"]["target"]["layer_windows"] == tuple(WINDOW * slides for slides in SLIDING[family])
    assert described["models"]["chain"]["layer_windows"] == tuple(OF_THE_DRAFTER * s for s in SLIDING[family])
    printed = io.StringIO()
    print_description(described, Console(file=printed, width=200))
    assert f"\n{sum(SLIDING[family])} of {len(SLIDING[family])} layers see {WINDOW} tokens\n" in printed.getvalue()


OF_250 = ["capacity={context: 250, prefill_chunk: 16}", "partial_kv.n_sink_blocks=40"]


@pytest.mark.parametrize(
    ("family", "window", "overrides", "said"),
    [
        ("gemma3", WINDOW, ["partial_kv.n_retrieval_blocks=1"], "is 1, but layers .* last 17 tokens, .* raise it to 2"),
        (
            "gemma3",
            WINDOW,
            ["partial_kv.budget=1"],
            "budget is 1, but layers .* last 17 tokens, .* to 2 or more",
        ),
        ("gemma3", WINDOW, ["partial_kv.block_size=1", "partial_kv.n_retrieval_blocks=13"], "raise it to 14 or more"),
        ("mistral", 20, [], "enabled is true, but no layer of the target sees more than the last 20"),
        ("ministral", 245, OF_250, "n_retrieval_blocks is 3, but .* leave partial_kv out"),
    ],
)
def test_a_partial_cache_that_does_not_fit_the_windows_is_refused(
    toy_recipe: Path, tmp_path: Path, family: str, window: int, overrides: list[str], said: str
) -> None:
    write_toy(family, tmp_path, toy_recipe.parent / "target")
    _set_window(tmp_path / "target", window)
    recipe = load_recipe(tmp_path / "model.yaml", [f"partial_kv={PARTIAL_KV}", "drafters=[]", *overrides])
    with pytest.raises(RecipeError, match=said):
        build(recipe, tmp_path / "model.yaml", tmp_path / "plan")
