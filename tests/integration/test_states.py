"""Models whose layers keep states: a sequence's are what plain decoding leaves, and the prefix cache has them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from outrider import PrefixCacheConfig, RequestError, Runtime
from outrider.runtime.kv.state import EVERY, Snapshot
from outrider.runtime.options.options import Options
from tests.conftest import BuildOnce, made_once
from tests.integration.families import write_toy

NEW = Options(max_new_tokens=12, ignore_eos=True, auto_disable=False)


@pytest.fixture(scope="module")
def plan(toy_recipe: Path, tmp_path_factory: pytest.TempPathFactory, built: BuildOnce) -> Path:
    tokenizer = toy_recipe.parent / "target"
    recipe = made_once(tmp_path_factory, "family-lfm2", lambda out: write_toy("lfm2", out, tokenizer)) / "model.yaml"
    return built("family-lfm2/long", ["capacity.context=4096", "capacity.prefill_chunk=256"], recipe)


@pytest.fixture
def runtime(plan: Path) -> Iterator[Runtime]:
    with Runtime.load(plan, threads=1, prefix_cache=PrefixCacheConfig(max_cached_tokens=16384)) as runtime:
        yield runtime


def text(seed: int, length: int) -> list[int]:
    """Tokens with repetitions, so that n-grams draft."""
    words = np.random.default_rng(seed).integers(1, 299, (7, 5))
    picked = np.random.default_rng(seed).integers(0, 7, length)
    return [int(token) for word in picked for token in words[word]][:length]


def settled(snapshot: Snapshot, end: int) -> list[NDArray[np.float32]]:
    """The last rows of each layer's convolution before position `end`."""
    ((tail,), (records,)) = snapshot.parts, snapshot.cut(end).records
    return list(np.concatenate((tail, records), axis=1)[:, -tail.shape[1] :])


def test_a_state_is_that_of_plain_decoding_after_any_use(plan: Path) -> None:
    """Accepted drafts, cuts and restored snapshots leave the bits of a sequence that was computed token by token."""
    rng = np.random.default_rng(7)
    with Runtime.load(plan, threads=1) as used, Runtime.load(plan, threads=1) as plain:
        session, whole = used.session(), text(1, 40)
        for _ in range(25):
            cut = int(rng.integers(0, len(whole) + 1)) if rng.random() < 0.4 else len(whole)
            whole = whole[:cut] + text(int(rng.integers(0, 5)), int(rng.integers(1, 60)))
            drafter = str(rng.choice(("none", "ngram", "chain", "bushy")))
            whole += session.generate(whole, whole=True, drafter=drafter, **NEW).token_ids
            whole = whole[: session.loop.sequences[0].computed]
            states, end = session.loop.cache.states, len(whole)
            assert states is not None
            once = plain.session()
            once.generate([*whole, 1], whole=True, drafter="none", max_new_tokens=1, ignore_eos=True)
            wanted = once.loop.cache.states
            assert wanted is not None
            for one, other in zip(settled(states.snapshot(0), end), settled(wanted.snapshot(0), end), strict=True):
                np.testing.assert_array_equal(one, other)
            once.close()


def test_a_second_turn_computes_little_again(runtime: Runtime, plan: Path) -> None:
    """A chat's second request, a repeated one, and a third that shares a beginning that two had in common."""
    prompt = text(2, 3000)
    first = runtime.submit(prompt, drafter="ngram", **NEW).result()
    again = runtime.submit(prompt, drafter="none", **NEW).result()
    assert (again.token_ids, again.stats.reused_tokens) == (first.token_ids, len(prompt) - 1)
    turn = [*prompt, *first.token_ids, *text(3, 50)]
    second = runtime.submit(turn, drafter="ngram", **NEW).result()
    assert len(turn) - second.stats.reused_tokens <= EVERY
    shared = text(4, 700)
    reused = [
        runtime.submit([*shared, *text(seed, 300)], drafter="none", **NEW).result().stats.reused_tokens
        for seed in (5, 6, 7)
    ]
    assert reused[2] >= len(shared) - 1 > reused[1] >= 0
    with Runtime.load(plan, threads=1) as plain:
        assert plain.generate(turn, drafter="none", **NEW).token_ids == second.token_ids


def test_a_session_goes_back_to_its_own_snapshots(runtime: Runtime) -> None:
    session, whole = runtime.session(), text(8, 2500)
    session.generate(whole, whole=True, **NEW)
    session.truncate(1800)
    found = session.generate(whole[:1900], whole=True, **NEW)
    assert 1800 - EVERY <= found.stats.reused_tokens <= 1800


def test_states_are_kept_in_the_file_of_a_prefix_cache(runtime: Runtime, plan: Path, tmp_path: Path) -> None:
    prompt, file = text(9, 600), tmp_path / "prompts.cache"
    first = runtime.submit(prompt, **NEW).result()
    runtime.save_prefix_cache(file)
    with Runtime.load(plan, threads=1, prefix_cache=PrefixCacheConfig()) as other:
        other.load_prefix_cache(file)
        found = other.submit(prompt, **NEW).result()
    assert (found.token_ids, found.stats.reused_tokens) == (first.token_ids, len(prompt) - 1)


def test_states_have_memory_of_their_own(plan: Path) -> None:
    """The states that were not used for longest go first; their KV may stay, and is worth nothing without."""
    config = PrefixCacheConfig(max_cached_tokens=16384, state_bytes=8000)
    with Runtime.load(plan, threads=1, prefix_cache=config) as runtime:
        assert runtime.prefix_cache is not None
        for seed in (10, 11, 12, 10):
            found = runtime.submit(text(seed, 900), **NEW).result()
        assert found.stats.reused_tokens == 0
        assert runtime.prefix_cache.get_cached_tokens() >= 2700


def test_beams_are_refused(runtime: Runtime) -> None:
    with pytest.raises(RequestError, match="keeps states"):
        runtime.beam_search(text(1, 5), beams=2, max_new_tokens=3)
