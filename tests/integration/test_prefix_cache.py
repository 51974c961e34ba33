"""Generations that find rows of earlier ones: the same tokens and logits as without, bit for bit on the CPU."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from outrider import PrefixCacheConfig, Runtime, Session
from outrider.plans import names
from outrider.runtime.drafters import adaptive

DRAFTERS = ["none", "ngram", "short", "chain", "bushy", "head", "mixed", "sure"]
PROMPT = [(37 * i) % 299 + 1 for i in range(60)]
KEEP = PrefixCacheConfig(max_cached_tokens=2048, min_prefix_length=1)


@pytest.fixture(scope="module")
def kept(toy_plan: Path) -> Iterator[Runtime]:
    runtime = Runtime.load(toy_plan, threads=1, prefix_cache=KEEP)
    yield runtime
    assert runtime.prefix_cache is not None
    assert runtime.prefix_cache.in_use == 0


def forget(runtime: Runtime) -> None:
    assert runtime.prefix_cache is not None
    runtime.prefix_cache.clear()
    runtime.engines.idle.clear()


def said(generation: Any) -> tuple[list[int], list[Any]]:
    return generation.token_ids, [(entry.logprob, entry.top) for entry in generation.logprobs]


def rows(session: Session, model: str, tokens: int) -> NDArray[np.float32]:
    """Those of the sequence's first tokens in a model's KV cache."""
    found: NDArray[np.float32] = session.buffers.array(model, names.KV)[:, 0, :, :tokens]
    return found


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_split_of_a_prompt_gives_what_a_cold_start_gives(kept: Runtime, toy: Runtime, drafter: str) -> None:
    """Tokens, log-probabilities and the rows of all models."""
    options = {"max_new_tokens": 12, "drafter": drafter, "logprobs": 5, "ignore_eos": True, "auto_disable": False}
    session, cold_session = kept.session(), toy.session()
    cold = cold_session.generate(PROMPT, **options)
    needs_feature = drafter in ("head", "mixed")
    for split in range(1, len(PROMPT) + 1):
        forget(kept)
        session.reset()
        session.generate([*PROMPT[:split], 5, 4], **options | {"max_new_tokens": 3})
        session.reset()
        warm = session.generate(PROMPT, **options)
        assert said(warm) == said(cold)
        assert warm.stats.cached_tokens >= min(split, len(PROMPT) - 1)
        assert warm.stats.reused_tokens == warm.stats.cached_tokens - needs_feature
        for model in ("target", *session.loop.drafting.engine_drafters):
            length = len(PROMPT) - 2 if model in (drafter, "head" if drafter == "mixed" else "target") else 0
            np.testing.assert_array_equal(rows(session, model, length), rows(cold_session, model, length))
        kept.prefix_cache.check()  # type: ignore[union-attr]


def test_what_is_resident_is_used_where_it_lies(kept: Runtime, toy: Runtime) -> None:
    forget(kept)
    held = []
    options = {"max_new_tokens": 5, "drafter": "none", "ignore_eos": True}
    for prompt in (PROMPT[:40], [9, *PROMPT[:30]]):
        found = kept.generate(prompt, **options)
        assert found.token_ids == toy.generate(prompt, **options).token_ids
        held.append(kept.engines.borrow())  # so that the next one-off generation finds another engine
    kept.engines.idle = deque(held)
    found = kept.generate(PROMPT, **options)
    assert found.token_ids == toy.generate(PROMPT, **options).token_ids
    assert found.stats.reused_tokens == 40
    assert found.stats.cached_tokens == 0


def test_rows_of_any_drafter_serve_any_other(kept: Runtime, toy: Runtime) -> None:
    for first in DRAFTERS:
        for second in DRAFTERS:
            forget(kept)
            kept.generate(PROMPT[:50], max_new_tokens=4, drafter=first, ignore_eos=True)
            kept.engines.idle.clear()
            options = {"max_new_tokens": 10, "drafter": second, "temperature": 0.9, "seed": 3, "auto_disable": False}
            warm, cold = kept.generate(PROMPT, **options), toy.generate(PROMPT, **options)
            assert warm.token_ids == cold.token_ids
            assert warm.stats.cached_tokens > 0 or second in ("head", "mixed")


TURN = st.fixed_dictionaries(
    {
        "prompt": st.lists(st.integers(1, 3), min_size=1, max_size=60),
        "max_new_tokens": st.integers(1, 30),
        "temperature": st.sampled_from([0.0, 0.8]),
        "drafter": st.sampled_from(DRAFTERS),
        "seed": st.integers(0, 2),
    }
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=st.lists(TURN, min_size=1, max_size=12), tokens=st.sampled_from([48, 160, 2048]))
def test_no_history_changes_a_token(toy: Runtime, toy_plan: Path, turns: list[dict[str, Any]], tokens: int) -> None:
    """Small pools evict all the time."""
    config = PrefixCacheConfig(max_cached_tokens=tokens, min_prefix_length=1)
    runtime = Runtime.load(toy_plan, threads=1, verify=False, prefix_cache=config)
    assert runtime.prefix_cache is not None
    for turn in turns:
        prompt, options = turn["prompt"], {name: value for name, value in turn.items() if name != "prompt"}
        assert runtime.generate(prompt, **options).token_ids == toy.generate(prompt, **options).token_ids
        runtime.prefix_cache.check()
    assert runtime.prefix_cache.in_use == 0


def test_turns_of_sessions_that_diverge(kept: Runtime, toy: Runtime) -> None:
    """Two conversations with one beginning, turn by turn, never touch each other's rows."""
    forget(kept)
    sessions, plain = [kept.session() for _ in range(2)], [toy.session() for _ in range(2)]
    for turn in range(3):
        for place in range(2):
            prompt = PROMPT[:20] if not turn else [7 + place, 11 * turn + place, 9]
            options = {"max_new_tokens": 9, "drafter": "chain", "temperature": 0.7, "seed": place}
            found, expected = (s[place].generate(prompt, **options) for s in (sessions, plain))
            assert found.token_ids == expected.token_ids
    stats = kept.prefix_cache.get_stats()  # type: ignore[union-attr]
    assert stats.tokens_reused > 0


