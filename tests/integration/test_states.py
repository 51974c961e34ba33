"""Models whose layers keep states: a sequence's are what plain decoding leaves, and the prefix cache has them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from outrider import PrefixCacheConfig, RequestError, Runtime
from outrider.plans import names
from outrider.plans.manifest import Geometry, States
from outrider.plans.step_buffers import state_shapes
from outrider.runtime.kv import state
from outrider.runtime.kv.memory import HostKv
from outrider.runtime.kv.state import EVERY, Snapshot, StateCache
from outrider.runtime.kv.token_kv import TokenKv
from outrider.runtime.options.options import Options
from outrider.runtime.prefix_cache.cache import PrefixCache
from outrider.runtime.prefix_cache.page_pool import TokenShape
from tests.conftest import BuildOnce, made_once
from tests.integration.families import write_toy

NEW = Options(max_new_tokens=12, ignore_eos=True, auto_disable=False)


@pytest.fixture(scope="module", params=["lfm2", "qwen3_5"])
def plan(
    request: pytest.FixtureRequest, toy_recipe: Path, tmp_path_factory: pytest.TempPathFactory, built: BuildOnce
) -> Path:
    name, tokenizer = str(request.param), toy_recipe.parent / "target"
    recipe = made_once(tmp_path_factory, f"family-{name}", lambda out: write_toy(name, out, tokenizer)) / "model.yaml"
    return built(f"family-{name}/long", ["capacity.context=4096", "capacity.prefill_chunk=256"], recipe)


@pytest.fixture
def runtime(plan: Path) -> Iterator[Runtime]:
    with Runtime.load(plan, threads=1, prefix_cache=PrefixCacheConfig(max_cached_tokens=16384)) as runtime:
        yield runtime


def text(seed: int, length: int) -> list[int]:
    """Tokens with repetitions, so that n-grams draft."""
    words = np.random.default_rng(seed).integers(1, 299, (7, 5))
    picked = np.random.default_rng(seed).integers(0, 7, length)
    return [int(token) for word in picked for token in words[word]][:length]


def assert_same(found: StateCache, wanted: StateCache, end: int) -> None:
    """Both have folded the same tokens and have the same records after them: then their bits are the same."""
    one, other = found.snapshot(0), wanted.snapshot(0).cut(end)
    assert (one.base, one.end) == (other.base, other.end) == (end - 1, end)
    for mine, its in zip((*one.parts, *one.records), (*other.parts, *other.records), strict=True):
        np.testing.assert_array_equal(mine, its)


def test_a_state_is_that_of_plain_decoding_after_any_use(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepted drafts, cuts and restored snapshots leave the bits of a sequence that was computed token by token."""
    monkeypatch.setattr(state, "EVERY", 16)
    rng = np.random.default_rng(7)
    with Runtime.load(plan, threads=1) as used, Runtime.load(plan, threads=1) as plain:
        session, whole = used.session(), text(1, 40)
        for _ in range(8):
            cut = int(rng.integers(0, len(whole) + 1)) if rng.random() < 0.4 else len(whole)
            whole = whole[:cut] + text(int(rng.integers(0, 5)), int(rng.integers(1, 60)))
            drafter = str(rng.choice(("none", "ngram", "chain", "bushy")))
            whole += session.generate(whole, whole=True, drafter=drafter, **NEW).token_ids
            whole.append(int(rng.integers(1, 299)))
            session.generate(whole, whole=True, drafter="none", max_new_tokens=1, ignore_eos=True)
            once = plain.session()
            for end in range(1, len(whole) + 1):
                once.generate(whole[:end], whole=True, drafter="none", max_new_tokens=1, ignore_eos=True)
            assert session.loop.cache.states is not None
            assert once.loop.cache.states is not None
            assert_same(session.loop.cache.states, once.loop.cache.states, len(whole))
            once.close()


