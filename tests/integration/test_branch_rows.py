"""Where rows of branches lie: moved over dead ones, in rectangles, found in the cache; nobody reads another's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider import PrefixCacheConfig, Runtime
from outrider.plans import names
from outrider.runtime.branch_request import MODES
from outrider.runtime.execution.program import Program
from outrider.runtime.kv import cache as cache_module
from outrider.runtime.kv.cache import KvCache
from outrider.runtime.kv.slots import EMPTY, SHARED
from outrider.runtime.stats import Stats
from outrider.runtime.step_loop import StepLoop
from tests.integration.test_branches import BRANCH, DRAFTERS, alone


@pytest.fixture(scope="module")
def branching(branch_plan: Path) -> Runtime:
    return Runtime.load(branch_plan, threads=1)


@pytest.mark.parametrize("drafter", ["chain", "head"])
def test_a_drafter_catches_up_with_long_beginnings_over_dead_rows(branching, drafter, monkeypatch) -> None:
    """After rows of a branch that is over, and never beyond the keys that its engine can see."""
    run, most = Program.run, 0

    def watched(self: Program) -> None:
        nonlocal most
        kind, _, name = self.name.partition(".")
        if name == drafter and kind in ("extend", "draft", "speculate"):
            (own,) = (engine.drafting.engine_drafters[name] for engine in branching.engines.loops)
            step = own._step
            reach = 0 if kind == "extend" else step.reach
            assert own.cache.length + step.new_tokens + reach <= step.largest_view
            most = max(most, step.new_tokens)
        run(self)

    monkeypatch.setattr(Program, "run", watched)
    long = [(11 * i) % 299 + 1 for i in range(150)]
    branches = [
        {"prompt": long[:138], "max_new_tokens": 4, "predicted_tokens": 9},  # there is no room for another beside it
        {"prompt": long[:125], "max_new_tokens": 2, "predicted_tokens": 5},
        {"prompt": long[20:145], "max_new_tokens": 2, "predicted_tokens": 5},
    ]
    options = {"drafter": drafter, "ignore_eos": True}
    found = branching.generate_branches([3, 4], branches, **options)
    assert most > branching.manifest.target.prefill_chunk
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


@pytest.fixture
def rectangular(branching, monkeypatch):
    """The same plan, whose batches are laid out as rectangles; every step is looked at."""
    runtime = Runtime.load(branching._plan.root, threads=1)
    shapes = set()

    class Rectangular(StepLoop):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, padded=True, **options)
            for name in (names.DECODE, names.VERIFY):
                self._check(self.programs[name])

        def _check(self, program: Program) -> None:
            run = program.run

            def checked() -> None:
                step, rows = self.target_step, self.cache._used
                counts = np.diff(step.row_splits[: rows + 1])
                assert len(set(counts)) == 1
                assert len(set(step.past_length[:rows])) == 1
                alignment = self.cache.alignment
                assert alignment is not None
                assert alignment.cache_length == step.past_length[0]
                valid = [int((slots.owners != EMPTY).sum()) for slots in self.cache.tables[:rows]]
                live = sorted(each.number for each in self.sequences)
                assert [alignment.valid_lengths[row] for row in live] == [valid[row] for row in live]
                shapes.add((rows, counts[0]))
                run()

            monkeypatch.setattr(program, "run", checked)

    monkeypatch.setattr("outrider.runtime.step_loop_pool.StepLoop", Rectangular)
    runtime.engines.idle.clear()
    yield runtime
    assert any(rows > 1 and width > 1 for rows, width in shapes)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prefix=st.lists(st.integers(1, 299), min_size=1, max_size=30),
    branches=st.lists(BRANCH, min_size=1, max_size=7),
    parallel=st.integers(1, 5),
)
def test_a_rectangle_gives_what_ragged_rows_give(branching, rectangular, prefix, branches, parallel) -> None:
    """Rows padded on the left, slots padded to the longest row's: what engines need that take no ragged rows."""
    options = {"mode": "batching", "max_parallel": parallel, "ignore_eos": True}
    ragged = branching.generate_branches(prefix, branches, **options)
    padded = rectangular.generate_branches(prefix, branches, **options)
    assert [generation.token_ids for generation in padded] == [generation.token_ids for generation in ragged]