def test_a_stream_that_is_closed_is_kept_up_to_there(kept: Runtime) -> None:
    forget(kept)
    stream = kept.stream(PROMPT, max_new_tokens=20, drafter="none", ignore_eos=True)
    spans = [next(stream) for _ in range(4)]
    stream.close()
    assert kept.prefix_cache is not None
    assert kept.prefix_cache.contains([*PROMPT, *(span.token_ids[0] for span in spans)][:-1])
    kept.prefix_cache.check()


def test_threads_share_a_cache(kept: Runtime, toy: Runtime) -> None:
    forget(kept)
    prompts = [[*PROMPT[: 10 + 5 * place], place + 1] for place in range(6)]
    expected = [toy.generate(prompt, max_new_tokens=8).token_ids for prompt in prompts]
    found: dict[tuple[int, int], list[int]] = {}

    def work(thread: int) -> None:
        for place, prompt in enumerate(prompts):
            found[thread, place] = kept.generate(prompt, max_new_tokens=8).token_ids

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(found[thread, place] == expected[place] for thread in range(4) for place in range(6))
    assert kept.prefix_cache is not None
    kept.prefix_cache.check()


@pytest.mark.parametrize("drafter", ["head", "chain", "mixed"])
def test_rows_are_right_whenever_a_drafter_rests(
    kept: Runtime, toy: Runtime, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept while the clock has put a drafter aside is what it would have had."""
    monkeypatch.setattr(adaptive, "WINDOW", 2)
    monkeypatch.setattr(adaptive, "CLEAR_LOSS", 1e9)  # the first judgement ends drafting
    monkeypatch.setattr(adaptive, "DISABLED_ROUNDS", 3)
    options = {"drafter": drafter, "ignore_eos": True}
    model = "head" if drafter == "mixed" else drafter
    for new in range(2, 20):
        forget(kept)
        session, other = kept.session(), toy.session()
        found = session.generate(PROMPT, max_new_tokens=new, **options)
        expected = other.generate(PROMPT, max_new_tokens=new + 1, **options, auto_disable=False)
        assert found.token_ids == expected.token_ids[:new]
        tokens = session.token_ids
        match = kept.prefix_cache.match(tokens)  # type: ignore[union-attr]
        length = max(0, match.lengths.get(model, 0) - (model == "head"))
        fresh = kept.session()
        fresh.generate([*tokens, 1], max_new_tokens=1, **options, auto_disable=False)
        own = options | {"drafter": model, "auto_disable": False}
        other.generate([5], max_new_tokens=3, **own)  # takes in what its last passes have left
        np.testing.assert_array_equal(rows(fresh, model, length), rows(other, model, length))
        kept.prefix_cache.release(match)  # type: ignore[union-attr]


def test_a_stream_that_is_collected_while_somebody_is_at_the_cache_is_not_kept(kept: Runtime) -> None:
    """It may be this very thread, which would wait for itself."""
    forget(kept)
    assert kept.prefix_cache is not None
    stream = kept.session().stream(PROMPT, max_new_tokens=20, drafter="none", ignore_eos=True)
    next(stream)
    with kept.prefix_cache._lock:
        stream.close()
    assert kept.prefix_cache.get_cached_tokens() == 0
