"""Which replica is to get a request: what each was sent, and load."""

from __future__ import annotations

import random
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from outrider.runtime.ray_serve.prefixes import Balance, PrefixIndex, blocks_of, choose
from tests.properties import cheap

TOKENS = st.lists(st.integers(0, 2), max_size=24)
REPLICAS = st.sampled_from("abc")
STEPS = st.lists(st.tuples(st.sampled_from(["insert", "insert", "match", "forget"]), TOKENS, REPLICAS), max_size=30)


def common(one: list[int], other: list[int]) -> int:
    """Tokens that two beginnings share, in whole blocks of two."""
    same = next((i for i, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), min(len(one), len(other)))
    return same - same % 2


@cheap
@given(STEPS, TOKENS)
def test_the_longest_beginning_that_each_replica_was_sent(
    steps: list[tuple[str, list[int], str]], asked: list[int]
) -> None:
    index: PrefixIndex[str] = PrefixIndex(2)
    sent: dict[str, list[list[int]]] = {"a": [], "b": [], "c": []}
    for what, tokens, replica in steps:
        if what == "insert":
            index.insert(tokens, replica)
            sent[replica].append(tokens)
        elif what == "match":
            index.match(tokens)
        else:
            index.forget(replica)
            sent[replica].clear()
    longest = {name: max((common(asked, each) for each in all_of), default=0) for name, all_of in sent.items()}
    assert index.match(asked) == {name: length for name, length in longest.items() if length}
    for name, all_of in sent.items():
        assert index.size(name) == len({tuple(each[:end]) for each in all_of for end in range(2, len(each) + 1, 2)})


@cheap
@given(STEPS, TOKENS, st.integers(1, 6))
def test_memory_is_bounded_and_what_is_found_was_sent(
    steps: list[tuple[str, list[int], str]], asked: list[int], capacity: int
) -> None:
    small: PrefixIndex[str] = PrefixIndex(2, capacity)
    large: PrefixIndex[str] = PrefixIndex(2)
    for what, tokens, replica in steps:
        for index in (small, large):
            if what == "forget":
                index.forget(replica)
            else:
                (index.insert if what == "insert" else lambda tokens, _: index.match(tokens))(tokens, replica)  # noqa: B023
        assert len(small) <= capacity
    whole = large.match(asked)
    assert all(length <= whole[name] for name, length in small.match(asked).items())
    assert sum(small.size(name) for name in "abc") <= 3 * capacity


def test_what_was_looked_up_last_stays() -> None:
    index: PrefixIndex[str] = PrefixIndex(1, 4)
    index.insert([1, 2], "a")
    index.insert([3, 4], "a")
    index.match([1, 2])
    index.insert([5], "a")  # the end of what was not looked up goes first
    assert index.match([1, 2]) == {"a": 2}
    assert index.match([3, 4]) == {"a": 1}


def test_blocks_are_told_from_one_index_to_another() -> None:
    one: PrefixIndex[str] = PrefixIndex(2)
    for tokens in ([1, 2, 3, 4, 5, 6], [1, 2, 7, 8], [9, 9]):
        one.insert(tokens, "here")
    other: PrefixIndex[str] = PrefixIndex(2, 3)
    other.hold(one.blocks, "b")
    assert other.match([9, 9]) == {"b": 2}
    assert other.match([1, 2, 7, 8]) == {"b": 4}  # of three blocks, the latest, and none without its beginning
    assert other.match([1, 2, 3, 4]) == {"b": 2}


def test_a_block_has_the_same_hash_in_every_process() -> None:
    program = "from outrider.runtime.ray_serve.prefixes import blocks_of; print(blocks_of(list(range(40)), 16))"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert found.strip() == str(blocks_of(list(range(40)), 16))


LOADS = st.dictionaries(REPLICAS, st.integers(0, 20), min_size=1)
HELD = st.dictionaries(REPLICAS, st.integers(1, 100))


@cheap
@given(
    st.integers(1, 100), HELD, LOADS, st.dictionaries(REPLICAS, st.integers(0, 9)), st.randoms(use_true_random=False)
)
def test_the_order_of_replicas(
    tokens: int, held: dict[str, int], loads: dict[str, int], sizes: dict[str, int], draw: random.Random
) -> None:
    balance = Balance(threshold=4, share=0.5)
    order = choose(tokens, held, loads, sizes, balance, draw)
    assert sorted(order) == sorted(loads)
    least = min(loads.values())
    holders = [name for name in loads if held.get(name, 0) >= tokens / 2 and loads[name] <= least + 4]
    if holders:
        assert order[0] in holders
        assert held[order[0]] == max(held[name] for name in holders)
        tied = [name for name in holders if held[name] == held[order[0]]]
        assert loads[order[0]] == min(loads[name] for name in tied)
    elif len(order) < 3:  # the better of two
        assert loads[order[0]] == least
    else:
        assert (
            loads[order[0]] < max(loads.values())
            or len(set(loads.values())) == 1
            or sorted(loads.values())[1] == loads[order[0]]
        )


def test_a_replica_that_is_overloaded_is_passed_over() -> None:
    draw = random.Random(0)
    held, balance = {"a": 90}, Balance(threshold=8, share=0.25)
    assert choose(100, held, {"a": 8, "b": 0}, {}, balance, draw)[0] == "a"
    assert choose(100, held, {"a": 9, "b": 0}, {}, balance, draw)[0] == "b"


def test_new_conversations_go_where_least_is_held() -> None:
    draw = random.Random(0)
    for _ in range(20):
        assert choose(100, {"a": 20}, {"a": 0, "b": 0}, {"a": 5, "b": 2}, Balance(), draw)[0] == "b"
