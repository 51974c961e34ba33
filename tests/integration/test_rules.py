"""Rules over logits and the options that make them: against a plain account of each, with any drafter and company."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
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

from outrider import Runtime
from outrider.plans import names
from outrider.plans.errors import RequestError
from outrider.runtime.drafters.base import Draft
from outrider.runtime.drafters.engine import EngineDrafter
from outrider.runtime.generation import Span
from outrider.runtime.options.options import Options
from outrider.runtime.text.rules import LogitsRule
from outrider.runtime.text.token_rules import token_sequences
from tests.conftest import REJECTING, TOY_DRAFTERS
from tests.integration.shifting_rule import Shifting

PROMPTS = [[(37 * i + place) % 299 + 1 for i in range(20)] for place in range(4)]


class Stuck(LogitsRule):
    """Allows no token after `count`."""

    def __init__(self, count: int) -> None:
        self._count = count

    def apply(self, logits: NDArray[np.float32], path: Sequence[int]) -> None:
        if len(path) >= self._count:
            raise RequestError("There is no token.")


class Spelled(LogitsRule):
    """Allows one text alone, and knows it; of `wrong`, what it says is forced is not what it allows."""

    def __init__(self, tokens: Sequence[int], *, wrong: bool = False) -> None:
        self._tokens, self._wrong = list(tokens), wrong

    def apply(self, logits: NDArray[np.float32], path: Sequence[int]) -> None:
        kept = logits[self._tokens[len(path)]]
        logits[:] = -np.inf
        logits[self._tokens[len(path)]] = kept

    def forced(self, path: Sequence[int], limit: int) -> Sequence[int]:
        return [7] * limit if self._wrong else self._tokens[len(path) :]


def asked(**more: Any) -> Options:
    found = {"max_new_tokens": 40, "ignore_eos": True, "auto_disable": False, "seed": 0, "constraint": Shifting()}
    return Options(**found | more)  # type: ignore[typeddict-item]


@pytest.mark.parametrize("drafter", ["none", "chain", "bushy"])
def test_log_probabilities_are_the_models_own(toy: Runtime, drafter: str) -> None:
    options = asked(logprobs=2, max_new_tokens=12)
    found = toy.generate(PROMPTS[0], drafter=drafter, **options)
    for count, entry in enumerate(found.logprobs):
        prompt = PROMPTS[0] + found.token_ids[:count]
        (free,) = toy.generate(prompt, drafter="none", max_new_tokens=1, logprobs=2, ignore_eos=True).logprobs
        assert entry.top == free.top
    assert any(entry.token_id != entry.top[0][0] for entry in found.logprobs)


@pytest.mark.parametrize("drafter", REJECTING)
def test_rejection(everything: Runtime, drafter: str) -> None:
    """The rules hold at any temperature; greedy tokens are those of plain decoding."""
    expected, found = (everything.generate(PROMPTS[0], **asked(drafter=name)) for name in ("none", drafter))
    assert found.token_ids == expected.token_ids
    assert found.stats.accepted > 0 or drafter in ("classical-head", "classical-block")  # random, so never right
    tokens = everything.generate(PROMPTS[0], **asked(drafter=drafter, temperature=1.0, seed=9)).token_ids
    for count, token in enumerate(tokens):
        row = np.zeros(300, np.float32)
        Shifting().apply(row, tokens[:count])
        assert np.isfinite(row[token])


@pytest.mark.parametrize("drafter", ["none", *TOY_DRAFTERS, *REJECTING])
@pytest.mark.parametrize("count", [0, 1, 6])
def test_where_no_token_may_follow_the_generation_ends_after_those_before(
    serving: Runtime, drafter: str, count: int
) -> None:
    free = serving.generate(PROMPTS[1], **asked(drafter="none", constraint=None)).token_ids
    options = asked(drafter=drafter, constraint=Stuck(count))
    with serving.session() as session:
        assert _tokens_until_stuck(session.stream(PROMPTS[1], **options)) == free[:count]
        rest = session.generate([], **asked(drafter=drafter, constraint=None, max_new_tokens=10))
        assert rest.token_ids == free[count : count + 10]
    handles = serving.submit_all([(PROMPTS[1], options), (PROMPTS[1], asked(drafter=drafter, constraint=None))])
    assert _tokens_until_stuck(handles[0]) == free[:count]
    assert handles[1].result(60).token_ids == free


def _tokens_until_stuck(spans: Iterable[Span]) -> list[int]:
    found: list[int] = []
    with pytest.raises(RequestError, match=r"There is no token\."):
        found.extend(token for span in spans for token in span.token_ids)
    return found


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("drafter", [*TOY_DRAFTERS, *REJECTING])
def test_tokens_that_a_rule_forces_are_drafted(serving: Runtime, drafter: str, wrong: bool) -> None:
    spelled = [(11 * place) % 290 + 1 for place in range(30)]
    options = asked(drafter=drafter, constraint=Spelled(spelled, wrong=wrong), max_new_tokens=30)
    alone = serving.generate(PROMPTS[0], **options)
    assert alone.token_ids == spelled
    assert (alone.stats.rounds < 8) == (not wrong and drafter not in REJECTING)
    free = asked(drafter=drafter, constraint=None)
    found = [handle.result(60) for handle in serving.submit_all([(PROMPTS[0], options), (PROMPTS[1], free)] * 2)]
    assert [each.token_ids for each in found[::2]] == [spelled] * 2
    expected = serving.generate(PROMPTS[1], **free).token_ids
    assert [each.token_ids for each in found[1::2]] == [expected] * 2
    rest = serving.generate(PROMPTS[0], **asked(drafter="none", constraint=Spelled(spelled), max_new_tokens=30))
    assert rest.stats.rounds == 30  # plain decoding stays plain


@pytest.mark.parametrize("drafter", ["none", "chain", "bushy"])
def test_kv_that_is_not_finite_is_computed_again(toy: Runtime, drafter: str) -> None:
    session, other = toy.session(), toy.session()
    for each in (session, other):
        each.generate(PROMPTS[0], **asked(drafter=drafter, max_new_tokens=10))
    session.buffers.array(names.TARGET, names.KV)[:] = np.nan
    found, expected = (each.generate([5], **asked(drafter=drafter)).token_ids for each in (session, other))
    assert found == expected


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
    "bias": (
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


def asked_for(own: dict[str, Any], **more: Any) -> Options:
    found = {"max_new_tokens": LENGTH, "ignore_eos": True, "auto_disable": False, **own, **more}
    return Options(**found)  # type: ignore[typeddict-item]


def raw_logits(runtime: Runtime, tokens: list[int]) -> Row:
    session = runtime.session()
    next(session.stream(tokens, drafter="none", max_new_tokens=1, ignore_eos=True))
    return session.step_logits(0).copy()


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_a_plain_account(toy: Runtime, case: str) -> None:
    own, oracle = CASES[case]
    found = toy.generate(PROMPT, **asked_for(own)).token_ids
    expected: list[int] = []
    while len(expected) < LENGTH and (END not in expected or "min_tokens" not in own):
        logits = oracle(raw_logits(toy, PROMPT + expected), PROMPT, expected)
        expected.append(int(logits.argmax()))
    assert found == expected
    assert found != toy.generate(PROMPT, **asked_for({})).token_ids
    assert ("min_tokens" in own) == (len(found) == 31)


@pytest.mark.parametrize("length", [1, 2])
def test_bad_words_do_not_come(toy: Runtime, length: int) -> None:
    """And of the other tokens, the likeliest does."""
    free, tokenizer = toy.generate(PROMPT, drafter="none", **asked_for({})).token_ids, toy.tokenizer
    pieces = [free[i : i + length] for i in range(LENGTH - length)]
    words = [(tokenizer.decode(piece), piece) for piece in pieces]
    word = next(w for w, piece in words if w.strip() == w and tokenizer.encode(w, add_special_tokens=False) == piece)
    sequences = token_sequences([word, "import"], tokenizer)
    assert length in {len(sequence) for sequence in sequences}
    expected: list[int] = []
    while len(expected) < LENGTH:
        logits = raw_logits(toy, PROMPT + expected)
        for sequence in sequences:
            if expected[len(expected) - len(sequence) + 1 :] == sequence[:-1]:
                logits[sequence[-1]] = -np.inf
        expected.append(int(logits.argmax()))
    assert expected != free
    for drafter in ("none", "chain", "bushy"):
        assert toy.generate(PROMPT, drafter=drafter, **asked_for({"bad_words": [word, "import"]})).token_ids == expected


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
    whole = toy.generate(PROMPT, drafter="none", **asked_for({}))
    token_texts = [toy.tokenizer.decode([token]) for token in whole.token_ids]
    stop = next(text for text in token_texts[3:] if text.isascii() and text in whole.text)
    first = next(i for i in range(LENGTH) if stop in "".join(token_texts[: i + 1]))
    ended, held, later, never = (
        toy.generate(PROMPT, **asked_for({"stop": [stop], "min_tokens": least}, drafter=drafter))
        for least in (0, first, first + 1, LENGTH)
    )
    assert ended.token_ids == held.token_ids == whole.token_ids[: first + 1]
    assert later.token_ids[: first + 1] == ended.token_ids
    assert len(later.token_ids) > first + 1
    assert stop in later.text
    assert (never.token_ids, never.text) == (whole.token_ids, whole.text)


def test_penalties_count_the_generated_tokens_of_this_turn(toy: Runtime) -> None:
    """The turns before are prompt, of which the repetition penalty alone takes note."""
    for own in ({"frequency_penalty": 1.0}, {"repetition_penalty": 1.4}):
        with toy.session() as session:
            first = session.generate(PROMPT, **asked_for(own, max_new_tokens=10)).token_ids
            second = session.generate([33], **asked_for(own, max_new_tokens=10)).token_ids
        assert second == toy.generate([*PROMPT, *first, 33], **asked_for(own, max_new_tokens=10)).token_ids


@pytest.mark.parametrize("error", [KeyError, SystemExit])
def test_what_a_function_of_a_request_raises_ends_it_alone(serving: Runtime, error: type[BaseException]) -> None:
    """Of any class: an exit would end the thread that serves all."""

    def fails(path: list[int], logits: Row) -> None:
        if len(path) == 4:
            raise error("x")

    def watches(round: object) -> None:
        raise error("x")

    others = serving.generate(PROMPT, **asked_for({}))
    own: list[dict[str, Any]] = [{"logits_processors": [fails]}, {"on_round": watches}, {}]
    handles = serving.submit_all([(PROMPT, asked_for(each)) for each in own])
    for handle, name in zip(handles, (r"logits_processors\[0\]", "on_round"), strict=False):
        with pytest.raises(RequestError, match=f"{name} failed: {error.__name__}: '?x"):
            handle.result(60)
    assert handles[2].result(60).token_ids == others.token_ids


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
def test_what_a_processor_returns_is_checked(toy: Runtime, processor: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        toy.generate(PROMPT, drafter="chain", **asked_for({"logits_processors": [processor]}))


class Literal(LogitsRule):
    """Forces some tokens after the first three."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens

    def apply(self, logits: NDArray[np.float32], path: Sequence[int]) -> None:
        for token in self.forced(path, 1):
            logits[:] = np.where(np.arange(len(logits)) == token, logits, -np.inf)

    def forced(self, path: Sequence[int], limit: int) -> Sequence[int]:
        place = len(path) - 3
        return self._tokens[place : place + limit] if place >= 0 else ()


