"""Every feature in every way of asking: one sequence, several in one row, and a row each, through each door.

The ways are `generate`, a session, branches in one sequence and with a row each, requests in both modes, and the
server. Each feature is tried in each of them, several sequences at once where the way has them, beside others that do
not use it. What single features do beyond that has tests of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from outrider import Generation, PrefixCacheConfig, Runtime, SchedulerConfig
from outrider.runtime.branch_request import Mode
from outrider.runtime.options.options import Options
from tests.conftest import TOY_DRAFTERS, drafting_never_pays, forget_what_drafting_cost
from tests.integration.long_context import prompt
from tests.integration.served import client_of, listening

DRAFTERS = ["none", *TOY_DRAFTERS]
WAYS = ["generate", "session", "branches", "branches, rows", "submit", "submit, rows", "server"]
PREFIX = prompt(3, 48)


@pytest.fixture(scope="module")
def plan(everything_plan: Path) -> Path:
    """`test_features_on_devices.py` has these tests for others."""
    return everything_plan


@dataclass
class Doors:
    """One runtime for each mode of requests, and a client of a server."""

    rows: Runtime
    row: Runtime
    client: openai.OpenAI | None

    def ask(self, way: str, asked: list[Options], own: list[list[int]] | None = None) -> list[Generation]:
        """Generate after PREFIX and each one's `own` tokens, by different options, all at once where the way can."""
        own = [[7 + place] for place in range(len(asked))] if own is None else own
        prompts = [PREFIX + tokens for tokens in own]
        both = list(zip(prompts, asked, strict=True))
        match way:
            case "generate":
                return [self.rows.generate(ids, **options) for ids, options in both]
            case "session":
                found = []
                for ids, options in both:
                    with self.rows.session() as session:
                        found.append(session.generate(ids, **options))
                return found
            case "branches" | "branches, rows":
                mode: Mode = "in-one-sequence" if way == "branches" else "batching"
                branches = [
                    {"prompt": tokens, "stream_id": 0, **options} for tokens, options in zip(own, asked, strict=True)
                ]
                return self.rows.generate_branches(PREFIX, branches, mode=mode)
            case "submit" | "submit, rows":
                runtime = self.row if way == "submit" else self.rows
                return [handle.result() for handle in runtime.submit_all(both)]
        raise AssertionError(way)

    def texts(self, way: str, asked: list[Options]) -> list[str]:
        """The texts alone, of the server as well, whose answers have no tokens."""
        if way != "server":
            return [each.text for each in self.ask(way, asked)]
        found: list[str] = [""] * len(asked)

        def one(place: int, options: Options) -> None:
            given: dict[str, Any] = dict(options)
            limit, stop = given.pop("max_new_tokens"), given.pop("stop", None)
            temperature, seed = given.pop("temperature", 0.0), given.pop("seed", 0)
            given.pop("auto_disable", None)
            assert self.client is not None
            answer = self.client.completions.create(
                model="toy", prompt=[*PREFIX, 7 + place], max_tokens=limit, stop=stop, temperature=temperature,
                seed=seed, extra_body=given,
            )  # fmt: skip
            found[place] = answer.choices[0].text

        threads = [threading.Thread(target=one, args=each) for each in enumerate(asked)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found


@pytest.fixture(scope="module")
def doors(plan: Path) -> Iterator[Doors]:
    rows = Runtime.load(plan, threads=1)
    row = Runtime.load(plan, threads=1, scheduler=SchedulerConfig(mode="in-one-sequence"))
    served = Runtime.load(plan, threads=1)
    with listening(served) as address, client_of(address) as client:
        yield Doors(rows, row, client)
    rows.close()
    row.close()


def options(**more: Any) -> Options:
    found = {"max_new_tokens": 16, "ignore_eos": True, **more}
    return Options(**found)  # type: ignore[typeddict-item]


@pytest.mark.parametrize("way", WAYS)
def test_every_drafter_mixed_in_one_pass(doors: Doors, way: str) -> None:
    plain = [options(drafter="none", temperature=0.9 * (place % 2), seed=5) for place in range(4)]
    expected = doors.texts("generate", plain)
    for shift in (0, 4, 7):  # eight drafters, so that some are tried both ways
        mixed = [
            options(**own | {"drafter": DRAFTERS[(shift + place) % len(DRAFTERS)]})  # type: ignore[misc]
            for place, own in enumerate(plain)
        ]
        assert doors.texts(way, mixed) == expected


@pytest.mark.parametrize("way", WAYS)
def test_rejection(doors: Doors, way: str) -> None:
    """Its tokens depend on its drafts, and on nothing else: they are those that it has alone."""
    drafters = ["classical", "classical-head", "chain", "classical-block"]
    asked = [options(drafter=drafter, temperature=1.0, seed=5) for drafter in drafters]
    assert doors.texts(way, asked) == doors.texts("generate", asked)


@pytest.mark.parametrize("way", [way for way in WAYS if way != "server"])
def test_adaptive_speculation(doors: Doors, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where drafting does not pay, each sequence's drafter is disabled; the tokens stay."""
    for runtime in (doors.rows, doors.row):
        forget_what_drafting_cost(runtime)
    drafting_never_pays(monkeypatch)
    drafters = ["chain", "head", "ngram", "none"]
    expected = [each.token_ids for each in doors.ask("generate", [options(drafter="none", max_new_tokens=60)] * 4)]
    found = doors.ask(way, [options(drafter=drafter, max_new_tokens=60) for drafter in drafters])
    assert [each.token_ids for each in found] == expected
    assert all(each.stats.plain_rounds > 0 for each in found[:3])


@pytest.mark.parametrize("way", WAYS)
def test_structured_outputs(doors: Doors, way: str) -> None:
    """Digits alone, beside sequences that may say anything."""
    digits = {"structured_outputs": {"regex": "[0-9]{12}"}, "ignore_eos": False}
    asked = [options(drafter="head", max_new_tokens=12, **(digits if place % 2 else {})) for place in range(4)]
    found = doors.texts(way, asked)
    assert all(text.isdigit() for text in found[1::2])
    assert found[::2] == doors.texts("generate", [options(drafter="none", max_new_tokens=12)] * 4)[::2]


@pytest.mark.parametrize("way", [way for way in WAYS if way != "server"])
def test_log_probabilities(doors: Doors, way: str) -> None:
    asked = [options(logprobs=2 if place % 2 else None, drafter="bushy", max_new_tokens=15) for place in range(4)]
    expected, found = doors.ask("generate", asked), doors.ask(way, asked)
    for one, other in zip(expected, found, strict=True):
        if doors.rows.backend in ("onnxruntime-cpu", "cuda"):
            assert one.logprobs == other.logprobs
        assert [entry.token_id for entry in one.logprobs] == [entry.token_id for entry in other.logprobs]
        np.testing.assert_allclose(
            [entry.logprob for entry in one.logprobs],
            [entry.logprob for entry in other.logprobs],
            atol=1e-4,  # kernels of NVIDIA's libraries sum by the size of a step
        )
    assert [len(each.logprobs) for each in found] == [0, 15, 0, 15]


@pytest.mark.parametrize("way", WAYS)
def test_stop_strings(doors: Doors, way: str) -> None:
    whole = doors.texts("generate", [options(drafter="none")] * 4)
    stops = [text[len(text) // 2 : len(text) // 2 + 2] for text in whole]
    asked = [
        options(drafter=drafter, stop=[stop] if place % 2 else [])
        for place, (drafter, stop) in enumerate(zip(["none", "chain", "ngram", "head"], stops, strict=True))
    ]
    expected = [
        text[: text.index(stop)] if place % 2 else text
        for place, (text, stop) in enumerate(zip(whole, stops, strict=True))
    ]
    assert doors.texts(way, asked) == expected


@pytest.mark.parametrize("way", [way for way in WAYS if way != "server"])
def test_cancellation(doors: Doors, way: str) -> None:
    """One ends after its third round; the others continue."""
    cancel = threading.Event()
    rounds: list[object] = []

    def watch(each: object) -> None:
        rounds.append(each)
        if len(rounds) == 3:
            cancel.set()

    whole = doors.ask("generate", [options(drafter="none")] * 4)
    asked = [
        options(drafter="none", **({"cancel": cancel, "on_round": watch} if place == 2 else {})) for place in range(4)
    ]
    found = doors.ask(way, asked)
    assert [each.finish_reason.value for each in found] == ["length", "length", "cancelled", "length"]
    assert [each.token_ids for each in found if each.finish_reason.value == "length"] == [
        each.token_ids for place, each in enumerate(whole) if place != 2
    ]
    ended = found[2].token_ids
    assert 3 <= len(ended) <= 5  # a scheduler shows a pass while the next one runs
    assert ended == whole[2].token_ids[: len(ended)]


@pytest.fixture(scope="module")
def cached(plan: Path) -> Iterator[Doors]:
    """With a prefix cache, and no server."""
    config = PrefixCacheConfig(max_cached_tokens=4096)
    rows = Runtime.load(plan, threads=1, prefix_cache=config)
    row = Runtime.load(plan, threads=1, prefix_cache=config, scheduler=SchedulerConfig(mode="in-one-sequence"))
    yield Doors(rows, row, None)
    rows.close()
    row.close()


@pytest.mark.parametrize("way", [way for way in WAYS if way != "server"])
def test_the_prefix_cache(doors: Doors, cached: Doors, way: str) -> None:
    asked = [options(drafter=drafter) for drafter in ("none", "chain", "head", "ngram")]
    expected = [each.token_ids for each in doors.ask("generate", [options(drafter="none")] * 4)]
    for _ in range(2):
        found = cached.ask(way, asked)
        assert [each.token_ids for each in found] == expected
    if way.startswith("branches"):  # which share the prefix
        return
    assert all(each.stats.reused_tokens >= len(PREFIX) - 1 for each in found)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("run_ahead")
def test_lossless_partial_kv(doors: Doors, way: str) -> None:
    """Of sequences that share a row, the one that is alone in it reads the partial cache."""
    drafters = ["none", "chain", "head", "ngram"]
    asked = [
        options(drafter=drafter, partial_kv="off" if drafter == "none" else "lossless", max_new_tokens=44)
        for drafter in drafters
    ]
    expected = doors.texts("generate", [options(drafter="none", max_new_tokens=44)] * 4)
    assert doors.texts(way, asked) == expected
    if way == "server":
        return
    for each in asked[1:]:
        assert doors.ask(way, [each])[0].stats.partial_rounds > 0


@pytest.mark.parametrize("way", [way for way in WAYS if way != "server"])
def test_lossy_partial_kv(doors: Doors, way: str) -> None:
    for drafter in ("none", "chain"):
        (found,) = doors.ask(way, [options(partial_kv="lossy", drafter=drafter, max_new_tokens=44)])
        assert found.stats.partial_rounds > found.stats.refreshes > 0


def test_a_runtime_holds_one_set_of_buffers_for_what_it_serves_one_after_another(plan: Path) -> None:
    runtime = Runtime.load(plan, threads=1)
    assert (runtime.memory().engines, runtime.memory().idle) == (1, 1)
    asked: list[Callable[[], object]] = [
        lambda: runtime.generate(PREFIX, max_new_tokens=4),
        lambda: runtime.generate_branches(PREFIX, [[1], [2]], max_new_tokens=4),
        lambda: runtime.generate_branches(PREFIX, [[1], [2]], mode="batching", max_new_tokens=4),
        lambda: runtime.beam_search(PREFIX, beams=2, max_new_tokens=4),
        lambda: runtime.submit(PREFIX, max_new_tokens=4).result(),
    ]
    for ask in asked:
        ask()
        if ask is asked[-1]:
            assert runtime._scheduler is not None
            runtime._scheduler.close(timeout=60)  # else it keeps its engine for a while
        assert runtime.memory().engines == 1
    held = runtime.memory()
    assert held.idle == 1
    assert held.total_bytes - held.scratch_bytes == held.engine_bytes > sum(held.kv_bytes.values()) > 0
    with runtime.session() as session:
        session.generate(PREFIX, max_new_tokens=4)
        assert (runtime.memory().engines, runtime.memory().idle) == (1, 0)
        runtime.generate(PREFIX, max_new_tokens=4)  # while the session is open
        assert runtime.memory().engines == 2
