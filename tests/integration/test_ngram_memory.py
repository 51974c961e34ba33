"""Earlier outputs change how fast tokens come, and never the tokens: cold, warm, full and shared."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import openai
import pytest

import outrider.compiler.__main__
from outrider import FinishReason, Runtime, SchedulerConfig
from outrider.compiler.build import build
from outrider.compiler.recipe import load_recipe
from outrider.plugins.native import NgramMemory
from outrider.runtime.drafters.drafting import Drafting
from outrider.runtime.execution.program import Program
from outrider.runtime.options.options import Options
from tests.conftest import PARTIAL_KV, made_once
from tests.integration.served import client_of, listening

ROOM = 1024
DRAFTERS = (
    f"drafters=[{{name: recall, kind: ngram, max_context: 12, max_draft: 8, memory: {ROOM}}}, "
    "{name: forgetful, kind: ngram, max_context: 12, max_draft: 8}, {name: head, kind: eagle3, checkpoint: head}, "
    f"{{name: mixed, kind: ngram, max_context: 12, max_draft: 8, otherwise: head, least: 2, memory: {ROOM}}}]"
)
CAPACITY = "capacity={context: 160, prefill_chunk: 16, branches: 16, batching: true}"  # graphs as of `branch_plan`
RECALLING = ("recall", "mixed")
PROMPT = [(37 * i) % 299 + 1 for i in range(20)]
GREEDY = Options(ignore_eos=True, auto_disable=False, max_new_tokens=60)
SAMPLED = Options(ignore_eos=True, auto_disable=False, max_new_tokens=60, temperature=0.8, seed=5)


@pytest.fixture(scope="module")
def plan(toy_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = load_recipe(toy_recipe, [DRAFTERS, CAPACITY, f"partial_kv={PARTIAL_KV[:-1]}, mode: off}}"])
    return made_once(tmp_path_factory, "memory-plan", lambda out: build(recipe, toy_recipe, out))


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
    plain = runtime.generate(PROMPT, drafter="none", **options)
    cold = runtime.generate(PROMPT, drafter=drafter, **options)
    warm = runtime.generate(PROMPT, drafter=drafter, **options)
    assert cold.token_ids == warm.token_ids == plain.token_ids
    assert warm.stats.rounds < cold.stats.rounds
    for number in range(30):
        runtime.generate([*PROMPT[:5], 5 + number], drafter=drafter, **options)
    assert ROOM // 2 - 72 <= memory_of(runtime, drafter).tokens <= ROOM
    for number in (3, 28, 29):
        prompt = [*PROMPT[:5], 5 + number]
        full = runtime.generate(prompt, drafter=drafter, **options)
        assert full.token_ids == runtime.generate(prompt, drafter="none", **options).token_ids


def test_sessions_branches_and_requests_share_what_each_of_them_puts_out(runtime: Runtime) -> None:
    options = Options(**GREEDY, drafter="recall")

    def rounds(last: int) -> int:
        return runtime.generate([*PROMPT, last], **{**options, "remember": False}).stats.rounds

    before = [rounds(last) for last in range(1, 5)]
    session = runtime.session()
    session.generate([*PROMPT, 1], **options)
    session.close()
    runtime.submit([*PROMPT, 2], **options).result(60)
    runtime.generate_branches(PROMPT, [[3], [4]], **options)
    assert all(now < then for now, then in zip([rounds(last) for last in range(1, 5)], before, strict=True))
    assert runtime.close(timeout=60)


def test_drafters_do_not_share_their_memories(runtime: Runtime) -> None:
    for drafter in ("forgetful", "none", "head"):
        runtime.generate(PROMPT, drafter=drafter, **GREEDY)
    assert list(runtime.loaded.memories) == list(RECALLING)
    assert [memory_of(runtime, drafter).tokens for drafter in RECALLING] == [0, 0]
    runtime.generate(PROMPT, drafter="mixed", **GREEDY)
    assert memory_of(runtime).tokens == 0
    assert memory_of(runtime, "mixed").tokens == 12 + 60


@pytest.mark.parametrize("way", ["generate", "session", "branches", "submit"])
def test_a_request_that_is_not_to_be_remembered_leaves_nothing(runtime: Runtime, way: str) -> None:
    options = Options(**GREEDY, drafter="recall", remember=False)
    ways: dict[str, Any] = {
        "generate": lambda: runtime.generate(PROMPT, **options),
        "session": lambda: runtime.session().generate(PROMPT, **options),
        "branches": lambda: runtime.generate_branches(PROMPT, n=2, **options),
        "submit": lambda: runtime.submit(PROMPT, **options).result(60),
    }
    ways[way]()
    assert memory_of(runtime).tokens == 0
    assert runtime.close(timeout=60)


def test_only_what_ended_by_itself_is_remembered(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {**GREEDY, "drafter": "recall"}
    cancel = threading.Event()
    cancelled = runtime.stream(PROMPT, cancel=cancel, **options)
    next(cancelled)
    cancel.set()
    assert cancelled.result.finish_reason is FinishReason.CANCELLED
    assert cancelled.result.token_ids
    left = runtime.stream(PROMPT, **options)
    next(left)
    left.close()
    passes, run = iter(range(100)), Program.run

    def failing(program: Program, *arguments: Any) -> None:
        if next(passes) == 4:
            raise OSError("the device is gone")
        run(program, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Program, "run", failing)
        with pytest.raises(OSError, match="the device is gone"):
            runtime.generate(PROMPT, **options)
    assert memory_of(runtime).tokens == 0
    runtime.generate(PROMPT, **options)
    assert memory_of(runtime).tokens == 12 + 60


def test_a_text_behind_a_stop_string_is_not_remembered(runtime: Runtime) -> None:
    options: dict[str, Any] = {**GREEDY, "drafter": "recall"}
    whole = runtime.generate(PROMPT, **{**options, "remember": False})
    stop = next(character for character in whole.text[3:] if character.isprintable() and character != "\ufffd")
    stopped = runtime.submit(PROMPT, stop=[stop], **options).result(60)
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
    for prompt in ([*PROMPT * 3, last] for last in range(1, 5)):
        remembered.clear()
        found = runtime.generate(prompt, **options)
        assert remembered == [found.token_ids]
        assert found.token_ids == runtime.generate(prompt, drafter="none", **GREEDY).token_ids
        retracted += found.stats.retracted
    assert retracted


@pytest.mark.usefixtures("run_ahead")
def test_tokens_over_lossy_partial_kv_do_not_depend_on_what_others_put_out(runtime: Runtime) -> None:
    options: dict[str, Any] = {**GREEDY, "drafter": "recall", "partial_kv": "lossy"}
    cold = runtime.generate(PROMPT * 3, **options)
    assert memory_of(runtime).tokens == 12 + 60
    warm = runtime.generate(PROMPT * 3, **options)
    assert (warm.token_ids, warm.stats.rounds) == (cold.token_ids, cold.stats.rounds)


def test_requests_of_several_threads_get_their_tokens_while_the_memory_turns_over(plan: Path) -> None:
    runtime = Runtime.load(plan, threads=1, scheduler=SchedulerConfig(max_running=3))
    prompts = [[*PROMPT[:6], 1 + number % 20] for number in range(40)]
    options = Options(max_new_tokens=40, ignore_eos=True, auto_disable=False)
    expected = {tuple(prompt): runtime.generate(prompt, drafter="none", **options).token_ids for prompt in prompts}
    found: list[tuple[list[int], list[int]]] = []

    def generate(own: list[list[int]]) -> None:
        found.extend((prompt, runtime.generate(prompt, drafter="recall", **options).token_ids) for prompt in own)

    threads = [threading.Thread(target=generate, args=(prompts[place::2],)) for place in range(2)]
    for thread in threads:
        thread.start()
    handles = [runtime.submit(prompt, drafter="recall", **options) for prompt in prompts]
    for prompt, handle in zip(prompts, handles, strict=True):
        assert handle.result(60).token_ids == expected[tuple(prompt)]
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert len(found) == len(prompts)
    assert all(tokens == expected[tuple(prompt)] for prompt, tokens in found)
    assert memory_of(runtime).tokens <= ROOM
    assert runtime.close(timeout=60)


def test_the_server_takes_remember_and_leaves_what_it_forbids(runtime: Runtime) -> None:
    with listening(runtime) as address:
        client = client_of(address)
        for remember, tokens in ((False, 0), (True, len(PROMPT[:12]) + 10)):
            own = {"drafter": "recall", "ignore_eos": True, "remember": remember}
            client.completions.create(model="toy", prompt=PROMPT, max_tokens=10, temperature=0, extra_body=own)
            assert memory_of(runtime).tokens == tokens
        with pytest.raises(openai.BadRequestError, match="remember is 1; pass true or false"):
            client.completions.create(model="toy", prompt=PROMPT, extra_body={"remember": 1})


def test_inspect_shows_it(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outrider.compiler.__main__.main(["inspect", str(plan)])
    shown = " ".join(capsys.readouterr().out.split())
    assert "filler_top_k 3, memory 1024 tokens, below 2 tokens head drafts" in shown


def test_memory_use_counts_it(runtime: Runtime) -> None:
    use = runtime.memory()
    assert use.ngram_memory_bytes == sum(memory_of(runtime, drafter).nbytes for drafter in RECALLING) > 0
    assert use.total_bytes >= use.ngram_memory_bytes
