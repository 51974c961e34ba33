"""Adaptive speculation: drafting stops where it costs more than it brings, and is tried again."""

from __future__ import annotations

import random
from itertools import groupby

from outrider.runtime.drafters.adaptive import (
    BURST,
    DISABLED_ROUNDS,
    LONGEST_WINDOW,
    MOST_DISABLED_ROUNDS,
    WINDOW,
    AdaptiveSpeculation,
)


def run(adaptive: AdaptiveSpeculation, rounds: int, *, plain: float, drafted: float, tokens: float) -> list[bool]:
    """Rounds of given costs; which of them drafted. `tokens` per drafted round, on average."""
    found, due = [], 0.0
    for _ in range(rounds):
        found.append(adaptive.drafting)
        due += tokens * found[-1]
        adaptive.note(*((drafted, int(due)) if found[-1] else (plain, 1)))
        due %= 1
    return found


def test_drafts_that_gain_cost_a_few_plain_rounds_now_and_then() -> None:
    found = run(AdaptiveSpeculation("a"), 20 * (LONGEST_WINDOW + BURST), plain=1.0, drafted=1.2, tokens=1.5)
    assert 20 * BURST <= found.count(False) <= 22 * BURST


def test_a_plain_pass_that_becomes_cheaper_is_noticed() -> None:
    adaptive = AdaptiveSpeculation("a")
    assert run(adaptive, 100, plain=1.0, drafted=1.5, tokens=2.0)[-1]
    found = run(adaptive, 4000, plain=0.4, drafted=1.5, tokens=2.0)
    assert found[-1000:].count(True) < 200


def test_a_machine_that_becomes_slower_is_no_loss() -> None:
    """Twice as slow for everything: the plain rounds that count are soon those of the same stretch."""
    adaptive = AdaptiveSpeculation("a")
    speed, random_ = 1.0, random.Random(1)
    for _ in range(5000):
        speed = speed if random_.random() < 0.99 else random_.choice([0.5, 1.0, 2.0])
        drafting = adaptive.drafting
        adaptive.note((1.5 if drafting else 1.0) * speed, 3 if drafting else 1)
        assert not adaptive.disabled


def test_clear_losses_stop_at_once_and_are_probed_more_and_more_rarely() -> None:
    found = run(AdaptiveSpeculation("a"), 6000, plain=1.0, drafted=2.0, tokens=1.2)
    window = WINDOW + BURST
    assert found[:window].count(True) == WINDOW
    assert not any(found[WINDOW : window + DISABLED_ROUNDS])
    rests = [len(list(group)) for drafting, group in groupby(found) if not drafting]
    assert rests[:5] == [BURST + factor * DISABLED_ROUNDS for factor in (1, 2, 4, 8, 16)]
    assert max(rests) <= BURST + MOST_DISABLED_ROUNDS
    assert found.count(True) < 0.15 * len(found)
    longer = run(
        AdaptiveSpeculation("a"), 5000, plain=1.0, drafted=4.0, tokens=3.0
    )  # drafts commit much, and take longer
    assert longer.count(True) < 0.15 * len(longer)


def test_a_small_loss_must_last_for_two_windows() -> None:
    adaptive = AdaptiveSpeculation("a")
    rounds = WINDOW + BURST
    for length, tokens, disabled in (
        (rounds, 1.2, False),
        (rounds, 1.4, False),
        (2 * WINDOW + BURST, 1.2, False),
        (rounds, 1.2, True),
    ):
        run(adaptive, length, plain=1.0, drafted=1.3, tokens=tokens)
        assert adaptive.disabled == disabled


def test_drafts_that_begin_to_pay_come_back() -> None:
    adaptive = AdaptiveSpeculation("a")
    run(adaptive, 200, plain=1.0, drafted=1.6, tokens=1.1)
    found = run(adaptive, 1000, plain=1.0, drafted=1.2, tokens=3.0)
    assert found[-500:].count(False) <= 4 * BURST


def test_a_window_is_of_rounds_over_one_cache() -> None:
    """Rounds over the partial KV cache are four times as fast: a window of both would say so of drafts."""
    adaptive = AdaptiveSpeculation("a")
    for index in range(40 * LONGEST_WINDOW):
        drafting, small = adaptive.drafting, index % (2 * LONGEST_WINDOW + 11) < LONGEST_WINDOW
        adaptive.note((1.2 if drafting else 1.0) / (4 if small else 1), 2 if drafting else 1, partial=small)
        assert not adaptive.disabled


def test_rounds_over_another_cache_in_between_do_not_keep_it_from_judging() -> None:
    adaptive = AdaptiveSpeculation("a")
    run(adaptive, 4 * (LONGEST_WINDOW + BURST), plain=1.0, drafted=1.2, tokens=2.0)
    disabled = 0
    for index in range(20000):
        drafting, small = adaptive.drafting, index % (LONGEST_WINDOW - 1) < 6
        adaptive.note((4.0 if drafting else 1.0) / (4 if small else 1), 1, partial=small)
        disabled += adaptive.disabled
    assert disabled > 15000


def test_a_hiccup_does_not_stop_drafts() -> None:
    adaptive = AdaptiveSpeculation("a")
    for index in range(1000):
        drafting = adaptive.drafting
        adaptive.note(50.0 if index % 20 == 3 else 1.1 if drafting else 1.0, 2 if drafting and index % 2 else 1)
    assert not adaptive.disabled
    assert adaptive.gain() >= 1.0
