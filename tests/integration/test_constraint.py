"""Constrained decoding: text of the grammar at any temperature, and the target's own choices where it is free."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plans.errors import RequestError
from runtime import Runtime
from runtime.skeleton.outline import outline_grammar, parse_outline
from runtime.text.constraint import Constraint, Vocabulary
from runtime.text.grammar import DEAD, Grammar, choice, literal, one_of, repeat, sequence
from tests.conftest import TOY_DRAFTERS


def vocabulary_of(runtime: Runtime, grammar: Grammar) -> Vocabulary:
    manifest = runtime.manifest
    return Vocabulary(grammar, runtime.tokenizer, manifest.target.vocab_size, manifest.text.eos_token_ids)


@pytest.fixture(scope="module")
def outlines(toy: Runtime) -> Vocabulary:
    return vocabulary_of(toy, outline_grammar(["search"], most=3))


@settings(max_examples=20, deadline=None)
@given(
    prompt=st.lists(st.integers(1, 299), min_size=1, max_size=20),
    seed=st.integers(0, 99),
    temperature=st.sampled_from([0.0, 1.0, 3.0]),
)
def test_whatever_comes_is_the_beginning_of_an_outline(toy, outlines, prompt, seed, temperature) -> None:
    options = {"max_new_tokens": 100, "temperature": temperature, "seed": seed}
    found = toy.generate(prompt, constraint=Constraint(outlines), **options)
    grammar = outlines.grammar
    state = grammar.follow(0, b"".join(outlines.texts[token] for token in found.token_ids))
    assert state != DEAD
    if found.finish_reason == "stop":
        assert grammar.ends[state]
        parse_outline(found.text)
    again = toy.generate(prompt, constraint=Constraint(outlines), drafter="ngram", **options)
    assert again.token_ids == found.token_ids


def test_a_form_that_allows_everything_changes_nothing(toy: Runtime) -> None:
    free = vocabulary_of(toy, Grammar(repeat(one_of(range(256)))))
    for seed in range(5):
        options = {"max_new_tokens": 40, "temperature": 0.9, "top_p": 0.9, "seed": seed}
        plain = toy.generate([5, 6, 7], drafter="none", **options)
        special = [token for token in plain.token_ids if not free.texts[token] and token != 0]
        found = toy.generate([5, 6, 7], constraint=Constraint(free), **options)
        assert special or found.token_ids == plain.token_ids


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafter", TOY_DRAFTERS)
def test_text_that_keeps_to_a_form_is_drafted(
    toy: Runtime, branch_plan: Path, drafter: str, temperature: float
) -> None:
    """With the tokens of plain decoding, alone and beside others."""
    wide = [*range(0x20, 0x7F), *range(0xA0, 0x100)]
    allowed = list(b"abc ") if drafter in ("ngram", "short") else wide  # n-grams foresee what comes again
    constraint = Constraint(vocabulary_of(toy, Grammar(repeat(one_of(allowed)))))
    options = {"constraint": constraint, "max_new_tokens": 90, "temperature": temperature, "auto_disable": False}
    prompts = [[(37 * i + place) % 299 + 1 for i in range(20)] for place in range(4)]
    expected = [toy.generate(prompt, drafter="none", **options).token_ids for prompt in prompts]
    found = [toy.generate(prompt, drafter=drafter, **options) for prompt in prompts]
    assert [each.token_ids for each in found] == expected
    assert sum(each.stats.accepted for each in found) > 0 or drafter == "short"  # which is hardly ever right
    together = Runtime.load(branch_plan, threads=1)
    assert [each.token_ids for each in together.generate(prompts, drafter=drafter, **options)] == expected
    together.close()


def test_a_choice_is_the_likeliest_that_may_come(toy: Runtime) -> None:
    words = [" import", "return", "zebra"]
    vocabulary = vocabulary_of(toy, Grammar(choice(*map(literal, words))))
    found = toy.generate("x =", constraint=Constraint(vocabulary), max_new_tokens=20)
    assert found.text in words
    assert found.finish_reason == "stop"
    session = toy.session()
    stream = session.stream("x =", max_new_tokens=1, drafter="none", ignore_eos=True)
    next(stream)
    logits = session.step_logits(0)
    first = vocabulary.mask(0)
    assert found.token_ids[0] == int(np.argmax(np.where(first, logits, -np.inf)))


def test_what_cannot_be_kept_to_is_refused(toy: Runtime) -> None:
    with pytest.raises(RequestError, match="constraint is a str; pass a LogitsRule"):
        toy.generate([1], constraint="json")
    ended = vocabulary_of(toy, Grammar(sequence(literal("a"), one_of([]))))
    with pytest.raises(RequestError, match="allows no token"):
        toy.generate([1], constraint=Constraint(ended), max_new_tokens=5)


def test_one_constraint_serves_any_number_of_texts(toy: Runtime, branch_plan: Path) -> None:
    constraint = Constraint(vocabulary_of(toy, Grammar(repeat(one_of(range(0x20, 0x7F))))))
    options = {"max_new_tokens": 12, "constraint": constraint}
    expected = [toy.generate([5, place], **options).token_ids for place in range(4)]
    assert [toy.generate([5, place], **options).token_ids for place in range(4)] == expected
    branches = Runtime.load(branch_plan, threads=1)
    found = branches.generate([[5, place] for place in range(4)], **options)
    assert [each.token_ids for each in found] == expected
    found = branches.generate_branches([5], [[place] for place in range(4)], **options)
    assert [each.token_ids for each in found] == expected
    branches.close()
