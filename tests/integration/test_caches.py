"""What generations leave for later ones, KV of prefixes and memories of n-grams: the same tokens as without them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from numpy.typing import NDArray

import outrider.compiler.__main__
from outrider import FinishReason, PrefixCacheConfig, Runtime, Session
from outrider.plans import names
from outrider.plugins.native import NgramMemory
from outrider.runtime.drafters import adaptive
from outrider.runtime.drafters.drafting import Drafting
from outrider.runtime.execution.program import Program
from outrider.runtime.options.options import Options
from tests.conftest import PARTIAL_KV, BuildOnce, call_before
from tests.integration.served import client_of, listening

DRAFTERS = ["none", "ngram", "short", "chain", "bushy", "head", "mixed"]
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


def test_a_stream_that_is_closed_is_kept_up_to_there(kept: Runtime) -> None:
    """Not if the cache is locked, which may be by this very thread: it would wait for itself."""
    forget(kept)
    assert kept.prefix_cache is not None
    stream = kept.session().stream(PROMPT, max_new_tokens=20, drafter="none", ignore_eos=True)
    next(stream)
    with kept.prefix_cache._lock:
        stream.close()
    assert kept.prefix_cache.get_cached_tokens() == 0
    stream = kept.stream(PROMPT, max_new_tokens=20, drafter="none", ignore_eos=True)
    spans = [next(stream) for _ in range(4)]
    stream.close()
    assert kept.prefix_cache.contains([*PROMPT, *(span.token_ids[0] for span in spans)][:-1])
    kept.prefix_cache.check()


def test_threads_share_a_cache(kept: Runtime, toy: Runtime) -> None:
    forget(kept)
    prompts = [[*PROMPT[: 10 + 5 * place], place + 1] for place in range(6)]
    expected = [toy.generate(prompt, max_new_tokens=8).token_ids for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda prompt: kept.generate(prompt, max_new_tokens=8).token_ids, prompts * 4)
        assert list(found) == expected * 4
    assert kept.prefix_cache is not None
    kept.prefix_cache.check()


@pytest.mark.parametrize("drafter", ["head", "chain", "mixed"])
def test_rows_are_right_whenever_a_drafter_is_disabled(
    kept: Runtime, toy: Runtime, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept while a drafter is disabled is what it would have had."""
    monkeypatch.setattr(adaptive, "WINDOW", 2)
    monkeypatch.setattr(adaptive, "CLEAR_LOSS", 1e9)  # the first judgement ends drafting
    monkeypatch.setattr(adaptive, "DISABLED_ROUNDS", 3)
    options = {"drafter": drafter, "ignore_eos": True}
    model = "head" if drafter == "mixed" else drafter
    for new in range(2, 20, 3):
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
        other.generate([5], max_new_tokens=3, **own)  # computes what its last passes have left
        np.testing.assert_array_equal(rows(fresh, model, length), rows(other, model, length))
        kept.prefix_cache.release(match)  # type: ignore[union-attr]


ROOM = 1024
WITH_MEMORY = (
    f"drafters=[{{name: recall, kind: ngram, max_context: 12, max_draft: 8, memory: {ROOM}}}, "
    "{name: forgetful, kind: ngram, max_context: 12, max_draft: 8}, {name: head, kind: eagle3, checkpoint: head}, "
    f"{{name: mixed, kind: ngram, max_context: 12, max_draft: 8, otherwise: head, least: 2, memory: {ROOM}}}]"
)
CAPACITY = "capacity={context: 160, prefill_chunk: 16, branches: 16, batching: true}"  # graphs as of `branch_plan`
RECALLING = ("recall", "mixed")
ASKED = [(37 * i) % 299 + 1 for i in range(20)]
GREEDY = Options(ignore_eos=True, auto_disable=False, max_new_tokens=60)
SAMPLED = GREEDY | Options(temperature=0.8, seed=5)


@pytest.fixture(scope="module")
def plan(built: BuildOnce) -> Path:
    return built("memory-plan", [WITH_MEMORY, CAPACITY, f"partial_kv={PARTIAL_KV[:-1]}, mode: off}}"])


@pytest.fixture
def runtime(plan: Path) -> Runtime:
    """Loaded afresh: nothing is remembered."""
    return Runtime.load(plan, threads=1)


def memory_of(runtime: Runtime, drafter: str = "recall") -> NgramMemory:
    return runtime.loaded.memories[drafter].get_or_create("")


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafter", RECALLING)
def test_tokens_are_the_same_with_a_cold_a_warm_and_a_full_memory(
    runtime: Runtime, drafter: str, options: Options
) -> None:
    plain = runtime.generate(ASKED, drafter="none", **options)
    cold = runtime.generate(ASKED, drafter=drafter, **options)
    warm = runtime.generate(ASKED, drafter=drafter, **options)
    assert cold.token_ids == warm.token_ids == plain.token_ids
    assert warm.stats.rounds < cold.stats.rounds
    for number in range(30):
        runtime.generate([*ASKED[:5], 5 + number], drafter=drafter, **options)
    assert ROOM // 2 - 72 <= memory_of(runtime, drafter).tokens <= ROOM
    for number in (3, 28, 29):
        prompt = [*ASKED[:5], 5 + number]
        full = runtime.generate(prompt, drafter=drafter, **options)
        assert full.token_ids == runtime.generate(prompt, drafter="none", **options).token_ids


