"""Options that change the target's logits, checked, as the rules of a request.

Their names and meanings are those of OpenAI's API and of vLLM. The rules are applied in the order of vLLM's sampler:

1. `structured_outputs`, then `constraint`;
2. `allowed_token_ids`;
3. `bad_words`;
4. `min_tokens`;
5. `logit_bias`;
6. `logits_processors`, in their order;
7. `repetition_penalty`, `frequency_penalty`, `presence_penalty`.

Temperature and filters come behind them. Log-probabilities are those of the logits before them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import TypedDict, cast

import numpy as np

from outrider.plans.errors import RequestError
from outrider.plans.text_check import check_text
from outrider.runtime.numbers import as_real, shown
from outrider.runtime.text.bad_words import BadWords, token_sequences
from outrider.runtime.text.grammars import Grammars
from outrider.runtime.text.penalties import Penalties
from outrider.runtime.text.processors import LogitsProcessor, Processor
from outrider.runtime.text.rules import LogitsRule
from outrider.runtime.text.structured_outputs import StructuredOutputs
from outrider.runtime.text.token_rules import AllowedTokens, LogitBias, MinTokens

MAX_PENALTY = 2.0
MAX_REPETITION_PENALTY = 1e6
MAX_BIAS = 100.0
MAX_BAD_WORDS = 1000
MAX_BAD_WORD_BYTES = 1000


class LogitsOptions(TypedDict, total=False):
    """Options that become rules over logits. They go with full KV alone (`partial_kv`). Where the plan's engine accepts
    drafts itself (TensorRT), a request with rules decodes plainly.

    - `structured_outputs`: the form that the text keeps to; see `structured_outputs.StructuredOutputs`.
    - `constraint`: a `rules.LogitsRule` of your own.
    - `allowed_token_ids`: the only tokens that may come.
    - `bad_words`: texts that are not generated, at most 1,000. The last token of one is excluded where the ones before
      it have just been generated; what the prompt ends with does not count.
    - `min_tokens` (0): end tokens are excluded, with `ignore_eos` too, and stop strings do not end the text, until so
      many tokens were generated. A stop string that a later token completes counts.
    - `logit_bias`: numbers from -100 to 100, by token id, added to the logits.
    - `logits_processors`: functions of the tokens generated so far and the logits f32 `[vocab]`, which return logits or
      change them in place. A function is to depend on its arguments alone.
    - `repetition_penalty` (1, above 0): of tokens of the prompt and the generated text, logits above 0 are divided by
      it, others multiplied.
    - `frequency_penalty` (0, from -2 to 2): taken off a token's logit as often as the token was generated.
    - `presence_penalty` (0, from -2 to 2): taken off once, if the token was generated.
    """

    structured_outputs: StructuredOutputs | None
    constraint: LogitsRule | None
    allowed_token_ids: Sequence[int] | None
    bad_words: Sequence[str]
    min_tokens: int
    logit_bias: Mapping[int, float] | Mapping[str, float] | None
    logits_processors: Sequence[LogitsProcessor]
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float


def check_rules(
    options: LogitsOptions,
    *,
    max_new_tokens: int,
    ends: Collection[int],
    vocab_size: int | None,
    grammars: Grammars | None,
) -> dict[str, tuple[LogitsRule, ...]]:
    """Return the rules of each option that has some, in the order in which they are applied.

    `ends` are the end tokens. Without `vocab_size`, token ids may be any numbers; without `grammars` there are
    neither `structured_outputs` nor `bad_words`. Raises RequestError naming the option and its limits.
    """
    found: dict[str, tuple[LogitsRule, ...]] = {}
    form = options.get("structured_outputs")
    if form is not None:
        assert grammars is not None, "forms are compiled"
        found["structured_outputs"] = (grammars.rule(form, ends),)
    constraint = options.get("constraint")
    if constraint is not None:
        if not isinstance(constraint, LogitsRule):
            raise RequestError(f"constraint is of type {type(constraint).__name__}; pass a LogitsRule.")
        found["constraint"] = (constraint,)
    allowed = options.get("allowed_token_ids")
    if allowed is not None:
        found["allowed_token_ids"] = (AllowedTokens(_allowed_ids(allowed, vocab_size)),)
    words = _words(options.get("bad_words") or ())
    if words:
        assert grammars is not None, "bad words are encoded"
        found["bad_words"] = (BadWords(token_sequences(words, grammars.tokenizer)),)
    least = check_min_tokens(options, max_new_tokens)
    if least and ends:
        found["min_tokens"] = (MinTokens(least, ends),)
    biases = _biases(options.get("logit_bias") or {}, vocab_size)
    if biases:
        found["logit_bias"] = (LogitBias(biases),)
    if processors := _processors(options.get("logits_processors") or ()):
        found["logits_processors"] = processors
    names = ("presence_penalty", "frequency_penalty")
    presence, frequency = (_number(options.get(name, 0.0), name, -MAX_PENALTY, MAX_PENALTY) for name in names)
    repetition = as_real(given := options.get("repetition_penalty", 1.0))
    if repetition is None or not 1 / MAX_REPETITION_PENALTY <= repetition <= MAX_REPETITION_PENALTY:
        raise RequestError(
            f"repetition_penalty is {shown(given)}; pass a number above 0, 1 for none; more than 1 lowers repeated "
            "tokens."
        )
    if presence or frequency or repetition != 1:
        name = "repetition_penalty" if repetition != 1 else "frequency_penalty" if frequency else "presence_penalty"
        found[name] = (Penalties(presence, frequency, repetition),)
    return found


def check_min_tokens(options: LogitsOptions, max_new_tokens: int) -> int:
    """Return `min_tokens`. Raises RequestError where they are no number, or more than `max_new_tokens`."""
    least = options.get("min_tokens", 0)
    if isinstance(least, bool) or not isinstance(least, int) or not 0 <= least <= max_new_tokens:
        raise RequestError(
            f"min_tokens is {shown(least)}; pass a whole number from 0 to max_new_tokens, which is {max_new_tokens}."
        )
    return least


def _allowed_ids(given: object, vocab_size: int | None) -> list[int]:
    if not isinstance(given, Collection) or isinstance(given, str | bytes | Mapping) or not len(given):
        raise RequestError(
            f"allowed_token_ids is {shown(given)}; pass a list of at least one token id, or None for all."
        )
    return [_token_id(each, "allowed_token_ids", vocab_size) for each in given]


def _token_id(given: object, name: str, vocab_size: int | None) -> int:
    if isinstance(given, bool) or not isinstance(given, int | np.integer) or given < 0:
        raise RequestError(f"{name} holds {shown(given)}; pass token ids, whole numbers of at least 0.")
    if vocab_size is not None and given >= vocab_size:
        raise RequestError(
            f"{name} holds {shown(given)}, which is not in the vocabulary; ids go from 0 to {vocab_size - 1}."
        )
    return int(given)


def _words(given: object) -> list[str]:
    if not isinstance(given, Iterable) or isinstance(given, str | bytes | Mapping):
        raise RequestError(f"bad_words is {shown(given)}; pass a list of texts.")
    words = list(islice(given, MAX_BAD_WORDS + 1))
    if len(words) > MAX_BAD_WORDS:
        raise RequestError(f"bad_words holds more than {MAX_BAD_WORDS} texts; pass at most {MAX_BAD_WORDS}.")
    for place, word in enumerate(words):
        name = f"bad_words[{place}]"
        if not isinstance(word, str) or not word.strip():
            raise RequestError(f"{name} is {shown(word)}; pass a text that is more than spaces.")
        check_text(word, name)
        if len(word.encode()) > MAX_BAD_WORD_BYTES:
            raise RequestError(f"{name} has {len(word.encode())} bytes; pass a text of at most {MAX_BAD_WORD_BYTES}.")
    return words


def _biases(given: object, vocab_size: int | None) -> dict[int, float]:
    if not isinstance(given, Mapping):
        raise RequestError(f'logit_bias is {shown(given)}; pass numbers by token id, such as {{"50256": -100}}.')
    found = {}
    for key, bias in given.items():
        spelled = isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 20  # as JSON's keys are
        token = _token_id(int(key) if spelled else key, "logit_bias", vocab_size)
        found[token] = _number(bias, f"logit_bias[{token}]", -MAX_BIAS, MAX_BIAS)
    return found


def _processors(given: object) -> tuple[LogitsRule, ...]:
    processors = list(given) if isinstance(given, Iterable) else [given]
    if not isinstance(given, Iterable) or not all(callable(each) for each in processors):
        raise RequestError(
            f"logits_processors is {shown(given)}; pass a list of functions of the tokens so far and their logits."
        )
    return tuple(Processor(cast(Callable[..., None], each), place) for place, each in enumerate(processors))


def _number(given: object, name: str, least: float, most: float) -> float:
    if (number := as_real(given)) is None or not least <= number <= most:
        raise RequestError(f"{name} is {shown(given)}; pass a number from {least:g} to {most:g}.")
    return number
