"""How far a session runs ahead of the full KV cache, and how many blocks it retrieves."""

from __future__ import annotations

import pytest

from outrider.runtime.kv.partial_policy import Budget, Interval


def confirmed(budget: Budget, times: int, waited: int, agreed: int) -> Budget:
    for _ in range(times):
        budget.note_confirmed(waited, agreed)
    return budget


def settled(agreement: float, small_ms: float, fixed_ms: float, each_ms: float, most: int = 128) -> int:
    """The length that is chosen after many confirmations of such costs."""
    interval, debt = Interval(most), 0.0
    for _ in range(200):
        waited = interval.length
        for _ in range(max(1, waited // 4)):
            interval.note_pass(small_ms, 4, 4)
        debt += (1 - agreement) * waited
        parted = debt >= 1
        debt -= parted
        interval.note_confirmed(fixed_ms + each_ms * (waited + 1), waited, waited // 2 if parted else waited, 0.0)
    return interval.length


def test_a_dear_full_pass_and_good_agreement_make_it_long() -> None:
    assert settled(0.999, 2.0, 100.0, 1.0) >= 64
    assert settled(0.999, 2.0, 0.1, 1.0) <= settled(0.999, 2.0, 100.0, 1.0)
    assert settled(0.7, 2.0, 20.0, 1.0) <= 8
    assert settled(0.95, 2.0, 20.0, 1.0) < settled(0.999, 2.0, 20.0, 1.0)
    assert all(1 <= settled(0.99, 1.0, 50.0, 1.0, most) <= most for most in (1, 3, 20))


def test_it_runs_ahead_while_that_brings_more_than_rounds_alone() -> None:
    for plain_ms, pays in ((200.0, True), (5.0, False)):
        interval, ran = Interval(64), 0
        assert not interval.ahead  # before it knows what rounds cost
        for _ in range(400):
            if not interval.ahead:
                interval.note_plain(plain_ms, 3)
                continue
            ran += 1
            for _ in range(4):
                interval.note_pass(4.0, 4, 4)
            interval.note_confirmed(100.0, interval.length, interval.length, 0.0)
        assert (ran > 300) == pays
        assert ran > 1  # it is tried again
        assert pays or ran < 60


def test_a_stretch_where_drafts_alone_bring_as_much_is_noticed() -> None:
    """Passes bring twenty tokens: a round over the full KV cache would too, and save the passes."""
    for brought, rests in ((3, False), (20, True)):
        interval = Interval(64)
        for _ in range(2):
            interval.note_plain(30.0, 3)  # what such rounds brought before
        for _ in range(4):
            passes = max(1, interval.length // brought)
            for _ in range(passes):
                interval.note_pass(8.0, brought, brought)
            waited = passes * brought
            interval.note_confirmed(20.0 + 1.5 * waited, waited, waited, 8.0)
        assert interval.ahead != rests


def test_a_dear_full_cache_is_run_ahead_of_without_drafts_and_with_little_room() -> None:
    for most in (4, 5, 6, 16):
        interval, ran = Interval(most), 0
        for _ in range(600):
            if not interval.ahead:
                interval.note_plain(30.0, 1)
                continue
            ran += 1
            for _ in range(interval.length):
                interval.note_pass(2.4, 1, 0)
            interval.note_confirmed(30.0 + 0.5 * interval.length, interval.length, interval.length, 1.0)
        assert ran > 500


def test_agreement_is_the_share_of_tokens_that_were_like_those_of_the_full_cache() -> None:
    interval = Interval(64)
    for _ in range(300):
        interval.note_pass(1.0, 4, 4)
        interval.note_confirmed(10.0, 10, 9, 0.0)
    assert interval.agreement == pytest.approx(0.9, abs=0.01)  # nine agree, then one differs


@pytest.mark.parametrize(
    ("blocks", "room", "most", "expected"),
    [(2048, 1000, 256, 256), (512, 1000, 256, 64), (512, 20, 256, 20), (30, 1000, 256, 8), (9999, 9999, 4, 4)],
)
def test_a_budget_begins_with_what_context_and_room_make_sensible(
    blocks: int, room: int, most: int, expected: int
) -> None:
    assert Budget(most, None, blocks, room).blocks == expected


def test_a_budget_keeps_to_what_layers_with_windows_need() -> None:
    assert Budget(256, None, 64, 10, needed=31).blocks == 31
    assert confirmed(Budget(256, None, 512, 1000, needed=31), 400, 32, 32).blocks == 31
    assert confirmed(Budget(256, 40, 2000, 100), 40, 64, 0).blocks == 40  # one that was asked for stays


def test_a_budget_follows_agreement() -> None:
    budget = Budget(256, None, 512, 1000)
    assert confirmed(budget, 25, 16, 2).blocks == 128
    assert confirmed(budget, 40, 32, 32).blocks < 128
    assert confirmed(budget, 400, 32, 32).blocks == Budget.LEAST
    assert confirmed(budget, 400, 32, 0).blocks == 256
