"""The gate: drafting stops where it costs more than it brings, and is tried again."""

from __future__ import annotations

from runtime.gate import BASELINE, LONGEST_REST, REST, STALE, WINDOW, Gate


def run(gate: Gate, rounds: int, *, plain: float, drafted: float, tokens: float) -> list[bool]:
    """Rounds of given costs; which of them drafted. `tokens` per drafted round, on average."""
    found, due = [], 0.0
    for _ in range(rounds):
        drafting = gate.drafting
        found.append(drafting)
        if drafting:
            due += tokens
            count, due = int(due), due % 1
            gate.note(drafted, count)
        else:
            gate.note(plain, 1)
    return found


def test_drafts_that_gain_cost_a_few_plain_rounds() -> None:
    found = run(Gate("a"), 10 * STALE * WINDOW, plain=1.0, drafted=1.2, tokens=1.5)
    assert 10 * BASELINE <= found.count(False) <= 11 * BASELINE


def test_drafts_that_commit_much_and_take_longer_are_stopped() -> None:
    found = run(Gate("a"), 5000, plain=1.0, drafted=4.0, tokens=3.0)
    assert found.count(True) < 0.15 * len(found)


def test_a_plain_pass_that_becomes_cheaper_is_noticed() -> None:
    gate = Gate("a")
    assert run(gate, 100, plain=1.0, drafted=1.5, tokens=2.0)[-1]
    found = run(gate, 4 * STALE * WINDOW, plain=0.4, drafted=1.5, tokens=2.0)
    assert found[-1000:].count(True) < 200


def test_drafts_that_lose_are_stopped_and_probed_more_and_more_rarely() -> None:
    found = run(Gate("a"), 6000, plain=1.0, drafted=1.6, tokens=1.2)
    assert all(found[:WINDOW])
    assert not any(found[WINDOW : WINDOW + BASELINE + REST])
    changes = [i for i in range(1, len(found)) if found[i] != found[i - 1]]
    rests = [b - a for a, b in zip(changes[::2], changes[1::2], strict=False)]
    assert rests[0] == BASELINE + REST
    assert rests[1:5] == [2 * REST, 4 * REST, 8 * REST, 16 * REST]
    assert max(rests) <= LONGEST_REST
    assert found.count(True) < 0.15 * len(found)


def test_drafts_that_begin_to_pay_come_back() -> None:
    gate = Gate("a")
    run(gate, 200, plain=1.0, drafted=1.6, tokens=1.2)
    found = run(gate, 1000, plain=1.0, drafted=1.2, tokens=3.0)
    assert found[-500:].count(False) <= BASELINE


def test_a_hiccup_does_not_stop_drafts() -> None:
    gate = Gate("a")
    for index in range(200):
        drafting = gate.drafting
        gate.note(50.0 if index % 20 == 3 else 1.1 if drafting else 1.0, 2 if drafting and index % 2 else 1)
    assert gate.drafting
    assert gate.gain() >= 1.0