def poison(monkeypatch: pytest.MonkeyPatch, spared: list[int] | None) -> None:
    """From now on no slot holds anything of use when a step begins, of any model, but those that it may read.

    Those are the prefix's, and of all live branches; with `spared`, of the one alone whose tokens begin with these.
    """
    engines: list[StepLoop] = []
    step = StepLoop.step

    def noted(self: StepLoop, *arguments: Any) -> Any:
        engines[:] = [self]
        return step(self, *arguments)

    def poisoned(cache: KvCache) -> None:
        kv, live = cache._buffers.array(cache._model, "kv"), engines[0].sequences if engines else []
        mine = [each.number for each in live if spared is None or each.tokens[each.shared :][: len(spared)] == spared]
        for row, slots in enumerate(cache._rows):
            others = ~np.isin(slots.owners, [*mine, SHARED])
            kv[:, row][:, :, np.flatnonzero(others)] = 1e30
            kv[:, row][:, :, slots.length :] = -1e30

    begin, begin_alone = KvCache.begin, KvCache.begin_alone
    monkeypatch.setattr(StepLoop, "step", noted)
    monkeypatch.setattr(KvCache, "begin", lambda self, *given: (begin(self, *given), poisoned(self)))
    monkeypatch.setattr(KvCache, "begin_alone", lambda self, *given: (begin_alone(self, *given), poisoned(self)))


@pytest.mark.parametrize("mode", [pytest.param("in-one-sequence", marks=pytest.mark.long), "batching"])
def test_nothing_of_others_is_read(branching, mode, monkeypatch) -> None:
    """Neither what is dead or after the last row, nor rows of live branches: large finite garbage, equal bits."""
    prefix = [3, 1, 4] * 5
    branches = [
        {"prompt": [20 + i, 5], "max_new_tokens": 4 + 5 * i, "drafter": drafter, "logprobs": 3, "temperature": 0.8}
        for i, drafter in enumerate(DRAFTERS)
    ]

    def run() -> list[Any]:
        branching.engines.idle.clear()  # the prefix is computed again
        return branching.generate_branches(
            prefix, branches, mode=mode, max_parallel=4, ignore_eos=True, auto_disable=False, seed=0
        )

    expected = run()
    with monkeypatch.context() as patch:
        poison(patch, None)
        for found, clean in zip(run(), expected, strict=True):
            assert (found.token_ids, found.logprobs) == (clean.token_ids, clean.logprobs)
            assert (found.stats.accepted, found.stats.drafted) == (clean.stats.accepted, clean.stats.drafted)
    for place, branch in enumerate(branches):
        with monkeypatch.context() as patch:
            poison(patch, branch["prompt"])
            found = run()[place]
        assert (found.token_ids, found.logprobs) == (expected[place].token_ids, expected[place].logprobs)
    branching.engines.idle.clear()


def test_a_rectangle_never_exceeds_a_step(rectangular, branching) -> None:
    """Sixteen rows of long beginnings: each is padded to the longest, so that fewer tokens go in at once."""
    branches = [{"prompt": [7 + i] * (14 - i % 3), "max_new_tokens": 6} for i in range(16)]
    for drafter in ("none", "ngram", "bushy"):
        options = {"mode": "batching", "drafter": drafter, "ignore_eos": True}
        for place, found in enumerate(rectangular.generate_branches([5] * 16, branches, **options)):
            expected = alone(branching, [5] * 16, branches[place], place, drafter=drafter, ignore_eos=True)
            assert found.token_ids == expected.token_ids


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
