"""Budgets of partial KV: blocks that are retrieved, by plan, request or what was measured."""

from __future__ import annotations

import pytest

from outrider import Runtime
from outrider.runtime.options.request import resolve
from tests.integration.long_context import prompt

pytestmark = pytest.mark.usefixtures("run_ahead")


def test_budgets_change_what_is_retrieved_and_no_token(long: Runtime) -> None:
    tokens, session = prompt(8, 120), long.session()
    expected = long.generate(tokens, max_new_tokens=30, partial_kv="off", ignore_eos=True).token_ids
    seen = set()
    for budget in (1, 2, 3, "auto", None):
        found = session.generate(
            tokens, whole=True, max_new_tokens=30, partial_budget=budget, drafter="chain", ignore_eos=True
        )
        assert found.token_ids == expected
        seen.add(found.stats.retrieved)
        assert isinstance(budget, str) or found.stats.retrieved == (budget or 3)
        assert found.stats.to_json()["agreement"] == found.stats.agreement
    assert {1, 2, 3} <= seen


def test_another_budget_fills_the_cache_anew(long: Runtime) -> None:
    session, tokens = long.session(), prompt(8, 120)
    for budget in (1, 3, 2):
        options = {"max_new_tokens": 1, "drafter": "none", "partial_kv": "lossy", "ignore_eos": True}
        found = session.generate(tokens, whole=True, partial_budget=budget, **options)  # type: ignore[arg-type]
        assert found.stats.retrieved == budget


def test_the_plans_budget_is_that_of_requests_that_do_not_say(long: Runtime) -> None:
    for budget in (None, 2, "auto"):
        plans = long.manifest.partial_kv.model_copy(update={"budget": budget})  # type: ignore[union-attr]
        manifest = long.manifest.model_copy(update={"partial_kv": plans})
        assert resolve({}, manifest, long.grammars).partial_budget == budget
        assert resolve({"partial_budget": 1}, manifest, long.grammars).partial_budget == 1


def test_what_was_measured_holds_for_a_drafter_a_budget_and_a_way_of_sampling(long: Runtime) -> None:
    session, seen = long.session(), []
    for options in (
        {"drafter": "chain"},
        {"drafter": "chain", "seed": 5, "stream_id": 2},
        {"drafter": "ngram"},
        {"drafter": "chain", "partial_budget": 1},
        {"drafter": "chain"},
        {"drafter": "chain", "temperature": 0.5},
    ):
        session.generate(prompt(1, 60), whole=True, max_new_tokens=40, ignore_eos=True, **options)  # type: ignore[arg-type]
        measured = session.loop.parts.partial._intervals._measured
        seen.append(measured[options["drafter"], options.get("partial_budget")].interval)
    assert [seen.index(interval) for interval in seen] == [0, 0, 2, 3, 0, 5]
