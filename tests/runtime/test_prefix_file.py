"""A cache in a file: what comes back, and what is refused."""

from __future__ import annotations

import json
import os
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.plans.errors import PlanError, RequestError
from outrider.runtime.prefix_cache.cache import PrefixCache
from outrider.runtime.prefix_cache.file import load_prefix_cache, save_prefix_cache
from outrider.runtime.prefix_cache.page_pool import PAGE
from tests.runtime.test_prefix_cache import cache, check_rows, insert

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

    def fails(_: int) -> None:
        raise OSError("no space")

    monkeypatch.setattr("os.fsync", fails)
    with pytest.raises(OSError, match="no space"):
        save_prefix_cache(cache(), saved, BOUND)
    assert saved.read_bytes() == before
    with pytest.raises(RequestError, match=f"there is no folder {saved.parent / 'no'}. Make it"):
        save_prefix_cache(cache(), saved.parent / "no" / "kept", BOUND)
    assert list(saved.parent.iterdir()) == [saved]
