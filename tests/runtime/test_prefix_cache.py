"""The prefix cache: worked figures, what it keeps and evicts, 100,000 operations of threads; and its file."""

from __future__ import annotations

import json
import os
import random
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from outrider.plans.errors import PlanError, RequestError
from outrider.runtime.kv.memory import HostKv, KvMemory
from outrider.runtime.kv.token_kv import TokenKv
from outrider.runtime.prefix_cache.cache import PrefixCache, PrefixCacheConfig, PrefixMatch
from outrider.runtime.prefix_cache.file import load_prefix_cache, save_prefix_cache
from outrider.runtime.prefix_cache.page_pool import PAGE, PagePool, TokenShape

SHAPES = {"target": TokenShape(2, 1, 3, np.float32), "head": TokenShape(2, 1, 2, np.float32)}


def kv_of(model: str, tokens: list[int]) -> NDArray[np.float32]:
    """Rows that say what they belong to: `[planes, heads, tokens, size]`, a function of all tokens up to theirs."""
    shape = SHAPES[model]
    sums = np.cumsum(np.array([hash((model, token, j)) % 9973 for j, token in enumerate(tokens)], np.float32))
    return np.broadcast_to(sums[None, None, :, None], (shape.planes, shape.heads, len(tokens), shape.size)).copy()


def cache(tokens: int = 400, **options: object) -> PrefixCache:
    return PrefixCache(SHAPES, PrefixCacheConfig(max_cached_tokens=tokens, **options))  # type: ignore[arg-type]


def insert(kept: PrefixCache, tokens: list[int], head: int | None = None, owner: str = "") -> int:
    """With the rows of the target, and the first ones of the head, whose token 0 has none."""
    rows = {"target": (len(tokens), TokenKv(HostKv(kv_of("target", tokens))))}
    if head is not None:
        rows["head"] = head, TokenKv(HostKv(kv_of("head", tokens)[:, :, 1:]), lead=1)
    return kept.insert(tokens, rows, owner)


def check_rows(kept: PrefixCache, tokens: list[int], owner: str = "") -> int:
    """What is found has the rows that were kept; the number of the target's."""
    match = kept.match(tokens, owner)
    check_match(kept, match, tokens)
    kept.release(match)
    kept.check()
    return match.lengths.get("target", 0)


def check_match(kept: PrefixCache, match: PrefixMatch, tokens: list[int]) -> None:
    """A match has the rows of the tokens' beginning; it is released here."""
    for model, count in match.lengths.items():
        expected = kv_of(model, tokens)
        found = np.full_like(expected, -1)
        lead = int(model == "head")
        kept.read(match, model, lead, count, TokenKv(HostKv(found[:, :, lead:]), lead=lead))
        np.testing.assert_array_equal(found[:, :, lead:count], expected[:, :, lead:count])
    kept.release(match)


def test_two_turns_of_a_conversation() -> None:
    """Seed 002, section 1.5: 31 of 42 tokens are known."""
    kept = cache()
    turn = [151644, 8948, 198, 100, 101, 102, 151645, 198, 151644, 872, 198, 1, 2, 3, 151645, 198, 151644, 77091, 198]
    insert(kept, turn)
    full = [*turn, *range(200, 210), 151645, 198]
    insert(kept, full)
    second = [*full, 151644, 872, 198, 4, 5, 6, 151645, 198, 151644, 77091, 198]
    match = kept.match(second)
    assert (match.cache_hit, match.matched_tokens, match.prefill_start_pos) == (True, 31, 31)
    assert match.matched_prefix == full
    assert kept.get_cached_tokens() == 31
    assert not kept.match([151644, 8948, 198]).cache_hit  # shorter than the least prefix


