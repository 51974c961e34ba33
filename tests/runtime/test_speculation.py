"""What an answer tells of its drafts: rounds added up, and a histogram as long as the longest draft or more."""

from __future__ import annotations

import pytest

from outrider import Runtime
from outrider.runtime.server.speculation import longest_path, speculation
from outrider.runtime.stats import Stats


def stats(*by_accepted: int, drafted: int) -> Stats:
    """Statistics of rounds by how much they accepted."""
    accepted = sum(tokens * rounds for tokens, rounds in enumerate(by_accepted))
    return Stats(drafted=drafted, accepted=accepted, rounds=9, rounds_by_accepted=list(by_accepted))


def test_rounds_of_all_choices_are_added_up() -> None:
    assert speculation([stats(3, 0, 1, drafted=12), stats(1, 1, drafted=6), Stats(rounds=4)], 4) == {
        "mean_acceptance_length": 1 + 3 / 6,
        "draft_acceptance_rate": 3 / 18,
        "acceptance_histogram": [4, 1, 1, 0, 0],
        "num_spec_steps": 6,
        "num_accepted_draft_tokens": 3,
        "num_draft_tokens": 18,
        "num_spec_tokens": 4,
    }


def test_a_round_that_confirms_more_than_a_draft_is_counted() -> None:
    found = speculation([stats(0, 0, 0, 2, drafted=8)], 1)
    assert found is not None
    assert (found["acceptance_histogram"], found["num_spec_tokens"]) == ([0, 0, 0, 2], 3)


def test_drafts_that_were_never_accepted_are_told_and_none_are_not() -> None:
    found = speculation([stats(5, drafted=10)], 2)
    assert found is not None
    assert (found["mean_acceptance_length"], found["draft_acceptance_rate"]) == (1, 0)
    assert speculation([Stats(rounds=7, new_tokens=7)], 2) is None
    assert speculation([stats(0, 0, 0, 2, drafted=8)], 0) is None  # partial KV's rounds, of a request without a drafter


@pytest.mark.parametrize(
    ("asked", "longest"),
    [("ngram", 6), ("chain", 4), ("sure", 6), ("bushy", 3), ("mixed", 6), ("none", 0), (None, 6), ("", 6)],
)
def test_the_longest_draft_is_that_of_the_drafter_asked_for(toy: Runtime, asked: str | None, longest: int) -> None:
    assert longest_path(toy.manifest.drafters, asked) == longest
