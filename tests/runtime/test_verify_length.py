"""How much is drafted: drafting stops where it costs more than it brings, and is tried again; and how much of it is
verified: by the rule, the most tokens a second that any choice of nodes brings."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby, pairwise
from math import inf, log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.plans.pass_prices import Price
from outrider.runtime.drafters.adaptive import (
    BURST,
    DISABLED_ROUNDS,
    LONGEST_WINDOW,
    MOST_DISABLED_ROUNDS,
    WINDOW,
    AdaptiveSpeculation,
)
from outrider.runtime.drafters.calibration import Calibration
from outrider.runtime.drafters.verify_length import PriceCurve, VerifyLength, common_rate, worth_verifying
from tests.properties import cheap

CHANCE = st.floats(0.0, 1.0)
# What each row more costs: nothing, little, or all at once, as where a kernel's next tile begins.
STEPS = st.lists(st.one_of(st.just(0.0), st.floats(0.0, 2.0)), min_size=12, max_size=12)


def curve_of(steps: Sequence[float], first: float = 1.0) -> PriceCurve:
    return PriceCurve([Price(rows=rows, ms=ms) for rows, ms in enumerate(accumulate(steps, initial=first), 1)])


@st.composite
def drafts(draw: st.DrawFn, most: int = 6) -> tuple[list[int], list[float]]:
    """Parents and chances of a tree."""
    parent, chances = list[int](), list[float]()
    for node in range(draw(st.integers(1, most))):
        parent.append(draw(st.integers(-1, node - 1)))
        above = 1.0 if parent[-1] < 0 else chances[parent[-1]]
        chances.append(above * draw(CHANCE))
    return parent, chances


def closed(parent: Sequence[int]) -> Iterator[list[int]]:
    """Every set of nodes that holds the ancestors of its nodes."""
    for bits in range(2 ** len(parent)):
        nodes = [node for node in range(len(parent)) if bits >> node & 1]
        if all(parent[node] < 0 or parent[node] in nodes for node in nodes):
            yield nodes


@cheap
@given(first=drafts(), second=drafts(4), rows=st.integers(1, 3), steps=STEPS, rate=st.floats(0.0, 3.0))
def test_no_other_nodes_of_several_trees_bring_more_by_a_rate(
    first: tuple[list[int], list[float]],
    second: tuple[list[int], list[float]],
    rows: int,
    steps: list[float],
    rate: float,
) -> None:
    curve = curve_of(steps)

    def gain(one: Sequence[int], other: Sequence[int]) -> float:
        chances = sum(first[1][node] for node in one) + sum(second[1][node] for node in other)
        return chances - rate * curve.price(rows + len(one) + len(other))

    one, other = worth_verifying([first[1], second[1]], rows, curve, rate)
    assert one in list(closed(first[0]))
    assert other in list(closed(second[0]))
    assert one or other
    every = (gain(a, b) for a in closed(first[0]) for b in closed(second[0]) if a or b)
    assert gain(one, other) == pytest.approx(max(every))


@cheap
@given(draft=drafts(12), rows=st.integers(1, 3), steps=STEPS)
def test_the_nodes_of_one_draft_are_those_that_it_has_among_several(
    draft: tuple[list[int], list[float]], rows: int, steps: list[float]
) -> None:
    parent, chances = draft
    length = VerifyLength(curve_of(steps))
    for _ in range(8):
        length.note_round(1, 1, 1.0, 1.0)
    assert length.rate is not None
    scores = [log(chance) if chance else -inf for chance in chances]
    known = length.chances(parent, scores)
    assert length.choose(parent, scores, rows) == worth_verifying([known], rows, length.curve, length.rate)[0]


def test_more_rows_never_count_as_cheaper() -> None:
    measured = [Price(rows=1, ms=1.0), Price(rows=2, ms=1.5), Price(rows=3, ms=1.3), Price(rows=5, ms=2.0)]
    curve = PriceCurve(measured)
    found = curve.prices_after(0, 19)
    assert found[:5] == pytest.approx([1.0, 1.4, 1.4, 1.7, 2.0])
    assert all(one <= other for one, other in pairwise(found))
    assert found[10] - found[9] == pytest.approx(0.6 / 3)  # as from 2 rows to 5
    assert found == [curve.price(rows) for rows in range(1, 20)]
    assert curve.prices_after(7, 2) == found[7:9]
    assert PriceCurve(measured[:1]).prices_after(0, 7) == [1.0] * 7


def test_chances_are_the_drafters_own_until_something_was_verified() -> None:
    parent, own = [-1, 0, 0, 1], [0.9, 0.5, 0.25, 0.04]
    scores = [log(0.9), log(0.9 * 0.5), log(0.9 * 0.25), log(0.9 * 0.5 * 0.04)]
    expected = [0.9, 0.9 * 0.5, 0.9 * 0.25, 0.9 * 0.5 * own[3]]
    assert Calibration().chances(parent, scores) == pytest.approx(expected)
    assert Calibration().chances([-1, 0], [-inf, -inf]) == [0.0, 0.0]  # no chance at all, and none after it
    assert Calibration().chances([-1], [1e-6]) == [1.0]  # rounded up


@pytest.mark.parametrize(("said", "true"), [(0.97, 0.6), (0.35, 0.55), (0.85, 0.85), (0.05, 0.0)])
def test_chances_become_the_shares_that_come(said: float, true: float) -> None:
    calibration, draw = Calibration(), random.Random(1)
    scores = [log(said), 2 * log(said)]
    for _ in range(3000):
        came = [draw.random() < true for _ in range(2)]
        calibration.note_verified([-1, 0], scores, {0, 1} if all(came) else {0} if came[0] else set())
    first, second = calibration.chances([-1, 0], scores)
    assert first == pytest.approx(true, abs=0.06)
    assert second == pytest.approx(first * first)
    other = calibration.chances([-1], [log(0.5)])[0]
    assert other == pytest.approx(0.5)  # such chances were never verified


def test_nodes_that_the_target_never_came_near_say_nothing() -> None:
    calibration = Calibration()
    for _ in range(200):
        calibration.note_verified([-1, 0, 0], [log(0.6), log(0.6 * 0.3), log(0.6 * 0.3)], set())
    assert calibration.chances([-1], [log(0.3)]) == pytest.approx([0.3])
    assert calibration.chances([-1], [log(0.6)])[0] < 0.1


def test_what_is_not_verified_any_more_is_believed_again() -> None:
    calibration = Calibration()
    for _ in range(300):
        calibration.note_verified([-1], [log(0.5)], set())
    assert calibration.chances([-1], [log(0.5)])[0] < 0.1
    for _ in range(3000):
        calibration.note_verified([-1], [log(0.95)], {0})
    assert calibration.chances([-1], [log(0.5)])[0] > 0.45


def simulated(steps: Sequence[float], draft: float, said: float, true: float, slower: float = 1.0) -> tuple[int, float]:
    """Rounds of a drafter that says one chance of each token of its chains of 8, and is right with the chance `true`;
    how many nodes the last round verifies, and its rate."""
    curve, draw = curve_of(steps), random.Random(7)
    length = VerifyLength(curve)
    parent, scores = list(range(-1, 7)), [log(said) * depth for depth in range(1, 9)]
    nodes = list[int]()
    for _ in range(4000):
        nodes = length.choose(parent, scores, 1)
        came = 0
        while came < len(nodes) and draw.random() < true:
            came += 1
        length.note_verified(parent[: len(nodes)], scores[: len(nodes)], set(range(came)))
        verifying = slower * curve.price(1 + len(nodes))
        length.note_round(1 + len(nodes), 1 + came, verifying, verifying + slower * draft)
    assert length.rate is not None
    return len(nodes), length.rate


@pytest.mark.parametrize(
    ("steps", "said", "true", "draft"),
    [
        ([0.2] * 8, 0.97, 0.6, 0.1),
        ([0.2] * 8, 0.45, 0.8, 1.0),
        ([0.0, 0.0, 0.0, 0.5] * 2, 0.97, 0.6, 1.0),
        ([0.0, 0.0, 0.0, 0.5] * 2, 0.45, 0.8, 0.1),
    ],
)
def test_rounds_find_the_best_length(steps: list[float], said: float, true: float, draft: float) -> None:
    curve = curve_of(steps)

    def speed(nodes: int) -> float:
        tokens = sum(true**depth for depth in range(nodes + 1))
        return tokens / (draft + curve.price(1 + nodes))

    nodes, rate = simulated(steps, draft, said, true)
    assert speed(nodes) > 0.97 * max(map(speed, range(1, 9)))
    assert rate == pytest.approx(speed(nodes), rel=0.15)


def test_a_machine_that_is_slower_than_when_it_was_measured_changes_nothing() -> None:
    assert simulated([0.2] * 8, 0.5, 0.7, 0.7) == pytest.approx(simulated([0.2] * 8, 0.5, 0.7, 0.7, slower=5.0))


def test_drafts_are_verified_whole_until_the_rate_is_known() -> None:
    length = VerifyLength(curve_of([9.0] * 12))
    for _ in range(8):
        assert length.rate is None
        assert length.choose([-1, 0, 1], [-0.1, -3.0, -9.0], 1) == [0, 1, 2]
        length.note_round(4, 2, 0.5, 1.0)
    assert length.rate == pytest.approx(2 / 28 * 0.5)
    assert length.choose([-1, 0, 1], [-0.1, -3.0, -9.0], 1) == [0]
    fresh = VerifyLength(length.curve)
    assert common_rate([fresh]) is None
    assert common_rate([fresh, length]) == length.rate


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
