"""A head after n-grams: rounds that n-grams draft cost it nothing, and it drafts as if it had seen each of them."""

from __future__ import annotations

import pytest

from outrider import Runtime
from outrider.plans import names
from outrider.runtime.drafters.engine import EngineDrafter
from outrider.runtime.options.options import Options
from outrider.runtime.trace import Node, Round
from tests.integration.long_context import prompt

OPTIONS = Options(max_new_tokens=90, ignore_eos=True, auto_disable=False, temperature=0.8, seed=4)


def drafts(runtime: Runtime, drafter: str) -> tuple[list[int], list[list[Node]], int]:
    """Tokens, what each round has drafted, and how often the head took features in apart from a draft."""
    rounds: list[Round] = []
    session = runtime.session()
    program = session.programs[names.extend("head")]
    runs, original = 0, program.run

    def count() -> None:
        nonlocal runs
        runs += 1
        original()

    program.run = count  # type: ignore[method-assign,assignment]
    try:
        found = session.generate(prompt(2, 60), drafter=drafter, on_round=rounds.append, **OPTIONS)
    finally:
        program.run = original  # type: ignore[method-assign]
    return found.token_ids, [each.nodes for each in rounds], runs


def test_it_drafts_as_if_it_had_seen_each_round(toy: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, waited, runs = drafts(toy, "mixed")
    with monkeypatch.context() as patch:
        patch.setattr(EngineDrafter, "skip_round", EngineDrafter.sync)
        expected, seen, often = drafts(toy, "mixed")
    assert tokens == expected
    assert waited == seen
    assert 3 == runs < often  # the prompt's, 60 tokens in parts of 16; the last one drafts


def test_where_there_is_no_room_it_takes_them_in(toy: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, waited, runs = drafts(toy, "mixed")
    monkeypatch.setattr("outrider.runtime.drafters.kept_features.KeptFeatures.keep", lambda self, rows: None)
    without, same, often = drafts(toy, "mixed")
    assert (tokens, waited) == (without, same)
    assert runs < often
