"""The n-gram drafter against an oracle that scans lists."""

from __future__ import annotations

import time

import numpy as np
import pytest

from outrider.plans.host_drafters import NgramDrafter as NgramSettings
from outrider.runtime.drafters import make_host_drafter
from outrider.runtime.drafters.ngram import NgramDrafter
from tests.runtime.ngram_oracle import (
    drafted,
    drafted_tree,
)

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