def test_rates_of_the_worked_example() -> None:
    """66.7 % of the requests and 61.1 % of their tokens are known; one token of each request is always computed."""
    kept, first = cache(), [1, 2, 3, 4, 5, 10, 11, 12]
    for tokens in (first, second := [*first, 20, 21, 22, 30, 31, 32], second):
        match = kept.match(tokens)
        kept.note_reused(match.prefill_start_pos)
        insert(kept, tokens)
        kept.release(match)
    stats = kept.get_stats()
    assert (stats.total_requests, stats.cache_hits, stats.cache_misses) == (3, 2, 1)
    assert (stats.total_tokens_processed, stats.tokens_matched, stats.tokens_reused) == (36, 22, 21)
    assert (stats.hit_rate, stats.match_rate, stats.reuse_rate) == pytest.approx((0.667, 0.611, 0.583), abs=5e-4)
    assert stats.to_json()["tokens_computed"] == 15


def test_it_evicts_what_is_old_and_unused_from_09_down_to_08() -> None:
    kept = cache(320)
    lines = [[100 * place + j for j in range(32)] for place in range(12)]
    held = None
    for place, tokens in enumerate(lines):
        assert insert(kept, tokens) == 32
        if place == 0:
            held = kept.match(tokens)
        kept.check()
    assert held is not None
    assert 0.5 < kept.get_usage_ratio() <= 0.9
    assert [kept.contains(lines[place]) for place in (0, 1, -1)] == [True, False, True]  # the first is used
    left = kept.get_cached_tokens()
    assert kept.get_stats().tokens_evicted == 12 * 32 - left
    kept.release(held)
    assert kept.evict(0) == left
    assert kept.get_cached_tokens() == 0
    kept.check()


def test_without_eviction_it_keeps_what_there_is_room_for() -> None:
    kept = cache(4 * PAGE, enable_auto_eviction=False)
    assert insert(kept, list(range(3 * PAGE))) == 3 * PAGE
    assert insert(kept, list(range(1000, 1000 + 2 * PAGE))) == PAGE
    assert insert(kept, list(range(2000, 2000 + PAGE))) == 0
    assert check_rows(kept, list(range(1000, 1000 + 2 * PAGE))) == PAGE
    assert kept.get_stats().inserts_refused == 2
    assert kept.remove(list(range(3 * PAGE)))
    assert not kept.remove(list(range(3 * PAGE)))
    assert insert(kept, list(range(2000, 2000 + PAGE))) == PAGE
    long = list(range(10 * PAGE))
    assert insert(cache(4 * PAGE), long) == 4 * PAGE


def test_rows_of_a_drafter_that_came_later_are_added() -> None:
    kept = cache()
    long = list(range(50))
    insert(kept, long)
    assert kept.match(long).lengths == {"target": 50}
    insert(kept, [*long[:40], 7, 7, 7], head=41)
    match = kept.match(long)
    assert match.lengths == {"target": 50, "head": 40}
    assert kept.match([*long[:40], 7, 7]).lengths == {"target": 42, "head": 41}
    check_rows(kept, long)
    check_rows(kept, [*long[:40], 7, 7, 7])


def test_budgets_that_cannot_be_are_refused() -> None:
    with pytest.raises(RequestError, match="memory_bytes is 100; two pages of 16 tokens need"):
        PrefixCache(SHAPES, PrefixCacheConfig(memory_bytes=100))
    with pytest.raises(RequestError, match="eviction_target"):
        PrefixCacheConfig(eviction_target=0.95)
    with pytest.raises(RequestError, match="min_prefix_length is 0"):
        PrefixCacheConfig(min_prefix_length=0)
    small = PrefixCache(SHAPES, PrefixCacheConfig(memory_bytes=10 * PagePool.page_bytes(SHAPES)))
    assert small.config.max_cached_tokens == 10 * PAGE


LINE = st.lists(st.integers(0, 2), min_size=1, max_size=90)


