"""Tentative tokens leave nothing after when they are taken back, in any KV cache, drafter or count."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from outrider import Runtime
from outrider.plans import names
from outrider.plans.errors import RequestError
from outrider.runtime.session import Session
from tests.integration.long_context import prompt

pytestmark = pytest.mark.usefixtures("run_ahead")


def held_rows(session: Session, drafter: str) -> dict[int, np.ndarray]:
    """Rows of the drafter's KV cache by their numbers in the sequence."""
    kept = session.loop.drafting.engine_drafters[drafter].cache.window
    assert kept is not None
    kv = session.buffers.array(drafter, names.KV)[:, 0]
    gap = kept._front if kept._dropped else kept.slots.length
    return {slot + kept._dropped * (slot >= gap): kv[:, :, slot].copy() for slot in range(kept.slots.length)}


def unfinished(session: Session, tokens: list[int], how: str, drafter: str) -> int:
    """A lossless generation that ends while tokens wait; how many."""
    cancel, waiting = threading.Event(), 0
    stream = session.stream(tokens, max_new_tokens=60, tentative=True, drafter=drafter, ignore_eos=True, cancel=cancel)
    for span in stream:
        waiting = waiting + len(span.token_ids) if span.tentative else 0
        if waiting > 1:  # their rows are in the partial KV cache
            if how == "close":
                stream.close()
            else:
                cancel.set()
            break
    for _ in stream:
        pass
    return waiting


@pytest.mark.parametrize("how", ["close", "cancel"])
@pytest.mark.parametrize("drafter", ["none", "chain", "head", "mixed", "ngram"])
def test_what_waited_is_in_no_cache_afterwards(long: Runtime, how: str, drafter: str) -> None:
    session = long.session()
    waiting = unfinished(session, prompt(1, 75), how, drafter)
    assert waiting
    so_far, fresh = session.token_ids, prompt(9, waiting)
    options = {"max_new_tokens": 12, "drafter": "none", "ignore_eos": True}
    found = session.generate(fresh, partial_kv="lossy", **options)  # type: ignore[arg-type]
    expected = long.session().generate([*so_far, *fresh], partial_kv="off", **options)  # type: ignore[arg-type]
    assert found.token_ids[0] == expected.token_ids[0]  # by a pass over all that there is, the prompt too
    assert found.stats.refreshes > 0


@pytest.mark.parametrize("drafter", ["chain", "head", "bushy"])
def test_rows_of_drafters_are_those_of_a_session_without_tentative_tokens(long: Runtime, drafter: str) -> None:
    lossless, full = long.session(), long.session()
    ran = 0
    for turn in range(3):
        tokens = prompt(turn, 30)
        options = {"max_new_tokens": 14, "drafter": drafter, "ignore_eos": True, "auto_disable": False}
        for session, mode in ((lossless, "lossless"), (full, "off")):
            ran += session.generate(tokens, partial_kv=mode, **options).stats.partial_rounds  # type: ignore[arg-type]
    assert ran > 3
    ours, theirs = held_rows(lossless, drafter), held_rows(full, drafter)
    both = sorted(set(ours) & set(theirs))
    assert len(both) > 15
    for number in both[:-1]:
        np.testing.assert_array_equal(ours[number], theirs[number], err_msg=str(number))


def test_a_drafter_reads_no_more_of_a_long_prompt_than_it_keeps(long: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    session, runs = long.session(), list[int]()
    program = session.programs[names.extend("chain")]
    run = program.run
    monkeypatch.setattr(program, "run", lambda: (runs.append(1), run())[1])
    session.generate(prompt(2, 140), max_new_tokens=8, drafter="chain", ignore_eos=True)
    assert 1 <= len(runs) <= 3  # chunks of 16: the sink's, and what the window of 20 lacks; the whole prompt has nine


def test_a_head_that_missed_a_little_of_a_short_text_has_it_computed(long: Runtime) -> None:
    session = long.session()
    session.generate(prompt(2, 25), max_new_tokens=5, drafter="head", partial_kv="off", ignore_eos=True)
    session.generate([], max_new_tokens=3, drafter="none", partial_kv="off", ignore_eos=True)
    session.generate([], max_new_tokens=3, drafter="head", partial_kv="off", ignore_eos=True)
    held = held_rows(session, "head")
    assert list(held) == list(range(len(held)))
    assert len(held) >= 33


def test_an_error_of_a_watcher_leaves_a_session_that_goes_on(long: Runtime) -> None:
    for drafter in ("chain", "head", "mixed", "ngram", "bushy"):
        tokens, session = prompt(1, 75), long.session()

        def fail(_: object) -> None:
            raise RuntimeError("a watcher fails")

        with pytest.raises(RequestError, match="a watcher fails"):
            session.generate(tokens, max_new_tokens=60, drafter=drafter, ignore_eos=True, on_round=fail)
        rest = session.generate(prompt(2, 20), max_new_tokens=30, drafter=drafter, ignore_eos=True)
        whole_sequence = session.token_ids
        asked = whole_sequence[: len(whole_sequence) - 30]
        expected = long.session().generate(asked, max_new_tokens=30, partial_kv="off", drafter="none", ignore_eos=True)
        assert rest.token_ids == expected.token_ids


@pytest.mark.parametrize("drafter", ["chain", "head", "short", "mixed"])
def test_a_drafter_that_is_disabled_at_times_changes_no_token(
    long: Runtime, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bursts and plain rounds come in the middle of what waits as well."""
    monkeypatch.setattr("outrider.runtime.drafters.adaptive.WINDOW", 3)
    monkeypatch.setattr("outrider.runtime.drafters.adaptive.DISABLED_ROUNDS", 4)
    monkeypatch.setattr("outrider.runtime.drafters.adaptive.MOST_DISABLED_ROUNDS", 8)
    for seed in range(4):
        session = long.session()
        for _ in range(2):
            fresh = prompt(seed, 35)
            asked = [*session.token_ids, *fresh]
            options = {"max_new_tokens": 40, "ignore_eos": True}
            found = session.generate(fresh, drafter=drafter, **options)  # type: ignore[arg-type]
            expected = long.session().generate(asked, drafter="none", partial_kv="off", **options)  # type: ignore[arg-type]
            assert found.token_ids == expected.token_ids


def test_short_contexts_have_all_that_a_drafter_does(long: Runtime) -> None:
    """Fillers are learned and entropies told as without partial KV, which is not in force yet."""
    for drafter in ("short", "sure"):
        seen: dict[str, list[object]] = {"off": [], "lossless": []}
        for mode, rounds in seen.items():
            options = {"max_new_tokens": 14, "drafter": drafter, "ignore_eos": True, "auto_disable": False}
            found = long.session().generate(prompt(3, 12), partial_kv=mode, on_round=rounds.append, **options)  # type: ignore[arg-type]
            assert found.stats.partial_rounds == 0
        assert seen["off"] == seen["lossless"]


def test_an_end_token_that_waited_counts_as_agreed(long: Runtime) -> None:
    tokens = prompt(1, 75)
    plain = long.session().generate(tokens, max_new_tokens=60, partial_kv="off", ignore_eos=True).token_ids
    for place in range(5, 30):
        end = plain[place]
        if end in plain[:place]:
            continue
        found = long.session().generate(tokens, max_new_tokens=60, drafter="chain", eos_token_ids=[end])
        stats = found.stats
        assert found.token_ids == plain[: place + 1]
        assert stats.agreed + stats.retracted <= stats.tentative
        assert stats.parted <= stats.retracted
        if stats.retracted == 0:
            assert stats.agreement in (1.0, None)
