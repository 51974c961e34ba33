"""Drafts of n-grams, of a sequence and of earlier outputs, against an oracle that scans lists; the memory's bound."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.plans.host_drafters import NgramDrafter as NgramSettings
from outrider.plans.sampling import Sampling
from outrider.plugins.native import NgramMemory
from outrider.runtime.drafters import make_host_drafter, make_memories
from outrider.runtime.drafters.ngram import NgramDrafter
from outrider.runtime.sampling import SamplingParams
from tests.properties import cheap
from tests.runtime.ngram_oracle import (
    SAMPLINGS,
    SETTINGS,
    OracleMemory,
    ScanningOracle,
    agree,
    drafted,
    drafted_tree,
)

BYTES_A_TOKEN = 160
TOKENS = st.lists(st.integers(0, 3), max_size=12)


def recalling(memory: NgramMemory, *settings: float, **named: float) -> NgramDrafter:
    """A drafter with a memory."""
    drafter = NgramDrafter(*settings, **named)  # type: ignore[arg-type]
    drafter.recall_from(memory)
    return drafter


@cheap
@given(
    settings=SETTINGS,
    room=st.integers(2, 50),
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("count"), TOKENS, st.none()),
            st.tuples(st.just("likely"), TOKENS, st.integers(0, 3)),
            st.tuples(st.just("suppose"), TOKENS, st.none()),
            st.tuples(st.just("remember"), TOKENS, TOKENS),
        ),
        max_size=20,
    ),
    limit=st.integers(0, 9),
    root=st.integers(0, 3),
    sampling=SAMPLINGS,
)
def test_drafts_are_those_of_the_scanning_oracle(
    settings: tuple[int, int, int, float],
    room: int,
    steps: list[tuple[str, list[int], Any]],
    limit: int,
    root: int,
    sampling: SamplingParams,
) -> None:
    """A step adds tokens, says what was likely at a place ahead, supposes tokens for a while, or remembers."""
    memory, texts = NgramMemory(room, settings[0]), OracleMemory(room)
    drafter, oracle = recalling(memory, *settings, 1), ScanningOracle(*settings, sampling, texts)
    for what, tokens, more in steps:
        supposed = list[int]()
        if what == "remember":
            memory.add(tokens, more)
            texts.add(tokens, more)
            assert memory.tokens == texts.tokens <= room
        elif what == "count":
            drafter.extend(tokens)
            oracle.extend(tokens)
        elif what == "likely":
            drafter.observe(len(oracle.tokens) + more, np.array(tokens, np.int64))
            oracle.observe(more, tokens)
        else:
            supposed = tokens
        certain = list(oracle.tokens)
        for count in range(len(supposed) + 1):
            drafter.mark_tentative(len(certain) if count else None)
            oracle.tokens = [*certain, *supposed[:count]]
            foreseen = drafter.foresee(oracle.tokens, limit, sampling)
            if not agree(drafter, oracle, limit, root):
                return
            assert foreseen == len(oracle.guesses)
        if supposed:
            drafter.mark_tentative(None)
            oracle.tokens, oracle.guesses = certain, []


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("seed", range(6))
def test_long_runs_give_the_drafts_of_the_scanning_oracle(seed: int, temperature: float) -> None:
    """Texts that quote each other, so that contexts are long, known in both halves, and continued in several ways."""
    generator, sampling = random.Random(seed), SamplingParams(Sampling(temperature), seed)
    settings, room = (generator.choice([2, 4, 9]), 1, 9, generator.choice([0.0, 0.0613])), generator.randint(30, 120)
    memory, texts, quotable = NgramMemory(room, settings[0]), OracleMemory(room), [0, 1, 2]
    compared = recalled = 0
    for _ in range(6):
        drafter, oracle = recalling(memory, *settings), ScanningOracle(*settings, sampling, texts)
        for _ in range(25):
            start = generator.randrange(len(quotable))
            tokens = [*quotable[start : start + generator.randint(1, 8)], generator.randrange(3)]
            quotable = [*quotable, *tokens][-60:]
            if generator.random() < 0.5:
                memory.add(tokens[:2], tokens[2:])
                texts.add(tokens[:2], tokens[2:])
            else:
                drafter.extend(tokens)
                oracle.extend(tokens)
            if not agree(drafter, oracle):
                break
            compared, recalled = compared + 1, recalled + sum(guess[2] for guess in oracle.guesses)
    assert compared > 20
    assert recalled > 20


@pytest.mark.parametrize(
    "text",
    [
        pytest.param([7] * 500, id="one token"),
        pytest.param([1] * 250 + [2] * 250, id="most states"),
        pytest.param([1] + [2] * 498 + [3], id="most edges"),
        pytest.param(None, id="random pairs"),
        pytest.param([], id="all different"),
    ],
)
def test_memory_is_taken_at_once_and_stays_within_its_bound(text: list[int] | None) -> None:
    room, generator = 4096, random.Random(3)
    memory = NgramMemory(room, 64)
    taken = memory.nbytes
    assert taken <= BYTES_A_TOKEN * room + 1000
    for number in range(40):
        output = [generator.randrange(2) for _ in range(500)] if text is None else text
        memory.add([], output or list(range(500 * number, 500 * number + 500)))
        assert memory.tokens <= room
        assert memory.nbytes == taken
    assert memory.tokens >= room // 2 - 500


def test_drafts_and_outputs_of_several_threads_do_not_disturb_each_other() -> None:
    """Texts are runs of numbers of their own: a draft continues in one of them."""
    length, memory = 700, NgramMemory(20_000, 64)
    over = threading.Event()

    def remember(writer: int) -> None:
        for number in range(120):
            first = (writer * 1000 + number) * 1000
            memory.add([9_000_001, 9_000_002], list(range(first, first + length)))

    def draft(reader: int) -> None:
        generator, drafts = random.Random(reader), 0
        while not over.is_set() or not drafts:
            drafter = recalling(memory)
            start = (generator.randrange(4) * 1000 + generator.randrange(120)) * 1000 + generator.randrange(length)
            drafter.extend([start, start + 1])
            tokens, parents = drafted_tree(drafter, 8)
            assert tokens == [*range(start + 2, start + 2 + len(tokens))]
            assert parents == [*range(-1, len(tokens) - 1)]
            drafts += 1

    with ThreadPoolExecutor(7) as pool:
        reading = [pool.submit(draft, reader) for reader in range(3)]
        list(pool.map(remember, range(4)))
        over.set()
        for each in reading:
            each.result()
    assert 9_000 <= memory.tokens <= 20_000


def test_a_memory_of_other_contexts_is_refused() -> None:
    with pytest.raises(ValueError, match="contexts of up to 3 tokens, and they must be 64"):
        NgramDrafter().recall_from(NgramMemory(100, 3))


@pytest.mark.parametrize("token", [-1, 2**32])
def test_what_is_no_token_is_refused_and_nothing_is_added(token: int) -> None:
    memory = NgramMemory(100, 64)
    with pytest.raises(ValueError, match=f"is {token}"):
        memory.add([1], [2, token])
    assert memory.tokens == 0
    with pytest.raises(ValueError, match=r"tokens\[0\] is 1"):
        NgramMemory(1, 64)


def test_a_plan_says_which_drafters_have_a_memory() -> None:
    settings = {"kind": "ngram", "min_context": 1, "max_draft": 3, "min_confidence": 0.0, "filler_top_k": 0}
    with_one = NgramSettings(name="recall", max_context=5, memory=2048, **settings)  # type: ignore[arg-type]
    without = NgramSettings(name="plain", max_context=5, **settings)  # type: ignore[arg-type]
    memories = make_memories([with_one, without])
    assert list(memories) == ["recall"]
    recalling(memories["recall"].get_or_create(""), 5)
    parted = memories["recall"]
    others = {owner: parted.get_or_create(owner) for owner in ("a/", "b/")}
    for place in range(20):  # a tenant's own memories go first
        parted.get_or_create(f"c/{place}")
    assert all(parted.get(owner) is memory for owner, memory in others.items())
    assert parted.get("c/0") is None
    assert parted.get("c/19") is not None


BIG = 2**32 - 1  # as large as any token
WORKED: list[tuple[dict[str, float], list[int], list[int], list[int]]] = [  # settings, tokens, draft, parents
    ({"max_context": 2, "max_draft": 1}, [1, 2, 3, 9, 2, 4, 9, 2, 4, 1, 2], [3], [-1]),  # the longest context
    ({"max_context": 1, "max_draft": 1}, [1, 2, 1, 3, 1], [3], [-1]),  # of two as frequent, the latest
    ({"max_context": 3, "min_context": 2}, [1, 2, 3, 1], [], []),
    ({"max_context": 1, "min_confidence": 0.3}, [1, 2, 1, 3, 1], [], []),  # a half of what is believed by half
    ({"max_draft": 2}, [BIG, 0, BIG, 1, BIG, 0, BIG], [1, BIG], [-1, 0]),
    ({"max_context": 2, "min_confidence": 0.1, "max_draft": 4}, [1, 2, 3, 1, 2, 4, 1, 2, 4, 1, 2], [4, 1, 3, 2],
     [-1, 0, -1, 1]),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "tokens", "draft", "parents"), WORKED)
def test_worked_examples(settings: dict[str, float], tokens: list[int], draft: list[int], parents: list[int]) -> None:
    """Lists, arrays and drafting twice make no difference; nothing is left after a reset."""
    drafter = NgramDrafter(**settings)  # type: ignore[arg-type]
    drafter.extend(tokens[:2])
    drafter.extend(np.array(tokens[2:], np.int64))
    for _ in range(2):
        assert drafted_tree(drafter, 8) == (draft, parents)
    drafter.reset()
    assert drafted(drafter, 8) == []


def test_a_plan_describes_its_drafters() -> None:
    settings = {"max_context": 2, "min_context": 1, "max_draft": 3, "min_confidence": 0.0, "filler_top_k": 0}
    drafter = make_host_drafter(NgramSettings(kind="ngram", name="repeat", **settings))  # type: ignore[arg-type]
    drafter.extend([1, 2, 1])
    assert drafted(drafter, 8) == [2, 1, 2]


def test_text_that_repeats_one_token_is_cheap() -> None:
    """The worst for an automaton whose counts go up for every suffix: those of more than 64 tokens are not counted."""
    drafter = NgramDrafter(filler_top_k=3)
    for index in range(0, 20_000, 7):
        drafter.observe(index, np.array([5, 6, 7]))
    start = time.thread_time()
    drafter.extend([7] * 20_000)
    assert time.thread_time() - start < 2.0
    assert drafted(drafter, 8) == [7] * 8
