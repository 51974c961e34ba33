"""Branches in one sequence: each has the tokens that it has alone, whatever lives beside it."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider import Runtime
from outrider.plans.errors import RequestError
from outrider.runtime.branch_request import MODES
from outrider.runtime.kv.cache import KvCache
from outrider.runtime.options.options import Options
from outrider.runtime.step_loop import StepLoop
from outrider.runtime.text.grammar_rule import GrammarRule

DRAFTERS = ["none", "ngram", "short", "chain", "bushy", "head", "block", "mixed"]
TOKENS = st.lists(st.integers(1, 299), min_size=1, max_size=24)


@pytest.fixture(scope="module")
def branching(branch_plan: Path) -> Runtime:
    return Runtime.load(branch_plan, threads=1)


def alone(runtime: Runtime, prefix: list[int], branch: dict[str, Any], place: int, **options: Any) -> Any:
    own = {
        "stream_id": place,
        **options,
        **{name: value for name, value in branch.items() if name not in ("prompt", "predicted_tokens")},
    }
    return runtime.generate([*prefix, *branch["prompt"]], **own)


BRANCH = st.fixed_dictionaries(
    {
        "prompt": TOKENS,
        "max_new_tokens": st.integers(1, 40),
        "temperature": st.sampled_from([0.0, 0.8]),
        "seed": st.integers(0, 9),
        "drafter": st.sampled_from(DRAFTERS),
    }
)


@given(
    prefix=st.lists(st.integers(1, 299), min_size=1, max_size=50),
    branches=st.lists(BRANCH, min_size=1, max_size=12),
    parallel=st.integers(1, 16),
    mode=st.sampled_from(MODES),
)
def test_every_branch_has_the_tokens_that_it_has_alone(branching, prefix, branches, parallel, mode) -> None:
    """Joined and finished at different times, more of them than live at once, until slots have to be compacted."""
    found = branching.generate_branches(prefix, branches, max_parallel=parallel, mode=mode, ignore_eos=True)
    assert len(found) == len(branches)
    for place, (branch, generation) in enumerate(zip(branches, found, strict=True)):
        expected = alone(branching, prefix, branch, place, ignore_eos=True)
        assert generation.token_ids == expected.token_ids
        assert generation.text == expected.text
        assert generation.finish_reason == expected.finish_reason


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_sixteen_branches_live_at_once(branching, drafter, mode, monkeypatch) -> None:
    most = 0
    original = StepLoop.step

    def watched(self: StepLoop, sequences: Any) -> Any:
        nonlocal most
        most = max(most, len(self.sequences))
        return original(self, sequences)

    monkeypatch.setattr(StepLoop, "step", watched)
    branches = [{"prompt": [20 + i, 7], "temperature": 0.7 * (i % 2), "seed": i} for i in range(18)]
    options = {"max_new_tokens": 7, "drafter": drafter, "ignore_eos": True}
    found = branching.generate_branches([5, 6, 7], branches, mode=mode, **options)
    assert most == 16
    for place, branch in enumerate(branches):
        assert found[place].token_ids == alone(branching, [5, 6, 7], branch, place, **options).token_ids


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_samples_of_one_prompt_share_all_of_it(branching, drafter, mode) -> None:
    prompt = [(37 * i) % 299 + 1 for i in range(40)]
    options = {"temperature": 0.9, "seed": 3, "max_new_tokens": 20, "drafter": drafter, "logprobs": 2}
    found = branching.generate_branches(prompt, n=4, mode=mode, **options)
    assert len({tuple(generation.token_ids) for generation in found}) > 1
    for stream, generation in enumerate(found):
        expected = branching.generate(prompt, stream_id=stream, **options)
        assert generation.token_ids == expected.token_ids
        assert [entry.logprob for entry in generation.logprobs] == [entry.logprob for entry in expected.logprobs]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("new", [1, 9])
def test_a_prompt_of_one_token_has_samples(branching, drafter, mode, new) -> None:
    options = {"temperature": 0.9, "max_new_tokens": new, "drafter": drafter, "ignore_eos": True, "seed": 0}
    branching.generate_branches([9, 8, 7], n=2, mode=mode, **options)  # leaves rows, and a feature
    found = branching.generate_branches([5], n=3, mode=mode, **options)
    for stream, generation in enumerate(found):
        assert generation.token_ids == branching.generate([5], stream_id=stream, **options).token_ids


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("drafter", ["chain", "bushy", "head"])
def test_drafts_are_as_good_behind_rows_that_were_kept(branching, drafter, mode) -> None:
    """Whatever ran between, with whichever drafters, after whichever prompt."""
    prefix, other, branches = [7, 3, 9] * 14, [4, 5] * 9, [[8, 2], [9, 1]]

    def accepted(name: str, prompt: list[int]) -> list[tuple[int, int]]:
        options = {"max_new_tokens": 20, "mode": mode, "drafter": name, "ignore_eos": True}
        return [(g.stats.accepted, g.stats.drafted) for g in branching.generate_branches(prompt, branches, **options)]

    accepted("ngram", other)
    fresh = accepted(drafter, prefix)
    for between in (
        [],
        [("none", prefix)],
        [("head", prefix)],
        [("chain", prefix)],
        [("none", other), ("none", prefix)],
    ):
        for name, prompt in between:
            accepted(name, prompt)
        assert accepted(drafter, prefix) == fresh
    stream = branching.stream_branches(prefix, branches, drafter=drafter, mode=mode, max_new_tokens=20)
    next(stream)
    stream.close()
    assert accepted(drafter, prefix) == fresh
    assert branching.stream_branches(prefix, branches, mode=mode, drafter=drafter, max_new_tokens=1).results
    again = branching.stream_branches(prefix, branches, mode=mode, drafter=drafter, max_new_tokens=1)
    assert again.results
    assert again.stats.reused_tokens == len(prefix)


def test_the_callers_time_is_not_counted(branching) -> None:
    stream = branching.stream_branches([5, 6], [[7], [8]], max_new_tokens=8, drafter="none", ignore_eos=True)
    began, waited = time.perf_counter(), 0.0
    for _ in stream:
        before = time.perf_counter()
        time.sleep(0.02)
        waited += time.perf_counter() - before
    computed = time.perf_counter() - began - waited
    for result in stream.results:
        assert result.stats.total_ms <= stream.stats.total_ms
    assert stream.stats.total_ms <= 1000 * computed


def test_a_run_that_is_cancelled_computes_no_prefix(branching) -> None:
    cancel = threading.Event()
    cancel.set()
    stream = branching.stream_branches([5] * 60, [[7], [8]], cancel=cancel)
    assert [str(result.finish_reason) for result in stream.results] == ["cancelled"] * 2
    assert (stream.stats.prefill_passes, stream.stats.rounds) == (0, 0)


def test_a_branch_that_is_cancelled_before_it_begins_is_over_at_once(branching) -> None:
    cancel = threading.Event()
    branches = [{"prompt": [7], "max_new_tokens": 30}, {"prompt": [8], "max_new_tokens": 20, "cancel": cancel}]
    stream = branching.stream_branches([5], branches, max_parallel=1, drafter="none", ignore_eos=True)
    assert next(stream).sequence == 0
    cancel.set()
    following = next(stream)
    assert (following.sequence, following.result.finish_reason) == (1, "cancelled")
    assert [len(result.token_ids) for result in stream.results] == [30, 0]


def test_none_in_a_branch_leaves_the_option_to_the_call(branching) -> None:
    options = Options(max_new_tokens=8, temperature=0.9, seed=5, ignore_eos=True)
    plain = branching.generate_branches([5, 6], [[7], [8]], **options)
    none = {"temperature": None, "seed": None, "stream_id": None}
    found = branching.generate_branches([5, 6], [{"prompt": [7], **none}, {"prompt": [8], **none}], **options)
    assert [each.token_ids for each in found] == [each.token_ids for each in plain]
    with pytest.raises(RequestError, match=f"Branch 1: stream_id is {2**63}; pass a whole number of at most"):
        branching.generate_branches([5, 6], n=2, stream_id=2**63 - 1, temperature=0.7)


def test_streams_count_on_from_the_one_given(branching) -> None:
    """Whatever kind of whole number it is."""
    options = {"temperature": 1.0, "max_new_tokens": 12, "ignore_eos": True, "seed": 0}
    expected = [branching.generate([5, 6, 7], stream_id=3 + i, **options).token_ids for i in range(4)]
    for first in (3, np.int64(3)):
        found = branching.generate_branches([5, 6, 7], n=4, stream_id=first, **options)
        assert [generation.token_ids for generation in found] == expected
    prompts = np.array([[8, 9], [10, 11]])
    found = branching.generate_branches([5], prompts, **options)
    assert [g.token_ids for g in found] == [
        branching.generate([5, *prompt], stream_id=place, **options).token_ids
        for place, prompt in enumerate(prompts.tolist())
    ]


def test_the_longest_begin_first_and_others_follow(branching) -> None:
    branches = [{"prompt": [8 + i], "max_new_tokens": 3 + i % 5, "predicted_tokens": 10 * i} for i in range(1, 7)]
    stream = branching.stream_branches([5, 6], branches, max_parallel=2, ignore_eos=True)
    seen = list(dict.fromkeys(each.sequence for each in stream))
    assert seen == [5, 4, 3, 2, 1, 0]
    assert stream.stats.most_alive == 2
    assert stream.stats.new_tokens == sum(branch["max_new_tokens"] for branch in branches)
    assert [len(result.token_ids) for result in stream.results] == [branch["max_new_tokens"] for branch in branches]


def test_a_run_says_what_it_cost(branching) -> None:
    """The prefix is there once in one sequence, and once more for every branch but the first in batching."""
    prefix, branches = [7] * 100, [[8], [9], [10], [11]]
    slot = branching.manifest.target.layers * 2 * 2 * 16 * 4  # both planes, heads, their size, float32
    stats, options = {}, {"drafter": "none", "ignore_eos": True}
    for mode in MODES:
        stream = branching.stream_branches(prefix, branches, mode=mode, max_new_tokens=6, **options)
        assert len(stream.results) == 4
        stats[mode] = stream.stats
    one, rows = (stats[mode] for mode in MODES)
    assert (one.prefill_passes, one.rounds, one.new_tokens) == (7, 6, 24)
    assert one.kv_bytes == (100 + 4 * 6) * slot
    assert rows.kv_bytes == 4 * (100 + 6) * slot
    assert (one.bytes_copied, rows.bytes_copied) == (0, 3 * 100 * slot)
    assert (one.kv_operations, rows.kv_operations) == ({}, {"prefix": 300})
    assert 0 < one.engine_ms <= one.total_ms
    closed = branching.stream_branches(prefix, branches, max_new_tokens=6)
    next(closed)
    closed.close()
    with pytest.raises(RuntimeError, match="closed"):
        _ = closed.results


def test_spans_joined_are_the_text_and_a_cancelled_branch_leaves_the_others(branching) -> None:
    cancel = threading.Event()
    branches = [[8, 9], {"prompt": [10], "cancel": cancel}, [11]]
    texts, results = ["", "", ""], {}
    for number, each in enumerate(branching.stream_branches([5, 6], branches, max_new_tokens=24, ignore_eos=True)):
        texts[each.sequence] += each.text
        if number == 6:
            cancel.set()
        if each.result is not None:
            results[each.sequence] = each.result
    assert [results[place].text for place in range(3)] == texts
    assert [str(results[place].finish_reason) for place in range(3)] == ["length", "cancelled", "length"]
    for place in (0, 2):
        expected = branching.generate([5, 6, *branches[place]], max_new_tokens=24, ignore_eos=True)
        assert results[place].token_ids == expected.token_ids


def test_a_branch_whose_form_cannot_go_on_is_named(branching, monkeypatch) -> None:
    def fails(*_: Any) -> None:
        raise RequestError("There is no token.")

    monkeypatch.setattr(GrammarRule, "apply", fails)
    with pytest.raises(RequestError, match="Branch 1: There is no token"):
        branching.generate_branches([5], [[6], {"prompt": [7], "structured_outputs": {"regex": "[ -~]*"}}])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([1], []), "empty"),
        (([1], None, 2000), "from 1 to 1024"),
        (([1], None), "Pass either"),
        (([1], "abc"), "`branches` is of type str"),
        (([1], [5]), "Branch 0: Pass text or a list"),
        (([1], [{"prompt": [2], "stream_id": "x"}]), "Branch 0: stream"),
        (([1], [{"prompt": [2], "on_round": 3}]), "Branch 0: on_round"),
        (([1], [[2], []]), "Branch 1: It begins with nothing"),
        (([1], [[2], [999]]), "Branch 1: Token id 999"),
        (([1], [{"prompt": [2], "predicted_tokens": 0}]), "Branch 0: predicted_tokens is 0"),
        (([1], [[2], {"prompt": [3], "heat": 1}]), "Branch 1: Unknown option 'heat'"),
        (([1] * 150, [[2] * 20]), "Branch 0: The sequence would have 170"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_runs(branching, arguments, words) -> None:
    prompt, branches, *n = arguments
    with pytest.raises(RequestError, match=words):
        branching.stream_branches(prompt, branches, n=n[0] if n else None)
    with pytest.raises(RequestError, match="keep_for names 'oracle'"):
        branching.stream_branches([1], [[2]], keep_for=["oracle"])
    with pytest.raises(RequestError, match="max_parallel"):
        branching.stream_branches([1], [[2]], max_parallel=17)
    with pytest.raises(RequestError, match="mode is 'rows'; choose one of in-one-sequence, batching"):
        branching.stream_branches([1], [[2]], mode="rows")


def test_a_plan_of_one_branch_says_so(toy: Runtime) -> None:
    with pytest.raises(RequestError, match=r"capacity\.branches"):
        toy.generate_branches([1], [[2]])


@pytest.mark.parametrize("drafter", ["none", "bushy", "head"])
def test_dead_slots_are_compacted(branching, drafter, monkeypatch) -> None:
    moved: dict[str, list[int]] = {}
    original = KvCache.make_room

    def watched(self: KvCache, most: int) -> None:
        before = self.length
        original(self, most)
        if self.length < before:
            moved.setdefault(self._model, []).append(before - self.length)

    monkeypatch.setattr(KvCache, "make_room", watched)
    branches = [{"prompt": [7 + i] * 5, "max_new_tokens": 30 + i} for i in range(10)]
    options = {"ignore_eos": True, "drafter": drafter}
    found = branching.generate_branches([5] * 20, branches, max_parallel=3, **options)
    assert moved.keys() == {"target", drafter} - {"none"}
    for place, branch in enumerate(branches):
        assert found[place].token_ids == alone(branching, [5] * 20, branch, place, **options).token_ids