def test_a_snapshot_forgets_what_was_cut() -> None:
    """A draft is accepted, most of it is cut off, and other tokens follow: nobody goes back to between these."""
    sizes = States(layers=1, log=9, channels=1, kernel=2)
    geometry = Geometry.model_construct(branches=1, states=sizes)
    shapes = {name: (1, *shape) for name, shape in state_shapes(geometry).items()}
    shapes |= {names.REPLAY: (1, 9), names.REPLAYS: (1,), names.FOLD: (1,)}
    arrays = {name: np.zeros(shape, np.int64 if len(shape) < 3 else np.float32) for name, shape in shapes.items()}
    states = StateCache(SimpleNamespace(array=lambda _, name: arrays[name]), geometry)  # type: ignore[arg-type]
    states.arrange()
    states.feed(0, 0, 0, 500)
    states.commit(np.arange(506))
    assert states.truncate(0, 502) == 502
    states.feed(0, 0, 502, 100)
    states.commit(None)
    assert states.truncate(0, 504) == 502


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
    first = runtime.generate(prompt, **NEW)
    runtime.save_prefix_cache(file)
    with Runtime.load(plan, threads=1, prefix_cache=PrefixCacheConfig()) as other:
        other.load_prefix_cache(file)
        found = other.generate(prompt, **NEW)
    assert (found.token_ids, found.stats.reused_tokens) == (first.token_ids, len(prompt) - 1)


def test_states_have_memory_of_their_own(plan: Path) -> None:
    """The states that were not used for longest go first; their KV may stay, and is worth nothing without."""
    with Runtime.load(plan, threads=1) as runtime:
        session = runtime.session()
        session.generate(text(10, 900), **NEW)
        assert session.loop.cache.states is not None
        each = session.loop.cache.states.snapshot(0).nbytes
    config = PrefixCacheConfig(max_cached_tokens=16384, state_bytes=2 * each)
    with Runtime.load(plan, threads=1, prefix_cache=config) as runtime:
        assert runtime.prefix_cache is not None
        assert runtime.submit(text(13, 900), **NEW).result().stats.reused_tokens == 0
        assert runtime.submit(text(13, 900), **NEW).result().stats.reused_tokens > 0
        for seed in (10, 11, 12, 10):
            found = runtime.submit(text(seed, 900), **NEW).result()
        assert found.stats.reused_tokens == 0
        assert runtime.prefix_cache.get_cached_tokens() >= 2700


def test_a_state_stays_with_its_own_tokens_where_there_is_no_room_for_them() -> None:
    """A sequence of which no more can be kept leaves no state in the edge of the one that it begins like."""
    cache = PrefixCache({"target": TokenShape(2, 1, 4, "float32")}, PrefixCacheConfig(max_cached_tokens=64))
    kv = TokenKv(HostKv(np.zeros((2, 1, 64, 4), np.float32)))
    first, zeros = list(range(64)), np.zeros((1, 1), np.float32)
    cache.insert(first, {"target": (64, kv)})
    held = cache.match(first)
    own = Snapshot(49, (zeros,), (np.zeros((1, 2, 1), np.float32),))
    cache.insert([*range(20), *range(100, 144)], {"target": (64, kv)}, states=[own])
    cache.release(held)
    found = cache.match(first)
    assert found.state_within(63) is None
    cache.release(found)


def test_a_forced_text_is_drafted_no_further_than_records_are_logged(runtime: Runtime) -> None:
    """A text that is known from its first token on, of a plan whose longest draft is six."""
    asked = Options(structured_outputs={"choice": ["def forced(argument):\n    return argument\n"]}, max_new_tokens=40)
    plain = runtime.generate(text(14, 30), drafter="none", **asked)
    assert runtime.generate(text(14, 30), drafter="ngram", **asked).token_ids == plain.token_ids


def test_beams_are_refused(runtime: Runtime) -> None:
    with pytest.raises(RequestError, match="keeps states"):
        runtime.beam_search(text(1, 5), beams=2, max_new_tokens=3)