@given(lines=st.lists(st.tuples(LINE, st.integers(0, 90), st.booleans()), max_size=30), pages=st.integers(2, 14))
def test_what_is_found_has_the_rows_that_were_kept(lines: list[tuple[list[int], int, bool]], pages: int) -> None:
    kept = cache(pages * PAGE, min_prefix_length=1)
    held = []
    for tokens, head, hold in lines:
        known = insert(kept, tokens, min(head, len(tokens)))
        kept.check()
        assert check_rows(kept, tokens) == known or known == 0
        if hold:
            held.append(kept.match(tokens))
    for match in held:
        check_match(kept, match, match.matched_prefix)
    assert kept.in_use == 0
    kept.clear()
    kept.check()
    assert kept.get_cached_tokens() == 0


@pytest.mark.parametrize("operations", [5_000, pytest.param(100_000, marks=pytest.mark.long)])
def test_operations_from_many_threads(operations: int) -> None:
    kept = cache(60 * PAGE, min_prefix_length=2)

    def work(seed: int) -> None:
        draw = random.Random(seed)
        for step in range(operations // 8):
            tokens = [draw.randrange(3) for _ in range(draw.randrange(1, 40))]
            what = draw.random()
            if what < 0.35:
                insert(kept, tokens, draw.randrange(len(tokens) + 1))
            elif what < 0.9:
                check_match(kept, kept.match(tokens), tokens)
            elif what < 0.97:
                kept.remove(tokens)
            else:
                kept.evict(draw.randrange(60 * PAGE))
            if step % 100 == 0:
                kept.check()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))  # raises what a thread has raised
    kept.check()
    assert kept.in_use == 0
    kept.clear()
    assert kept.get_cached_tokens() == 0


def test_memory_that_fails_leaves_the_cache_as_it_was() -> None:
    """A device's copies may fail."""

    class Failing(TokenKv):
        def get(self, start: int, count: int, to: KvMemory, at: int) -> None:
            raise PlanError("no memory")

    kept = cache()
    insert(kept, [1, 2, 3, 4, 5, 6])
    with pytest.raises(PlanError, match="no memory"):
        kept.insert([1, 2, 3, 4, 5, 6, 7, 8], {"target": (8, Failing(HostKv(kv_of("target", [1] * 8))))})
    kept.check()
    assert kept.in_use == 0
    assert check_rows(kept, [1, 2, 3, 4, 5, 6]) == 6
    assert insert(kept, [1, 2, 3, 4, 5, 6, 7, 8]) == 8


BOUND = {"plan": "abc", "processor": "one"}
LINES = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=60), st.integers(0, 60), st.sampled_from(["", "a"])),
    max_size=12,
)


@given(lines=LINES)
def test_what_was_saved_comes_back(
    tmp_path_factory: pytest.TempPathFactory, lines: list[tuple[list[int], int, str]]
) -> None:
    path = tmp_path_factory.mktemp("prefix") / "file"
    kept = cache(200 * PAGE, min_prefix_length=1)
    for tokens, head, owner in lines:
        insert(kept, tokens, min(head, len(tokens)), owner)
    assert save_prefix_cache(kept, path, BOUND) == kept.get_cached_tokens()
    other = cache(200 * PAGE, min_prefix_length=1)
    assert load_prefix_cache(other, path, BOUND, 512) == kept.get_cached_tokens()
    assert other.get_tree_stats() == kept.get_tree_stats()
    for tokens, _, owner in lines:
        assert check_rows(other, tokens, owner) == len(tokens)
        first, second = kept.match(tokens, owner), other.match(tokens, owner)
        assert second.lengths == first.lengths
        kept.release(first)
        other.release(second)
    assert load_prefix_cache(other, path, BOUND, 512) == 0


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    kept = cache()
    insert(kept, list(range(40)), head=30)
    insert(kept, [*range(20), 7, 8, 9])
    save_prefix_cache(kept, tmp_path / "file", BOUND)
    return tmp_path / "file"


