"""Beam search: a baseline that looks for probable continuations as a whole, not token by token.

No KV ever moves. A pass feeds one token per live beam, each keeps the slot it gets, and the bias that the host
writes says which slots a beam sees: the prompt and its own ancestors. Scores and ends are those of
`generate(num_beams=...)` in transformers 5 (`GenerationMixin._beam_search`).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Literal, TypedDict, Unpack, cast

import numpy as np
from numpy.typing import NDArray

from outrider.plans import names
from outrider.plans.errors import PlanError, RequestError
from outrider.plugins import native
from outrider.runtime.generation import FinishReason
from outrider.runtime.numbers import shown
from outrider.runtime.options.kinds import Real, Whole
from outrider.runtime.options.options import OPTIONS, Options
from outrider.runtime.options.request import Request
from outrider.runtime.session import Session
from outrider.runtime.stats import Stats

MAX_LENGTH_PENALTY = 10  # length ** penalty stays far inside float64

EarlyStopping = bool | Literal["never"]


class BeamOptions(TypedDict, total=False):
    """Keyword arguments of `beam_search`.

    - `beams` (4): continuations that are followed at once; one is greedy decoding.
    - `length_penalty` (1): a score is the sum of log-probabilities / new tokens ** penalty; above 0 favours long ones.
    - `early_stopping` (False): when to end once as many continuations have ended as there are beams. True: at once.
      False: when the best live beam, at its present length, scores no better than the worst of them. "never": the
      same, but with a penalty above 0 at the greatest length it could reach.
    - `num_return` (1): how many to return, at most `beams`.
    - `max_new_tokens` (128), `eos_token_ids` (None, the plan's), `cancel`: as in `generate`.
    """

    beams: int
    length_penalty: float
    early_stopping: EarlyStopping
    num_return: int
    max_new_tokens: int
    eos_token_ids: Sequence[int] | None
    cancel: threading.Event | None


@dataclass(frozen=True)
class BeamResult:
    """A continuation. `token_ids` ends with the end token, if one ended it; `text` leaves it out.

    `stats` are those of the whole search, the same for all its results; its `new_tokens` are the best one's.
    """

    text: str
    token_ids: list[int]
    score: float
    finish_reason: FinishReason
    stats: Stats


def beam_search(session: Session, prompt: str | Sequence[int], **options: Unpack[BeamOptions]) -> list[BeamResult]:
    """Append `prompt` to the session's sequence and search after it; nothing that is found is appended.

    Best first, `num_return` of them. A cancelled search returns what it has, with the live beams as they are. Raises
    RequestError, before anything changes, for a prompt or an option that cannot be served, such as more slots than the
    KV cache has.
    """
    settings = _Settings.check(options, session)
    request = settings.request
    stats = Stats()
    with session.exploring(prompt, request, stats) as prepared:
        started = perf_counter()
        most = settings.most_tokens(len(session.token_ids) + len(prepared.ids))
        beams = _Beams(settings, most)
        visible = np.zeros((settings.beams, settings.beams * (most - 1)), np.bool_)  # by beam: slots after the prompt
        used = 0
        logits = session.read(prepared, request, stats)
        while logits is not None:
            parents = beams.grow(logits)
            stats.rounds += 1
            if stats.rounds == 1:
                stats.ttft_ms = (perf_counter() - started) * 1000
            if beams.over or settings.cancelled:
                break
            n = len(parents)
            visible[:n] = visible[parents]
            visible[range(n), range(used, used + n)] = True
            used += n
            logits = session.look_ahead(beams.tips, beams.length, visible[:n, :used])
        found = beams.best(settings.num_return)
        stats.new_tokens = len(found[0].token_ids)
        stats.first_span = min(stats.new_tokens, 1)
        stats.total_ms = (perf_counter() - started) * 1000
        return [
            BeamResult(
                session.text_behind(f.token_ids[: len(f.token_ids) - (f.finish_reason is FinishReason.STOP)]),
                f.token_ids, f.score, f.finish_reason, stats,
            )
            for f in found
        ]  # fmt: skip


@dataclass(frozen=True)
class _Settings:
    """Checked options, and the sizes of the plan that bound them."""

    beams: int
    length_penalty: float
    early_stopping: EarlyStopping
    num_return: int
    request: Request
    context: int
    slots: int

    @classmethod
    def check(cls, options: BeamOptions, session: Session) -> _Settings:
        unknown = sorted(set(options) - set(BeamOptions.__annotations__))
        if unknown:
            raise RequestError(
                f"Unknown option {unknown[0]!r}; the options of beam search are "
                f"{', '.join(BeamOptions.__annotations__)}."
            )
        if session.manifest.target.convolutions is not None:
            raise RequestError(
                "Beam search needs KV that beams share, and the plan's target keeps states, which they cannot; use "
                "`generate_branches` with `n`."
            )
        most = session.limits[names.LOGITS]
        beams = Whole(1, most).check(options.get("beams", 4), "beams")
        num_return = Whole(1, beams).check(options.get("num_return", 1), "num_return")
        bound = Real(-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        penalty = bound.check(options.get("length_penalty", 1.0), "length_penalty")
        early_stopping = options.get("early_stopping", False)
        if not isinstance(early_stopping, bool) and early_stopping != "never":
            raise RequestError(f"early_stopping is {shown(early_stopping)}; pass False, True or 'never'.")
        shared = {name: value for name, value in options.items() if name in OPTIONS}
        return cls(
            beams=beams,
            length_penalty=penalty,
            early_stopping=early_stopping,
            num_return=num_return,
            request=session.resolve(cast(Options, shared | {"drafter": "none", "partial_kv": "off"})),
            context=session.manifest.target.context,
            slots=session.limits[names.VIEW],
        )

    @property
    def cancelled(self) -> bool:
        return self.request.cancel is not None and self.request.cancel.is_set()

    def most_tokens(self, prompt_tokens: int) -> int:
        """Return the number of new tokens up to `max_new_tokens` or the context's end. Raises RequestError where there
        are too few slots.
        """
        most = min(self.request.max_new_tokens, self.context - prompt_tokens)
        needed = prompt_tokens + self.beams * (most - 1)  # the last tokens need no slots
        if needed > self.slots:
            raise RequestError(
                f"{self.beams} beams of {most} new tokens after {prompt_tokens} need {needed} KV slots, and "
                f"the plan's has {self.slots}. Ask for at most {1 + (self.slots - prompt_tokens) // self.beams} new "
                "tokens or for fewer beams, or build the plan with a larger capacity.context."
            )
        return most


@dataclass(frozen=True)
class _Found:
    token_ids: list[int]
    score: float
    finish_reason: FinishReason


class _Beams:
    """The live beams and the continuations that have ended, both best first."""

    def __init__(self, settings: _Settings, most: int) -> None:
        self._settings, self._most = settings, most
        self._live: list[list[int]] = [[]]
        self._totals = np.zeros(1)  # f64 [live], sums of log-probabilities
        self._ended: list[_Found] = []

    @property
    def length(self) -> int:
        """Tokens of every live beam."""
        return len(self._live[0])

    @property
    def tips(self) -> list[int]:
        return [tokens[-1] for tokens in self._live]

    @property
    def over(self) -> bool:
        """Whether the search has ended: no live beam is left, or none can still end among the best."""
        settings = self._settings
        if not self._live:
            return True
        if len(self._ended) < settings.beams:
            return False
        if settings.early_stopping is True or settings.beams == 1:  # one beam ends where greedy decoding does
            return True
        ahead = settings.early_stopping == "never" and settings.length_penalty > 0
        reachable = self._score(float(self._totals[0]), self._most if ahead else self.length)
        return reachable <= self._ended[-1].score

    def grow(self, logits: NDArray[np.float32]) -> NDArray[np.int64]:
        """Continue the live beams by the best tokens; int64 [live], which of them each of the new ones continues.

        `logits` f32 [live, vocab]. A candidate that ends counts only if it is among the best `beams`: those after
        are there to replace it.
        """
        settings, ends = self._settings, self._settings.request.eos_token_ids
        totals = _log_softmax(logits) + self._totals[:, None]
        length = self.length + 1
        live: list[tuple[int, list[int]]] = []
        kept: list[float] = []
        for rank, place in enumerate(_highest(totals.ravel(), settings.beams * (1 + len(ends)))):
            parent, token = divmod(int(place), totals.shape[1])
            total = float(totals[parent, token])
            reason = FinishReason.STOP if token in ends else FinishReason.LENGTH
            if token in ends or length == self._most:
                if rank < settings.beams:
                    self._ended.append(_Found([*self._live[parent], token], self._score(total, length), reason))
            elif len(live) < settings.beams:
                live.append((parent, [*self._live[parent], token]))
                kept.append(total)
        self._ended = sorted(self._ended, key=lambda found: -found.score)[: settings.beams]
        self._live, self._totals = [tokens for _, tokens in live], np.array(kept)
        return np.array([parent for parent, _ in live], np.int64)

    def best(self, count: int) -> list[_Found]:
        """The best that have ended; of a search that was cancelled, the live beams are among them."""
        live = [] if self.over else [
            _Found(tokens, self._score(float(total), len(tokens)), FinishReason.CANCELLED)
            for tokens, total in zip(self._live, self._totals, strict=True)
        ]  # fmt: skip
        return sorted([*self._ended, *live], key=lambda found: -found.score)[:count]

    def _score(self, total: float, length: int) -> float:
        divisor: float = max(length, 1) ** self._settings.length_penalty
        return total / divisor


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Log-probabilities f64 [rows, V]. Raises PlanError for logits that are no distribution."""
    highest = logits.max(axis=1, keepdims=True)
    if not np.isfinite(highest).all():
        raise PlanError(
            "The target's logits are no distribution: their maximum is no number. The plan's engine is at fault: run "
            "`outrider verify` on the plan."
        )
    rows: NDArray[np.float64] = logits.astype(np.float64) - highest
    rows -= np.array([[native.log_sum_exp(row)] for row in logits])
    return rows


def _highest(totals: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """Places of the `count` highest, best first and lower place first on ties; those of impossible tokens left out."""
    count = min(count, len(totals))
    cut = np.partition(totals, len(totals) - count)[len(totals) - count]
    chosen = np.flatnonzero((totals >= cut) & np.isfinite(totals))
    return chosen[np.lexsort((chosen, -totals[chosen]))][:count]