def test_sessions_branches_and_requests_share_their_output_unless_it_is_not_to_be_remembered(runtime: Runtime) -> None:
    def ask(remember: bool) -> None:
        options = Options(**GREEDY, drafter="recall", remember=remember)
        runtime.session().generate([*ASKED, 1], **options)
        runtime.submit([*ASKED, 2], **options).result(60)
        runtime.generate_branches(ASKED, [[3], [4]], **options)

    def rounds() -> list[int]:
        options = Options(**GREEDY, drafter="recall", remember=False)
        return [runtime.generate([*ASKED, last], **options).stats.rounds for last in range(1, 5)]

    before = rounds()
    ask(remember=False)
    assert memory_of(runtime).tokens == 0
    ask(remember=True)
    assert all(now < then for now, then in zip(rounds(), before, strict=True))
    assert runtime.close(timeout=60)


def test_drafters_do_not_share_their_memories(runtime: Runtime) -> None:
    for drafter in ("forgetful", "none", "head"):
        runtime.generate(ASKED, drafter=drafter, **GREEDY)
    assert list(runtime.loaded.memories) == list(RECALLING)
    assert [memory_of(runtime, drafter).tokens for drafter in RECALLING] == [0, 0]
    runtime.generate(ASKED, drafter="mixed", **GREEDY)
    assert memory_of(runtime).tokens == 0
    assert memory_of(runtime, "mixed").tokens == 12 + 60


def test_only_output_that_ended_by_itself_is_remembered(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to a stop string."""
    options: dict[str, Any] = {**GREEDY, "drafter": "recall"}
    cancel = threading.Event()
    cancelled = runtime.stream(ASKED, cancel=cancel, **options)
    next(cancelled)
    cancel.set()
    assert cancelled.result.finish_reason is FinishReason.CANCELLED
    left = runtime.stream(ASKED, **options)
    next(left)
    left.close()
    passes = iter(range(100))

    def fail(*_: object) -> None:
        if next(passes) == 4:
            raise OSError("the device is gone")

    with monkeypatch.context() as patch:
        call_before(patch, Program, "run", fail)
        with pytest.raises(OSError, match="the device is gone"):
            runtime.generate(ASKED, **options)
    assert memory_of(runtime).tokens == 0
    whole = runtime.generate(ASKED, **options, remember=False)
    stop = next(character for character in whole.text[3:] if character.isprintable() and character != "\ufffd")
    stopped = runtime.submit(ASKED, stop=[stop], **options).result(60)
    assert stopped.finish_reason is FinishReason.STOP
    assert len(stopped.token_ids) < 60
    assert memory_of(runtime).tokens == 12 + len(stopped.token_ids)
    assert runtime.close(timeout=60)


@pytest.mark.usefixtures("run_ahead")
def test_tentative_tokens_are_not_remembered_but_what_they_are_confirmed_as(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    remembered: list[list[int]] = []
    monkeypatch.setattr(Drafting, "remember", lambda drafting, sequence, output: remembered.append(list(output)))
    options: dict[str, Any] = {**GREEDY, "drafter": "recall", "partial_kv": "lossless"}
    retracted = 0
    for prompt in ([*ASKED * 3, last] for last in range(1, 5)):
        remembered.clear()
        found = runtime.generate(prompt, **options)
        assert remembered == [found.token_ids]
        assert found.token_ids == runtime.generate(prompt, drafter="none", **GREEDY).token_ids
        retracted += found.stats.retracted
    assert retracted


@pytest.mark.usefixtures("run_ahead")
def test_tokens_over_lossy_partial_kv_do_not_depend_on_outputs_of_others(runtime: Runtime) -> None:
    options: dict[str, Any] = {**GREEDY, "drafter": "recall", "partial_kv": "lossy"}
    cold = runtime.generate(ASKED * 3, **options)
    assert memory_of(runtime).tokens == 12 + 60
    warm = runtime.generate(ASKED * 3, **options)
    assert (warm.token_ids, warm.stats.rounds) == (cold.token_ids, cold.stats.rounds)


def test_the_server_has_the_option_remember(runtime: Runtime) -> None:
    with listening(runtime) as address:
        client = client_of(address)
        for remember, tokens in ((False, 0), (True, len(ASKED[:12]) + 10)):
            own = {"drafter": "recall", "ignore_eos": True, "remember": remember}
            client.completions.create(model="toy", prompt=ASKED, max_tokens=10, temperature=0, extra_body=own)
            assert memory_of(runtime).tokens == tokens
        with pytest.raises(openai.BadRequestError, match="remember is 1; pass true or false"):
            client.completions.create(model="toy", prompt=ASKED, extra_body={"remember": 1})


def test_inspect_and_memory_use_have_it(plan: Path, runtime: Runtime, capsys: pytest.CaptureFixture[str]) -> None:
    outrider.compiler.__main__.main(["inspect", str(plan)])
    shown = " ".join(capsys.readouterr().out.split())
    assert "otherwise head, least 2, max_context 12, min_context 1, min_confidence 0.25, filler_top_k 3, mem" in shown
    use = runtime.memory()
    assert use.ngram_memory_bytes == sum(memory_of(runtime, drafter).nbytes for drafter in RECALLING) > 0
    assert use.total_bytes >= use.ngram_memory_bytes
