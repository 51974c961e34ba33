"""Options that change logits: each against a plain account of what it means, and with drafts as without them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from outrider import Runtime, SchedulerConfig
from outrider.plans.errors import RequestError
from outrider.runtime.options.options import Options
from outrider.runtime.text.token_rules import token_sequences
from tests.conftest import TOY_DRAFTERS

Row = NDArray[np.float32]
Oracle = Callable[[Row, list[int], list[int]], Row]  # of raw logits, the prompt, and the tokens generated so far

PROMPT = [5, 6, 7, 8, 5, 6, 7, 9, 30, 31, 32]
LENGTH = 40
END = 0  # the toy's end token
BIASES = {**dict.fromkeys(range(40, 60), 4.0), 12: -100.0, 13: 2.5, 14: 100.0}
ALLOWED = [*list(range(20, 90)), END]


def add_penalties(logits: Row, path: list[int], frequency: float, presence: float) -> Row:
    logits = logits.copy()
    for token, count in Counter(path).items():
        logits[token] -= np.float32(frequency) * np.float32(count)
        logits[token] -= np.float32(presence)
    return logits


def bias(logits: Row, prompt: list[int], path: list[int]) -> Row:
    logits = logits.copy()
    for token, value in BIASES.items():
        logits[token] += np.float32(value)
    return logits


def allow(logits: Row, prompt: list[int], path: list[int]) -> Row:
    return np.where(np.isin(np.arange(len(logits)), ALLOWED), logits, -np.inf).astype(np.float32)


def favour_even(path: list[int], logits: Row) -> Row:
    return logits + np.where(np.arange(len(logits)) % 2 == len(path) % 2, 3, 0)


def lower_the_last(path: list[int], logits: Row) -> None:
    logits[path[-3:]] -= 5


def process(logits: Row, prompt: list[int], path: list[int]) -> Row:
    logits = np.asarray(favour_even(path, logits), np.float32)
    lower_the_last(path, logits)
    return logits


def by(processor: LogitsProcessor) -> Oracle:
    """What a processor of transformers makes of the logits after the prompt and the generated tokens."""

    def apply(logits: Row, prompt: list[int], path: list[int]) -> Row:
        made = processor(torch.tensor([[*prompt, *path]]), torch.from_numpy(logits.copy())[None])
        return np.asarray(made[0].numpy(), np.float32)

    return apply


CASES: dict[str, tuple[dict[str, Any], Oracle]] = {
    "presence": ({"presence_penalty": 1.5}, lambda logits, _, path: add_penalties(logits, path, 0, 1.5)),
    "rewarded": ({"presence_penalty": -2.0}, lambda logits, _, path: add_penalties(logits, path, 0, -2.0)),
    "frequency": ({"frequency_penalty": 0.7}, lambda logits, _, path: add_penalties(logits, path, 0.7, 0)),
    "repetition": ({"repetition_penalty": 1.3}, by(RepetitionPenaltyLogitsProcessor(1.3))),
    "repeating": ({"repetition_penalty": 0.6}, by(RepetitionPenaltyLogitsProcessor(0.6))),
    "penalties": (
        {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": 0.3},
        lambda logits, prompt, path: add_penalties(
            by(RepetitionPenaltyLogitsProcessor(1.2))(logits, prompt, path), path, 0.4, 0.3
        ),
    ),
    "bias": ({"logit_bias": BIASES}, bias),
    "bias as transformers has it": (
        {"logit_bias": {str(token): value for token, value in BIASES.items()}},
        by(SequenceBiasLogitsProcessor([[[token], value] for token, value in BIASES.items()])),
    ),
    "allowed": ({"allowed_token_ids": ALLOWED}, allow),
    "min tokens": (
        {"min_tokens": 30, "logit_bias": {END: 100.0}, "ignore_eos": False},
        lambda logits, prompt, path: by(MinNewTokensLengthLogitsProcessor(len(prompt), 30, END, device="cpu"))(
            logits + np.where(np.arange(len(logits)) == END, np.float32(100), np.float32(0)), prompt, path
        ),
    ),
    "processors": ({"logits_processors": [favour_even, lower_the_last]}, process),
    "the order": (
        {"repetition_penalty": 1.5, "presence_penalty": 0.5, "logits_processors": [favour_even], "logit_bias": BIASES},
        lambda logits, prompt, path: add_penalties(
            by(RepetitionPenaltyLogitsProcessor(1.5))(
                np.asarray(favour_even(path, bias(logits, prompt, path)), np.float32), prompt, path
            ),
            path,
            0,
            0.5,
        ),
    ),
}


def asked(own: dict[str, Any], **more: Any) -> Options:
    found = {"max_new_tokens": LENGTH, "ignore_eos": True, "auto_disable": False, **own, **more}
    return Options(**found)  # type: ignore[typeddict-item]


def raw_logits(runtime: Runtime, tokens: list[int]) -> Row:
    session = runtime.session()
    next(session.stream(tokens, drafter="none", max_new_tokens=1, ignore_eos=True))
    return session.step_logits(0).copy()


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_a_plain_account(toy: Runtime, case: str) -> None:
    own, oracle = CASES[case]
    found = toy.generate(PROMPT, **asked(own)).token_ids
    expected: list[int] = []
    while len(expected) < LENGTH and (END not in expected or "min_tokens" not in own):
        logits = oracle(raw_logits(toy, PROMPT + expected), PROMPT, expected)
        expected.append(int(logits.argmax()))
    assert found == expected
    assert found != toy.generate(PROMPT, **asked({})).token_ids
    assert ("min_tokens" in own) == (len(found) == 31)


ONE_OTHER = (("batching", 0.0), ("in-one-sequence", 0.0), ("in-one-sequence", 1.0))


@pytest.fixture(scope="module", params=["in-one-sequence", "batching"])
def serving(branch_plan: Path, request: pytest.FixtureRequest) -> Iterator[Runtime]:
    runtime = Runtime.load(branch_plan, threads=1, scheduler=SchedulerConfig(mode=request.param))
    yield runtime
    runtime.close(timeout=60)


@pytest.mark.parametrize(
    ("serving", "temperature"),
    [
        ("batching", 1.0),
        *(pytest.param(mode, t, marks=pytest.mark.long) for mode, t in ONE_OTHER),
    ],
    indirect=["serving"],
)
def test_drafts_and_company_change_nothing(serving: Runtime, toy: Runtime, temperature: float) -> None:
    drafters, others = ["none", *TOY_DRAFTERS], [own for own, _ in CASES.values()]
    accepted, options = 0, Options(temperature=temperature, seed=4)
    expected = [toy.generate(PROMPT, drafter="none", **asked(own, **options)).token_ids for own in others]
    for shift, own in enumerate(others):
        places = [(shift + place) % len(others) for place in range(len(drafters))]
        both = [
            (PROMPT, asked(others[place], drafter=drafter, **options))
            for place, drafter in zip(places, drafters, strict=True)
        ]
        found = [handle.result(120) for handle in serving.submit_all(both)]
        assert [each.token_ids for each in found] == [expected[place] for place in places]
        accepted += sum(each.stats.accepted for each in found)
        alone = toy.generate(PROMPT, drafter=drafters[1 + shift % len(TOY_DRAFTERS)], **asked(own, **options))
        assert alone.token_ids == expected[shift]
    assert accepted > 100


@pytest.mark.parametrize("drafter", ["none", "chain", "bushy"])
@pytest.mark.parametrize("length", [1, 2])
def test_bad_words_do_not_come(toy: Runtime, drafter: str, length: int) -> None:
    """And of the other tokens, the likeliest does."""
    free, tokenizer = toy.generate(PROMPT, drafter="none", **asked({})).token_ids, toy.tokenizer
    pieces = [free[i : i + length] for i in range(LENGTH - length)]
    words = [tokenizer.decode(piece) for piece in pieces]
    word = next(
        word
        for word, piece in zip(words, pieces, strict=True)
        if word.strip() == word and tokenizer.encode(word, add_special_tokens=False) == piece
    )
    sequences = token_sequences([word, "import"], tokenizer)
    assert length in {len(sequence) for sequence in sequences}
    found = toy.generate(PROMPT, drafter=drafter, **asked({"bad_words": [word, "import"]})).token_ids
    expected: list[int] = []
    while len(expected) < LENGTH:
        logits = raw_logits(toy, PROMPT + expected)
        for sequence in sequences:
            if expected[len(expected) - len(sequence) + 1 :] == sequence[:-1]:
                logits[sequence[-1]] = -np.inf
        expected.append(int(logits.argmax()))
    assert found == expected
    assert found != free


def test_bad_words_are_encoded_with_and_without_a_space(reference: Runtime) -> None:
    tokenizer = reference.tokenizer
    plain, spaced = (tokenizer.encode(text, add_special_tokens=False) for text in ("return", " return"))
    assert token_sequences(["return"], tokenizer) == [plain, spaced]
    assert token_sequences([" return"], tokenizer) == [plain, spaced]
    prompt = "def f(x):\n    if x:\n       "
    free = reference.generate(prompt, max_new_tokens=60).text
    word = next(word for word in ("return", "self", "if") if word in free)
    assert word not in reference.generate(prompt, max_new_tokens=60, bad_words=[word]).text


@pytest.mark.parametrize("drafter", ["none", "chain", "bushy"])
def test_no_stop_string_counts_before_min_tokens(toy: Runtime, drafter: str) -> None:
    """One that a token after them completes does."""
    whole = toy.generate(PROMPT, drafter="none", **asked({}))
    token_texts = [toy.tokenizer.decode([token]) for token in whole.token_ids]
    place = next(i for i in range(3, LENGTH) if token_texts[i].isascii() and token_texts[i] in whole.text)
    stop = token_texts[place]
    first = next(i for i in range(LENGTH) if stop in "".join(token_texts[: i + 1]))
    options = asked({"stop": [stop]}, drafter=drafter)
    ended = toy.generate(PROMPT, **options)
    assert len(ended.token_ids) == first + 1
    held = toy.generate(PROMPT, **options | Options(min_tokens=first))
    assert held.token_ids == ended.token_ids
    later = toy.generate(PROMPT, **options | Options(min_tokens=first + 1))
    assert later.token_ids[: first + 1] == ended.token_ids
    assert len(later.token_ids) > first + 1
    assert stop in later.text
    never = toy.generate(PROMPT, **options | Options(min_tokens=LENGTH))
    assert never.token_ids == whole.token_ids
    assert never.text == whole.text


def test_penalties_count_the_generated_tokens_of_this_turn(toy: Runtime) -> None:
    """The turns before are prompt, of which the repetition penalty alone takes note."""
    for own in ({"frequency_penalty": 1.0}, {"repetition_penalty": 1.4}):
        with toy.session() as session:
            first = session.generate(PROMPT, **asked(own, max_new_tokens=10)).token_ids
            second = session.generate([33], **asked(own, max_new_tokens=10)).token_ids
        assert second == toy.generate([*PROMPT, *first, 33], **asked(own, max_new_tokens=10)).token_ids


@pytest.mark.parametrize("error", [KeyError, SystemExit, KeyboardInterrupt, BaseException])
def test_what_a_function_of_a_request_raises_ends_it_alone(serving: Runtime, error: type[BaseException]) -> None:
    """Of any class: an exit would end the thread that serves all."""

    def fails(path: list[int], logits: Row) -> Row:
        if len(path) == 4:
            raise error("x")
        return logits

    def watches(round: object) -> None:
        raise error("x")

    others = serving.generate(PROMPT, **asked({}))
    own: list[dict[str, Any]] = [{"logits_processors": [fails]}, {"on_round": watches}, {}]
    handles = serving.submit_all([(PROMPT, asked(each)) for each in own])
    for handle, name in zip(handles, (r"logits_processors\[0\]", "on_round"), strict=False):
        with pytest.raises(RequestError, match=f"{name} failed: {error.__name__}: '?x"):
            handle.result(60)
    assert handles[2].result(60).token_ids == others.token_ids


def test_an_exit_in_the_main_thread_stays_one(toy: Runtime) -> None:
    def leaves(path: list[int], logits: Row) -> Row:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        toy.generate(PROMPT, **asked({"logits_processors": [leaves]}))
    assert toy.generate(PROMPT, **asked({})).token_ids


@pytest.mark.parametrize(
    ("processor", "words"),
    [
        (lambda path, logits: logits[:5], r"returned logits of shape \(5,\); return a row of 300"),
        (lambda path, logits: logits * np.nan, "make logits that are no numbers: their maximum is nan"),
        (lambda path, logits: logits + np.inf, "make logits that are no numbers: their maximum is inf"),
        (lambda path, logits: logits - np.inf, "exclude all tokens of the vocabulary"),
        (lambda path, logits: "x", r"logits_processors\[0\] failed: ValueError"),
    ],
)
def test_what_a_processor_returns_is_looked_at(toy: Runtime, processor: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        toy.generate(PROMPT, drafter="chain", **asked({"logits_processors": [processor]}))


def test_they_go_with_full_kv_alone(long: Runtime) -> None:
    with pytest.raises(RequestError, match="partial_kv is 'lossless', and logit_bias goes with full KV alone"):
        long.generate(PROMPT, logit_bias={5: 1.0}, partial_kv="lossless")
    found = long.generate(PROMPT * 5, logit_bias={5: 1.0}, max_new_tokens=20)
    assert found.stats.partial_rounds == 0
