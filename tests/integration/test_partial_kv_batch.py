"""Partial KV for the rows of a batch: each has a partial cache of its own, and lossless mode changes no token."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider import PrefixCacheConfig, Runtime, SchedulerConfig
from outrider.plans.errors import RequestError
from outrider.runtime.options.options import Options
from tests.conftest import TOY_DRAFTERS
from tests.integration.long_context import prompt

pytestmark = pytest.mark.usefixtures("run_ahead")

LENGTHS = (75, 40, 60, 20)  # the last one's context grows until partial KV pays


@pytest.fixture(scope="module")
def plan(everything_plan: Path) -> Path:
    return everything_plan


@pytest.fixture(scope="module")
def rows(everything: Runtime) -> Runtime:
    return everything


def asked(seed: int, length: int, drafter: str = "none") -> Options:
    return Options(
        drafter=drafter, temperature=0.9 * (seed % 2), seed=seed, max_new_tokens=150 - length, ignore_eos=True,
        auto_disable=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def expected(rows: Runtime) -> list[list[int]]:
    """Tokens of the target alone, over the full cache."""
    return [
        rows.generate(prompt(seed, length), partial_kv="off", **asked(seed, length)).token_ids
        for seed, length in enumerate(LENGTHS)
    ]


@pytest.mark.parametrize("drafter", ["none", *TOY_DRAFTERS])
def test_lossless_mode_changes_no_token_of_any_row(rows: Runtime, expected: list[list[int]], drafter: str) -> None:
    requests = [
        (prompt(seed, length), Options(partial_kv="lossless", **asked(seed, length, drafter)))  # type: ignore[misc]
        for seed, length in enumerate(LENGTHS)
    ]
    for handle, tokens in zip(rows.submit_all(requests), expected, strict=True):
        found = handle.result()
        assert found.token_ids == tokens
        assert found.stats.partial_rounds > found.stats.refreshes > 0
        assert found.stats.agreed + found.stats.retracted > 0


def test_rows_with_and_without_partial_kv_and_every_drafter_share_passes(
    rows: Runtime, expected: list[list[int]]
) -> None:
    for shift in range(4):
        requests = []
        for seed, length in enumerate(LENGTHS):
            drafter = ["head", "ngram", "none", "sure"][(seed + shift) % 4]
            mode = "off" if (seed + shift) % 3 == 0 else "lossless"
            requests.append((prompt(seed, length), Options(partial_kv=mode, **asked(seed, length, drafter))))  # type: ignore[misc, typeddict-item]
        found = [handle.result() for handle in rows.submit_all(requests)]
        assert [each.token_ids for each in found] == expected
        assert sum(each.stats.partial_rounds > 0 for each in found) >= 2


def test_passes_over_the_partial_cache_change_no_token_of_a_head_accepted_by_rejection(rows: Runtime) -> None:
    """By rejection, tokens depend on every draft, and a head drafts from the features of the pass before."""
    options = Options(drafter="classical-head", temperature=1.0, max_new_tokens=40, ignore_eos=True)
    alone = [rows.generate(prompt(seed, 27), seed=seed, **options).token_ids for seed in range(4)]
    company = Options(partial_kv="lossless", **asked(0, 75))  # type: ignore[misc]
    requests = [(prompt(0, 75), company), *((prompt(seed, 27), Options(seed=seed, **options)) for seed in range(4))]  # type: ignore[misc]
    first, *found = rows.submit_all(requests)
    assert [handle.result().token_ids for handle in found] == alone
    assert first.result().stats.partial_rounds > 0  # once the others were over


def test_lossy_rows_read_their_own_partial_caches(rows: Runtime) -> None:
    """A lossy row has the tokens that it has alone where its prompt is fed in the same chunks: nobody drafts, and both
    are asked for at once, so that the second prompt goes in after the first, before the first row's next full pass."""
    lengths = (64, 48)
    options = Options(max_new_tokens=50, drafter="none", ignore_eos=True)
    alone = [rows.generate(prompt(8, length), partial_kv="lossy", **options) for length in lengths]
    full = [rows.generate(prompt(8, length), partial_kv="off", **options).token_ids for length in lengths]
    lossy = Options(partial_kv="lossy", **options)  # type: ignore[misc]
    found = rows.submit_all([(prompt(8, length), lossy) for length in lengths])
    for handle, one, whole in zip(found, alone, full, strict=True):
        result = handle.result()
        assert result.stats.partial_rounds > result.stats.refreshes > 0
        assert result.token_ids == one.token_ids != whole


def test_rows_with_a_prefix_cache(plan: Path, expected: list[list[int]]) -> None:
    cached = Runtime.load(plan, threads=1, prefix_cache=PrefixCacheConfig())
    requests = [
        (prompt(seed, length), Options(partial_kv="lossless", **asked(seed, length, "head")))  # type: ignore[misc]
        for seed, length in enumerate(LENGTHS)
    ]
    for _ in range(2):
        found = [handle.result() for handle in cached.submit_all(requests)]
        assert [each.token_ids for each in found] == expected
    assert all(each.stats.reused_tokens >= length - 2 for each, length in zip(found, LENGTHS, strict=True))


def test_sequences_that_share_a_row_read_the_full_cache(plan: Path, rows: Runtime, expected: list[list[int]]) -> None:
    shared = Runtime.load(plan, threads=1, scheduler=SchedulerConfig(mode="in-one-sequence"))
    with pytest.raises(RequestError, match="partial_kv is 'lossy', and sequences that share a row"):
        shared.submit(prompt(0, 60), partial_kv="lossy")
    with pytest.raises(RequestError, match="Branch 0: partial_kv is 'lossless', and sequences that share a row"):
        rows.generate_branches(prompt(0, 60), [[1]], partial_kv="lossless")
    found = shared.submit(prompt(0, LENGTHS[0]), **asked(0, LENGTHS[0], "head")).result()
    assert found.token_ids == expected[0]
    assert found.stats.partial_rounds == 0


def test_drafters_by_rejection_read_the_full_cache(rows: Runtime) -> None:
    with pytest.raises(RequestError, match="accepted by rejection"):
        rows.generate(prompt(0, 60), drafter="classical", partial_kv="lossless")
    found = rows.generate(prompt(0, 60), drafter="classical", max_new_tokens=50, ignore_eos=True)
    assert found.stats.partial_rounds == 0
    assert found.stats.drafted > 0
    plain = rows.generate(
        prompt(0, 60), drafter="none", max_new_tokens=50, ignore_eos=True, partial_kv="lossless", auto_disable=False
    )
    assert plain.stats.partial_rounds > 0
    assert plain.token_ids == found.token_ids