def refused(path: Path, words: str, bound: dict[str, str] = BOUND, kept: PrefixCache | None = None) -> None:
    kept = cache() if kept is None else kept
    with pytest.raises(PlanError, match=words):
        load_prefix_cache(kept, path, bound, 512)
    assert kept.get_cached_tokens() == 0


def test_a_smaller_cache_takes_what_it_has_room_for(saved: Path) -> None:
    small = cache(2 * PAGE)
    assert 0 < load_prefix_cache(small, saved, BOUND, 512) <= 2 * PAGE
    small.check()


def test_files_of_others_are_refused(saved: Path, tmp_path: Path) -> None:
    refused(saved, "another processor: one, and here it is two", BOUND | {"processor": "two"})
    refused(saved, "another plan: abc", BOUND | {"plan": "x"})
    refused(saved, "another engine: None", BOUND | {"engine": "x"})
    refused(tmp_path / "nothing", "cannot be read")
    (tmp_path / "text").write_text("hello there, this is no cache")
    refused(tmp_path / "text", "no prefix cache")


def test_damage_anywhere_is_refused(saved: Path, tmp_path: Path) -> None:
    data = saved.read_bytes()
    start = 48 + int.from_bytes(data[40:48], "little")

    def sealed(header: dict[str, Any]) -> bytes:
        said = json.dumps(header).encode()
        rest = len(said).to_bytes(8, "little") + said + data[start:]
        return data[:8] + sha256(rest).digest() + rest

    damaged = tmp_path / "damaged"
    damaged.write_bytes(data[:-5])
    refused(damaged, "sha256")
    damaged.write_bytes(data[:60])
    refused(damaged, "no prefix cache, or damaged")
    damaged.write_bytes(b"")
    os.truncate(damaged, 2**40)  # more than any memory holds
    refused(damaged, "no prefix cache, or damaged")
    header = json.loads(data[48:start])
    damaged.write_bytes(sealed(header))
    assert load_prefix_cache(cache(), damaged, BOUND, 512) > 0
    first, second, *others = header["edges"]
    for change, words in (
        *(({"edges": [{**first, **wrong}, second, *others]}, "does not belong")
          for wrong in ({"parent": 0}, {"tokens": [-1]}, {"valid": {"other": 1}}, {"tokens": [1] * 513})),
        ({"edges": [{**first, "valid": {"target": 999}}, second, *others]}, "KV of 999 of"),
        ({"edges": [first, {**second, "owner": "b"}, *others]}, "does not belong"),
        ({"edges": [first]}, "it was cut"),
        ({"edges": [{"parent": -1}]}, "edges.0.tokens"),
        ({"shapes": {}}, "other shapes"),
        ({"more": 1}, "more"),
    ):  # fmt: skip
        damaged.write_bytes(sealed({**header, **change}))
        refused(damaged, words)
    head, kv = data[40:start], np.frombuffer(data[start:], np.float32).copy()
    kv[-1] = np.nan
    damaged.write_bytes(data[:8] + sha256(head + kv.tobytes()).digest() + head + kv.tobytes())
    refused(damaged, "not finite")
    draw = np.random.default_rng(0)
    for _ in range(300):
        place = int(draw.integers(len(data)))
        damaged.write_bytes(data[:place] + bytes([data[place] ^ (1 << int(draw.integers(8)))]) + data[place + 1 :])
        refused(damaged, "damaged")


def test_a_save_that_fails_leaves_what_was_there(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_bytes()
    monkeypatch.setattr("os.fsync", Mock(side_effect=OSError("no space")))
    with pytest.raises(OSError, match="no space"):
        save_prefix_cache(cache(), saved, BOUND)
    assert saved.read_bytes() == before
    with pytest.raises(RequestError, match=f"there is no folder {saved.parent / 'no'}. Make it"):
        save_prefix_cache(cache(), saved.parent / "no" / "kept", BOUND)
    assert list(saved.parent.iterdir()) == [saved]
