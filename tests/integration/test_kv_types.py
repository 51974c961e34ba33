"""KV caches of float16 and int8: speculation, company, mode and caches change no token, as with float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from outrider import PrefixCacheConfig, Runtime
from outrider.compiler.build import build
from outrider.compiler.inspect import describe
from outrider.compiler.recipe import load_recipe
from outrider.plans import names
from outrider.tools.verify.verification import KV_LOGIT_BOUND, verify_plan
from tests.conftest import EVERYTHING, REFERENCE_RECIPE, made_once
from tests.integration.quantised import calibration_text, quantised
from tests.integration.random_use import expect_the_tokens_of_the_target_alone
from tests.integration.step_logits import expect_the_same_bits

PROMPT = [(37 * i) % 299 + 1 for i in range(60)]
SLOT_BYTES = {"float32": 4 * 16, "float16": 2 * 16, "int8": 16 + 4}  # of the toy's heads of 16


@pytest.fixture(scope="module", params=[pytest.param("float16", marks=pytest.mark.long), "int8"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def plan(kind: str, toy_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of everything, with KV caches of the type."""
    recipe = load_recipe(toy_recipe, [*EVERYTHING, f"kv_cache={kind}"])
    return made_once(tmp_path_factory, f"kv-{kind}-plan", lambda out: build(recipe, toy_recipe, out))


@pytest.fixture(scope="module")
def alone(plan: Path) -> Iterator[Runtime]:
    runtime = Runtime.load(plan, threads=1)
    yield runtime
    runtime.close(timeout=60)


@pytest.mark.usefixtures("run_ahead")
@pytest.mark.parametrize("rounds", [25, pytest.param(400, marks=pytest.mark.long)])
@pytest.mark.parametrize("mode", ["batching", pytest.param("in-one-sequence", marks=pytest.mark.long)])
def test_tokens_depend_on_neither_drafter_nor_company_nor_cache(
    plan: Path, alone: Runtime, mode: str, rounds: int
) -> None:
    """Lossless partial KV, prefix cache, compaction and branches included."""
    cache = PrefixCacheConfig(memory_bytes=1 << 19, max_cached_tokens=200)
    expect_the_tokens_of_the_target_alone(alone, plan, mode, rounds, seed=5, cache=cache)


@pytest.mark.long
@pytest.mark.usefixtures("run_ahead")
def test_the_same_holds_with_quantised_weights(toy_recipe: Path, tmp_path: Path) -> None:
    recipe = load_recipe(toy_recipe, [*quantised(EVERYTHING, "int4", calibration_text(tmp_path)), "kv_cache=int8"])
    build(recipe, toy_recipe, tmp_path / "plan")
    alone, cache = Runtime.load(tmp_path / "plan", threads=1), PrefixCacheConfig(memory_bytes=1 << 19)
    expect_the_tokens_of_the_target_alone(alone, tmp_path / "plan", "batching", 40, seed=6, cache=cache)


def test_logits_are_the_same_bits_in_a_prompt_and_in_a_step(plan: Path) -> None:
    expect_the_same_bits(Runtime.load(plan, threads=2), PROMPT, (1, 2, 5, 16))


@pytest.mark.usefixtures("run_ahead")
def test_partial_kv_runs_over_such_caches(alone: Runtime) -> None:
    """Lossless gives the tokens of full KV, and both modes run steps over the partial cache."""
    for drafter in ("none", "head", "chain"):
        options = {"max_new_tokens": 60, "drafter": drafter, "auto_disable": False, "ignore_eos": True}
        full = alone.generate(PROMPT, partial_kv="off", **options)
        lossless = alone.generate(PROMPT, partial_kv="lossless", **options)
        lossy = alone.generate(PROMPT, partial_kv="lossy", **options)
        assert lossless.token_ids == full.token_ids
        assert lossless.stats.partial_rounds > 0
        assert lossy.stats.partial_rounds > 0


