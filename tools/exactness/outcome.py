"""What a request came to, and where two outcomes of the same request part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any

Token = int | str
"""A token's id; of a server that tells no ids, the token's text."""

_SHOWN = 24  # characters of a text


@dataclass(frozen=True)
class Logprob:
    """A token's log-probability, and those of the most probable tokens in its place."""

    token: Token
    logprob: float
    top: tuple[tuple[Token, float], ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What a request came to. `tokens` may be empty where a server tells none; `logprobs` are of the tokens from index
    `logprobs_from` on, and None where none were asked for. With an `error`, nothing else counts."""

    tokens: tuple[Token, ...] = ()
    text: str = ""
    finish: str = ""
    logprobs: tuple[Logprob, ...] | None = None
    logprobs_from: int = 0
    error: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Outcome:
        """Read what `to_json` gave, which JSON may have made lists of."""
        told = value["logprobs"]
        logprobs = None if told is None else tuple(
            Logprob(each["token"], each["logprob"], tuple((token, logprob) for token, logprob in each["top"]))
            for each in told
        )  # fmt: skip
        return cls(**value | {"tokens": tuple(value["tokens"]), "logprobs": logprobs})


@dataclass(frozen=True)
class Divergence:
    """Where an outcome parts from the expected one: `what` of tokens, text, finish reason, log-probabilities, error.

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
        """One line for the reader."""
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

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


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
        pairs = enumerate(zip_longest(expected.tokens, found.tokens))
        index, (one, other) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
        margin = _margin(expected, index, other)
        return Divergence("tokens", index, _token(one), _token(other), margin, request)
    if expected.text != found.text:
        pairs_of_text = enumerate(zip_longest(expected.text, found.text))
        index = next(i for i, pair in pairs_of_text if pair[0] != pair[1])
        one_text, other_text = (repr(each.text[index : index + _SHOWN]) for each in (expected, found))
        return Divergence("text", index, one_text, other_text, None, request)
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


def _margin(expected: Outcome, index: int, found: Token | None) -> float | None:
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
