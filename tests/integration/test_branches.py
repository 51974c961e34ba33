"""Branches: each has the tokens that it has alone, beside any others; and where their rows lie."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from outrider import PrefixCacheConfig, Runtime
from outrider.plans.errors import RequestError
from outrider.runtime.branch_request import MODES
from outrider.runtime.execution.program import Program
from outrider.runtime.kv import cache as cache_module
from outrider.runtime.kv.cache import KvCache
from outrider.runtime.kv.slots import SHARED
from outrider.runtime.options.options import Options
from outrider.runtime.stats import Stats
from outrider.runtime.step_loop import StepLoop
from outrider.runtime.text.grammar_rule import GrammarRule
from tests.conftest import call_before

DRAFTERS = ["none", "ngram", "short", "chain", "bushy", "head", "block", "mixed"]


def alone(runtime: Runtime, prefix: list[int], branch: dict[str, Any], place: int, **options: Any) -> Any:
    own = {
        "stream_id": place,
        **options,
        **{name: value for name, value in branch.items() if name not in ("prompt", "predicted_tokens")},
    }
    return runtime.generate([*prefix, *branch["prompt"]], **own)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_sixteen_branches_live_at_once(branching, drafter, mode, monkeypatch) -> None:
    alive = list[int]()
    call_before(monkeypatch, StepLoop, "step", lambda loop, _: alive.append(len(loop.sequences)))
    branches = [{"prompt": [20 + i, 7], "temperature": 0.7 * (i % 2), "seed": i} for i in range(18)]
    options = {"max_new_tokens": 7, "drafter": drafter, "ignore_eos": True}
    found = branching.generate_branches([5, 6, 7], branches, mode=mode, **options)
    assert max(alive) == 16
    for place, branch in enumerate(branches):
        assert found[place].token_ids == alone(branching, [5, 6, 7], branch, place, **options).token_ids


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("length", [1, 40])
def test_samples_of_one_prompt_share_all_of_it(branching, drafter, mode, length) -> None:
    branching.generate_branches([9, 8, 7], n=2, mode=mode, max_new_tokens=3, drafter=drafter)  # leaves rows, a feature
    prompt = [(37 * i) % 299 + 1 for i in range(length)]
    options = {"temperature": 0.9, "seed": 3, "max_new_tokens": 20, "drafter": drafter, "logprobs": 2}
    found = branching.generate_branches(prompt, n=4, mode=mode, **options)
    assert len({tuple(generation.token_ids) for generation in found}) > 1
    for stream, generation in enumerate(found):
        expected = branching.generate(prompt, stream_id=stream, **options)
        assert generation.token_ids == expected.token_ids
        assert [entry.logprob for entry in generation.logprobs] == [entry.logprob for entry in expected.logprobs]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("drafter", ["chain", "bushy", "head"])
def test_drafts_are_as_good_after_rows_that_were_kept(branching, drafter, mode) -> None:
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


def test_a_branch_that_is_cancelled_before_it_begins_is_over_at_once(branching) -> None:
    """And a run that is cancelled before it begins computes no prefix."""
    cancel = threading.Event()
    branches = [{"prompt": [7], "max_new_tokens": 30}, {"prompt": [8], "max_new_tokens": 20, "cancel": cancel}]
    stream = branching.stream_branches([5], branches, max_parallel=1, drafter="none", ignore_eos=True)
    assert next(stream).sequence == 0
    cancel.set()
    following = next(stream)
    assert (following.sequence, following.result.finish_reason) == (1, "cancelled")
    assert [len(result.token_ids) for result in stream.results] == [30, 0]
    stream = branching.stream_branches([5] * 60, [[7], [8]], cancel=cancel)
    assert [str(result.finish_reason) for result in stream.results] == ["cancelled"] * 2
    assert (stream.stats.prefill_passes, stream.stats.rounds) == (0, 0)


def test_streams_count_on_from_the_one_given_and_none_leaves_an_option_to_the_call(branching) -> None:
    sampled = {"temperature": 1.0, "max_new_tokens": 12, "ignore_eos": True, "seed": 0}
    expected = [branching.generate([5, 6, 7], stream_id=3 + i, **sampled).token_ids for i in range(4)]
    found = branching.generate_branches([5, 6, 7], n=4, stream_id=np.int64(3), **sampled)
    assert [generation.token_ids for generation in found] == expected
    options = Options(max_new_tokens=8, temperature=0.9, seed=5, ignore_eos=True)
    plain = branching.generate_branches([5, 6], [[7], [8]], **options)
    none = {"temperature": None, "seed": None, "stream_id": None}
    found = branching.generate_branches([5, 6], [{"prompt": [7], **none}, {"prompt": [8], **none}], **options)
    assert [each.token_ids for each in found] == [each.token_ids for each in plain]
    with pytest.raises(RequestError, match=f"Branch 1: stream_id is {2**63}; pass a whole number of at most"):
        branching.generate_branches([5, 6], n=2, stream_id=2**63 - 1, temperature=0.7)


def test_the_longest_begin_first_and_others_follow(branching) -> None:
    branches = [{"prompt": [8 + i], "max_new_tokens": 3 + i % 5, "predicted_tokens": 10 * i} for i in range(1, 7)]
    stream = branching.stream_branches([5, 6], branches, max_parallel=2, ignore_eos=True)
    spans = list(stream)
    seen = list(dict.fromkeys(each.sequence for each in spans))
    for place, result in enumerate(stream.results):
        assert "".join(each.text for each in spans if each.sequence == place) == result.text
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


def test_a_branch_whose_form_cannot_go_on_is_named(branching, monkeypatch) -> None:
    monkeypatch.setattr(GrammarRule, "apply", Mock(side_effect=RequestError("There is no token.")))
    with pytest.raises(RequestError, match="Branch 1: There is no token"):
        branching.generate_branches([5], [[6], {"prompt": [7], "structured_outputs": {"regex": "[ -~]*"}}])


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"branches": []}, "empty"),
        ({"n": 2000}, "from 1 to 1024"),
        ({}, "Pass either"),
        ({"branches": "abc"}, "`branches` is of type str"),
        ({"branches": [5]}, "Branch 0: Pass text or a list"),
        ({"branches": [{"prompt": [2], "stream_id": "x"}]}, "Branch 0: stream"),
        ({"branches": [[2], []]}, "Branch 1: It begins with nothing"),
        ({"branches": [[2], [999]]}, "Branch 1: Token id 999"),
        ({"branches": [{"prompt": [2], "predicted_tokens": 0}]}, "Branch 0: predicted_tokens is 0"),
        ({"branches": [[2], {"prompt": [3], "heat": 1}]}, "Branch 1: Unknown option 'heat'"),
        ({"branches": [[2] * 160]}, "Branch 0: The sequence would have 161"),
        ({"n": 2, "keep_for": ["oracle"]}, "keep_for names 'oracle'"),
        ({"n": 2, "max_parallel": 17}, "max_parallel"),
        ({"n": 2, "mode": "rows"}, "mode is 'rows'; choose one of in-one-sequence, batching"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_runs(branching, own, words) -> None:
    with pytest.raises(RequestError, match=words):
        branching.stream_branches([1], **{"branches": None, **own})


def test_a_plan_of_one_branch_says_so(toy: Runtime) -> None:
    with pytest.raises(RequestError, match=r"capacity\.branches"):
        toy.generate_branches([1], [[2]])


@pytest.mark.parametrize("drafter", ["chain", "head"])
def test_a_drafter_catches_up_with_long_beginnings_over_dead_rows(branch_plan, drafter, monkeypatch) -> None:
    """After rows of a branch that is over, and never beyond the keys that its engine can see."""
    branching, sizes = Runtime.load(branch_plan, threads=1), list[int]()

    def watch(program: Program) -> None:
        kind, _, name = program.name.partition(".")
        if name == drafter and kind in ("extend", "draft", "speculate"):
            (own,) = (engine.drafting.engine_drafters[name] for engine in branching.engines.loops)
            step = own._step
            reach = 0 if kind == "extend" else step.reach
            assert own.cache.length + step.new_tokens + reach <= step.largest_view
            sizes.append(step.new_tokens)

    call_before(monkeypatch, Program, "run", watch)
    long = [(11 * i) % 299 + 1 for i in range(150)]
    branches = [
        {"prompt": long[:138], "max_new_tokens": 4, "predicted_tokens": 9},  # there is no room for another beside it
        {"prompt": long[:125], "max_new_tokens": 2, "predicted_tokens": 5},
        {"prompt": long[20:145], "max_new_tokens": 2, "predicted_tokens": 5},
    ]
    options = {"drafter": drafter, "ignore_eos": True}
    found = branching.generate_branches([3, 4], branches, **options)
    assert max(sizes) > branching.manifest.target.prefill_chunk
    for place, branch in enumerate(branches):
        assert found[place].token_ids == alone(branching, [3, 4], branch, place, **options).token_ids


def test_a_sequence_with_many_dead_slots_is_compacted(branching, monkeypatch) -> None:
    """Long before room runs short; what is moved is no more than what was appended."""
    branches = [{"prompt": [9 + i, 3], "max_new_tokens": 8 + 4 * i} for i in range(12)]
    options = {"drafter": "none", "ignore_eos": True}

    def run() -> Stats:
        stream = branching.stream_branches([4, 5, 6], branches, max_parallel=4, **options)
        for place, generation in enumerate(stream.results):
            assert generation.token_ids == alone(branching, [4, 5, 6], branches[place], place, **options).token_ids
        return stream.stats

    compacted = run()
    monkeypatch.setattr(cache_module, "_MANY_DEAD", 10**6)
    late = run()
    assert compacted.compactions > 0
    assert compacted.kv_bytes < late.kv_bytes
    g = branching.manifest.target
    slot = 2 * g.layers * g.kv_heads * g.head_dim * 4
    assert compacted.bytes_copied <= sum(2 + branch["max_new_tokens"] for branch in branches) * slot
    assert compacted.bytes_copied == compacted.kv_operations["compacted"] * slot


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_prefix_that_sessions_have_computed_is_found(branch_plan, branching, drafter, mode) -> None:
    """And the other way round; log-probabilities and drafts are what they are without."""
    runtime = Runtime.load(branch_plan, threads=1, prefix_cache=PrefixCacheConfig(max_cached_tokens=2048))
    prefix, branches = [(29 * i) % 290 + 1 for i in range(50)], [[8, 2], [9, 1], [3]]
    options = {"drafter": drafter, "max_new_tokens": 15, "logprobs": 2, "ignore_eos": True, "auto_disable": False}
    expected = branching.generate_branches(prefix, branches, mode=mode, **options)
    runtime.generate([*prefix[:33], 5], **options)
    for kept in (33, 50):
        stream = runtime.stream_branches(prefix, branches, mode=mode, **options)
        for found, other in zip(stream.results, expected, strict=True):
            assert (found.token_ids, found.logprobs) == (other.token_ids, other.logprobs)
            assert (found.stats.drafted, found.stats.accepted) == (other.stats.drafted, other.stats.accepted)
        assert kept - 1 <= stream.stats.cached_tokens <= kept
        runtime.engines.idle.clear()
    assert runtime.prefix_cache is not None
    assert runtime.prefix_cache.in_use == 0
    session = runtime.session()
    found = session.generate([*prefix, 8, 2], **options)
    assert found.token_ids == expected[0].token_ids
    assert found.stats.cached_tokens >= len(prefix)


def poison(monkeypatch: pytest.MonkeyPatch, spared: list[int] | None) -> None:
    """From now on no slot holds anything of use when a step begins, of any model, but those that it may read.

    Those are the prefix's, and of all live branches; with `spared`, of the one alone whose tokens begin with these.
    """
    loops = deque[StepLoop](maxlen=1)

    def poisoned(cache: KvCache) -> None:
        kv, live = cache._buffers.array(cache._model, "kv"), loops[0].sequences if loops else []
        mine = [each.number for each in live if spared is None or each.tokens[each.shared :][: len(spared)] == spared]
        for row, slots in enumerate(cache._rows):
            others = ~np.isin(slots.owners, [*mine, SHARED])
            kv[:, row][:, :, np.flatnonzero(others)] = 1e30
            kv[:, row][:, :, slots.length :] = -1e30

    begin, begin_alone = KvCache.begin, KvCache.begin_alone
    call_before(monkeypatch, StepLoop, "step", lambda loop, *_: loops.append(loop))
    monkeypatch.setattr(KvCache, "begin", lambda self, *given, **named: (begin(self, *given, **named), poisoned(self)))
    monkeypatch.setattr(KvCache, "begin_alone", lambda self, *given: (begin_alone(self, *given), poisoned(self)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("drafter", ["bushy", "head", "mixed"])
def test_nothing_of_others_is_read(branching, drafter, mode, monkeypatch) -> None:
    """Neither what is dead or after the last row, nor rows of live branches: large finite garbage, equal drafts."""
    branches = [{"prompt": [20 + i, 5], "max_new_tokens": 4 + 5 * i, "temperature": 0.4 * i} for i in range(5)]
    options = {"drafter": drafter, "max_parallel": 3, "ignore_eos": True, "auto_disable": False, "seed": 0}

    def run(*spared: list[int] | None) -> list[tuple[list[int], int, int]]:
        branching.engines.idle.clear()  # the prefix is computed again
        with monkeypatch.context() as patch:
            for each in spared:
                poison(patch, each)
            found = branching.generate_branches([3, 1, 4] * 5, branches, mode=mode, **options)
        return [(each.token_ids, each.stats.accepted, each.stats.drafted) for each in found]

    expected = run()
    assert run(None) == expected
    for place in (0, 3):
        assert run(branches[place]["prompt"])[place] == expected[place]
    branching.engines.idle.clear()
