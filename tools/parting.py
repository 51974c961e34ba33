"""Where two answers to the same request part: tokens, texts, log-probabilities, and how near a choice was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider import Session
from outrider.plans.sampling import Sampling
from outrider.plugins.reference import RaceKey
from outrider.plugins.reference.choice import filtered_weights
from outrider.plugins.reference.race import race_times
from outrider.plugins.schema import FilterOrder, Purpose
from outrider.runtime.options.options import Options, check_options
from outrider.runtime.sampling import SamplingParams

Token = int | str
"""A token's id; of a server that reports no ids, the token's text."""

_SHOWN = 24  # characters of a text
_HALF = "\ufffd"  # stands for bytes of a character whose rest has not come


def first_difference(one: Sequence[Any], other: Sequence[Any]) -> int | None:
    """Index of the first entry that differs or that one of them does not have; None where both are the same."""
    pairs = enumerate(zip_longest(one, other))
    return next((index for index, (mine, theirs) in pairs if mine != theirs), None)


def same_share(expected: Sequence[int], found: Sequence[int]) -> float:
    """Share of the expected tokens before the first that differs."""
    index = first_difference(expected, found)
    return 1.0 if index is None else index / max(len(expected), 1)


@dataclass(frozen=True)
class Logprob:
    """A token's log-probability, and those of the most probable tokens in its place."""

    token: Token
    logprob: float
    top: tuple[tuple[Token, float], ...] = ()


@dataclass(frozen=True)
class Outcome:
    """The result of a request, or what it has so far. `tokens` may be empty where a server reports none. `logprobs`
    are of the tokens from index `logprobs_from` on, and None where none were asked for. `calls` are names and
    arguments of tools. With an `error`, nothing else counts."""

    tokens: tuple[Token, ...] = ()
    text: str = ""
    finish: str = ""
    logprobs: tuple[Logprob, ...] | None = None
    logprobs_from: int = 0
    error: str = ""
    calls: tuple[tuple[str, str], ...] = ()

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Outcome:
        """Read what `asdict` gave, which JSON may have made lists of."""
        raw = value["logprobs"]
        logprobs = None if raw is None else tuple(
            Logprob(each["token"], each["logprob"], tuple((token, logprob) for token, logprob in each["top"]))
            for each in raw
        )  # fmt: skip
        calls = tuple((name, arguments) for name, arguments in value["calls"])
        return cls(**value | {"tokens": tuple(value["tokens"]), "logprobs": logprobs, "calls": calls})

    def begins(self, whole: Outcome) -> bool:
        """Whether `whole` may continue from here: text, calls and log-probabilities, whose last may have half come."""
        logprobs, calls = self.logprobs or (), self.calls
        return (
            whole.text.startswith(self.text.rstrip(_HALF))
            and (whole.logprobs or ())[: len(logprobs)] == logprobs
            and len(calls) <= len(whole.calls)
            and all(
                one == name and arguments.startswith(begun)
                for (one, begun), (name, arguments) in zip(calls, whole.calls, strict=False)
            )
        )


def read_logprobs(raw: dict[str, Any]) -> tuple[Logprob, ...]:
    """The log-probabilities in a choice of OpenAI's API, of chats or of completions; NaN for a
    token without one."""
    if "content" in raw:
        return tuple(
            Logprob(
                each["token"], each["logprob"], tuple((top["token"], top["logprob"]) for top in each["top_logprobs"])
            )
            for each in raw["content"]
        )
    tops = raw.get("top_logprobs") or []
    pairs = enumerate(zip(map(str, raw.get("tokens") or ()), raw.get("token_logprobs") or (), strict=False))
    return tuple(
        Logprob(
            token, float("nan") if value is None else float(value), _ranked(tops[place] if place < len(tops) else {})
        )
        for place, (token, value) in pairs
    )


def _ranked(top: dict[str, float] | None) -> tuple[tuple[str, float], ...]:
    return tuple(sorted((top or {}).items(), key=lambda pair: -pair[1]))