def test_a_saved_prefix_cache_gives_what_a_cold_start_gives(plan: Path, alone: Runtime, tmp_path: Path) -> None:
    """KV of all models, and tokens; the file holds as many bytes as the type says."""
    config = PrefixCacheConfig(max_cached_tokens=512, min_prefix_length=1)
    first = Runtime.load(plan, threads=1, prefix_cache=config)
    for drafter in ("head", "bushy"):
        first.generate(PROMPT, max_new_tokens=4, drafter=drafter, ignore_eos=True, auto_disable=False)
    first.save_prefix_cache(tmp_path / "prompts")
    second = Runtime.load(plan, threads=1, prefix_cache=config)
    assert second.load_prefix_cache(tmp_path / "prompts") >= len(PROMPT)
    for drafter in ("none", "head", "bushy"):
        options = {"max_new_tokens": 12, "drafter": drafter, "logprobs": 5, "ignore_eos": True, "auto_disable": False}
        warm_session, cold_session = second.session(), alone.session()
        warm, cold = (session.generate(PROMPT, **options) for session in (warm_session, cold_session))
        assert warm.token_ids == cold.token_ids
        assert [entry.logprob for entry in warm.logprobs] == [entry.logprob for entry in cold.logprobs]
        assert warm.stats.cached_tokens == len(PROMPT) - 1
        warm_kv, cold_kv = (
            session.buffers.array(names.TARGET, names.KV)[:, 0, :, : len(PROMPT)]
            for session in (warm_session, cold_session)
        )
        np.testing.assert_array_equal(warm_kv.view(np.uint8), cold_kv.view(np.uint8))


def test_memory_and_inspect_count_the_bytes_of_the_type(
    plan: Path, kind: str, everything_plan: Path, everything: Runtime
) -> None:
    config = PrefixCacheConfig(max_cached_tokens=512)
    found = Runtime.load(plan, threads=1, prefix_cache=config)
    whole = Runtime.load(everything_plan, threads=1, prefix_cache=config)
    ratio = SLOT_BYTES[kind] / SLOT_BYTES["float32"]
    small, large = found.memory(), whole.memory()
    assert set(small.kv_bytes) == set(large.kv_bytes) >= {names.TARGET, names.PARTIAL, "head", "chain"}
    for model, size in small.kv_bytes.items():
        head_dim = found.manifest.models[names.TARGET if model == names.PARTIAL else model].head_dim
        slot = {"float16": 2 * head_dim, "int8": head_dim + 4}[kind]
        assert size * 4 * head_dim == large.kv_bytes[model] * slot
    assert large.engine_bytes - small.engine_bytes == sum(large.kv_bytes.values()) - sum(small.kv_bytes.values())
    assert small.kv_bytes[names.TARGET] == large.kv_bytes[names.TARGET] * ratio
    assert small.prefix_cache_bytes < large.prefix_cache_bytes
    inspected = describe(plan)["backends"]["onnxruntime-cpu"]
    assert inspected["kv_caches"] == {name: {"type": kind, "bytes": size} for name, size in small.kv_bytes.items()}
    assert inspected["session_bytes"] == small.engine_bytes


@pytest.mark.long
@pytest.mark.parametrize("kept", ["int8", pytest.param("float16", marks=pytest.mark.long)])
def test_the_reference_agrees_with_its_checkpoint(kept: str, tmp_path: Path) -> None:
    """Logits within the type's bound of transformers', and with every drafter the tokens of plain decoding."""
    recipe = load_recipe(REFERENCE_RECIPE, [f"kv_cache={kept}"])
    build(recipe, REFERENCE_RECIPE, tmp_path / "plan")
    result = verify_plan(recipe, tmp_path / "plan", prompts=2, new_tokens=32)
    assert result.passed
    assert result.logit_bound == KV_LOGIT_BOUND[kept]
    assert KV_LOGIT_BOUND[kept] / 100 < result.max_logit_error < KV_LOGIT_BOUND[kept] / 2
    assert all(check.equal_runs == 2 for check in (*result.drafters.values(), *result.sampled.values()))