@pytest.mark.usefixtures("run_ahead")
def test_a_head_drafts_again_after_tentative_tokens_that_were_all_forced(
    everything: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafted, draft = list[bool](), EngineDrafter.draft_in_place

    def noted(*given: Any) -> Draft | None:
        found = draft(*given)
        drafted.append(found is not None)
        return found

    monkeypatch.setattr(EngineDrafter, "draft_in_place", noted)
    options = asked(drafter="head", partial_kv="lossless", constraint=Literal(range(30, 42)), max_new_tokens=60)
    assert everything.generate((PROMPTS[1] * 99)[:70], **options).stats.partial_rounds > 0
    assert len(drafted) > 20
    assert all(drafted)


@pytest.mark.usefixtures("run_ahead")
@pytest.mark.parametrize("drafter", ["none", "ngram", "bushy", "head"])
def test_lossless_partial_kv(everything: Runtime, drafter: str) -> None:
    """A tentative token is chosen under the rules too; where none may follow, the full KV cache decides."""
    prompt = (PROMPTS[1] * 99)[:90]
    free = everything.generate(prompt, **asked(drafter="none", partial_kv="off")).token_ids
    found = everything.generate(prompt, **asked(drafter=drafter, partial_kv="lossless"))
    assert found.token_ids == free
    assert found.stats.partial_rounds > 0
    for count in (1, 9, 20):
        stream = everything.stream(prompt, **asked(drafter=drafter, partial_kv="lossless", constraint=Stuck(count)))
        plain = everything.generate(prompt, **asked(drafter="none", partial_kv="off", constraint=None)).token_ids
        assert _tokens_until_stuck(stream) == plain[:count]