@dataclass(frozen=True)
class Divergence:
    """Where an outcome parts from the expected one: in which of its parts, by the name `what`.

    `index` is that of a token, or of a character of a text. `expected` and `found` are what stands there; `margin` is
    by how many nats the expected token was the more probable one before temperature, filters and rules, None where
    that is not known.
    """

    what: str
    index: int | None
    expected: str
    found: str
    margin: float | None = None
    request: str = ""

    @property
    def text(self) -> str:
        where = "" if self.index is None else f" {self.index}"
        unit = {"tokens": "token", "text": "character", "log-probabilities": "log-probability"}.get(
            self.what, self.what
        )
        near = "" if self.margin is None else f" ({self.margin:+.2g} nats)"
        return f"{self.request}, {unit}{where}: {self.found} in place of {self.expected}{near}"


@dataclass
class Compared:
    """A condition's requests against the reference's: how many `diverged`, and the `first` of them.

    `logprobs_diverged` counts those whose tokens and text agree, and whose log-probabilities have other bits.
    """

    requests: int = 0
    diverged: int = 0
    logprobs_diverged: int = 0
    first: Divergence | None = None
    first_of_logprobs: Divergence | None = None
    by_what: dict[str, int] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    """Of the requests that diverged."""
    largest_margin: float | None = None
    """Of all tokens that parted: how far the choices were from a tie."""


def compare(names: Sequence[str], expected: Sequence[Outcome], found: Sequence[Outcome]) -> Compared:
    """Compare outcomes of the same requests, in the same order; `names` are the requests'."""
    result = Compared()
    for name, one, other in zip(names, expected, found, strict=True):
        result.requests += 1
        parted = divergence(name, one, other)
        if parted is None:
            continue
        result.by_what[parted.what] = result.by_what.get(parted.what, 0) + 1
        if parted.what == "log-probabilities":
            result.logprobs_diverged += 1
            result.first_of_logprobs = result.first_of_logprobs or parted
            continue
        result.diverged += 1
        result.names.append(name)
        result.first = result.first or parted
        if parted.margin is not None:
            result.largest_margin = max(abs(parted.margin), result.largest_margin or 0.0)
    return result


def divergence(request: str, expected: Outcome, found: Outcome) -> Divergence | None:
    """Return where `found` parts from `expected`; None where all that both have is the same."""
    if expected.error or found.error:
        if expected.error == found.error:
            return None
        return Divergence("error", None, expected.error or "an answer", found.error or "an answer", None, request)
    if expected.tokens and found.tokens and expected.tokens != found.tokens:
        index = first_difference(expected.tokens, found.tokens) or 0
        one, other = ((*each.tokens, None)[index] for each in (expected, found))
        return Divergence("tokens", index, _token(one), _token(other), _nats(expected, index, other), request)
    if expected.text != found.text:
        index = first_difference(expected.text, found.text) or 0
        one_text, other_text = (repr(each.text[index : index + _SHOWN]) for each in (expected, found))
        return Divergence("text", index, one_text, other_text, None, request)
    if expected.calls != found.calls:
        return Divergence("calls", None, repr(expected.calls), repr(found.calls), None, request)
    if expected.finish != found.finish:
        return Divergence("finish reason", None, repr(expected.finish), repr(found.finish), None, request)
    return _logprobs_part(request, expected, found)


def _logprobs_part(request: str, expected: Outcome, found: Outcome) -> Divergence | None:
    """Compare the log-probabilities that both asked for, the most probable others as far as both list some."""
    if expected.logprobs is None or found.logprobs is None:
        return None
    begin = max(expected.logprobs_from, found.logprobs_from)
    ours = expected.logprobs[begin - expected.logprobs_from :]
    theirs = found.logprobs[begin - found.logprobs_from :]
    for index, (one, other) in enumerate(zip_longest(ours, theirs), begin):
        if one is None or other is None:
            return Divergence("log-probabilities", index, _there(one), _there(other), None, request)
        listed = min(len(one.top), len(other.top))
        if (one.logprob, one.top[:listed]) != (other.logprob, other.top[:listed]):
            if one.logprob == other.logprob:
                first, second = (str(list(each.top[:listed])) for each in (one, other))
            else:
                first, second = _there(one), _there(other)
            return Divergence("log-probabilities", index, first, second, None, request)
    return None


def _nats(expected: Outcome, index: int, found: Token | None) -> float | None:
    place = index - expected.logprobs_from
    if found is None or expected.logprobs is None or not 0 <= place < len(expected.logprobs):
        return None
    there = expected.logprobs[place]
    others = dict(there.top)
    return there.logprob - others[found] if found in others else None


def _token(token: Token | None) -> str:
    return "the end" if token is None else repr(token)


def _there(logprob: Logprob | None) -> str:
    return "none" if logprob is None else f"{logprob.logprob:.17g}"


@dataclass(frozen=True)
class Parting:
    """Where a generation first has another token than the expected one, and the logits by which that was chosen.

    `prompt` and `index`, of a generated token, count from 0; the prompt has `prompt_tokens`. A `near_tie` is explained
    by rounding.
    """

    prompt: int
    prompt_tokens: int
    index: int
    expected: int
    found: int
    margin: float
    near_tie: bool = False


def find_parting(
    session: Session, number: int, prompt: Sequence[int], options: Options, plain: Sequence[int], other: Sequence[int]
) -> Parting | None:
    """Find where `other` leaves `plain`, which `session` decodes plainly from `prompt`, that of this `number`, with
    `options`, and which is as long; it is used again for the margin. None where the two are the same."""
    index = first_difference(plain, other)
    if index is None:
        return None
    again: Options = options | Options(drafter="none", partial_kv="off", ignore_eos=True, max_new_tokens=index + 1)
    session.generate(prompt, whole=True, **again)
    params = SamplingParams.from_options(check_options(again))
    key = RaceKey(params.seed, params.stream_id, len(prompt) + index, Purpose.TARGET)
    apart = margin(session.step_logits(0), params.row, key)
    return Parting(number, len(prompt), index, plain[index], other[index], apart)


def margin(logits: NDArray[np.float32], sampling: Sampling, key: RaceKey) -> float:
    """How nearly another token would have been chosen from `logits` `[V]` in the race of `key`.

    In logits: twice the least disturbance that changes the choice or the set it is made from. Greedily, that is the
    gap of the two largest; in a race, the gap of the two fastest.
    """
    ranked = np.sort(logits.astype(np.float64))[::-1]
    if sampling.temperature == 0.0:
        return float(ranked[0] - ranked[1]) if len(ranked) > 1 else float("inf")
    times = np.sort(race_times(filtered_weights(logits, sampling), key)[1].astype(np.float64))
    found = [sampling.temperature * np.log(second / times[0]) for second in times[1:2]]
    kept = int(sampling.top_k) if 0 < sampling.top_k < len(ranked) else len(ranked)
    temperature = 1.0 if sampling.filter_order == FilterOrder.TEMPERATURE_LAST else sampling.temperature
    fewer, more = list[float](), list[float]()  # what makes the set smaller, and what lets others in
    if sampling.top_p < 1.0:
        weights = np.exp((ranked[:kept] - ranked[0]) / temperature)
        sums = np.cumsum(weights)
        kept = 1 + int(np.argmax(sums >= sampling.top_p * sums[-1]))
        *fewer, end = _to_the_ends(sampling.top_p / (1 - sampling.top_p), weights, kept - 1, temperature)
        more.append(end)
    more += [ranked[kept - 1] - dropped for dropped in ranked[kept : kept + 1]]
    if sampling.top_n_sigma > 0.0:
        finite = ranked[np.isfinite(ranked)]
        edges = np.abs(finite[1:] - ranked[0] + sampling.top_n_sigma * finite.std())
        # A lower bound: a disturbance moves a deviation by no more than itself, and distances are units of 2**-8.
        found += ((edges - 2.0**-6).clip(0.0) * 2 / (2 + sampling.top_n_sigma)).tolist()
    if sampling.min_p > 0.0:  # who comes in passes both, and who is dropped anyway does not matter
        above = ranked - ranked[0] - temperature * np.log(sampling.min_p)
        found += np.abs(above[1:kept]).tolist()  # the first always passes
        passing = int((above >= 0).sum())
        fewer = fewer if kept <= passing else []
        more = [max(edge, -float(above[kept])) for edge in more] if kept < len(ranked) else []
    return float(min([*found, *fewer, *more], default=float("inf")))


def _to_the_ends(odds: float, weights: NDArray[np.float64], index: int, temperature: float) -> list[float]:
    """From a share of all weights, given by its odds, to the ends of the interval of `index`, in which it lies.

    A share moves most where the logits inside rise and those outside fall: its log-odds by both together, over the
    temperature.
    """
    sums = np.cumsum(weights)
    ends = sums[max(index - 1, 0) : index + 1]
    with np.errstate(divide="ignore"):  # no disturbance moves the end of all
        return list(temperature * np.abs(np.log(ends / (sums[-1] - ends)) - np.log(odds)))
