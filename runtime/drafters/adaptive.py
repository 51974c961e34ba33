"""Adaptive speculation: a drafter is disabled while a token costs more with its drafts than without, by the clock."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from outrider.plans.manifest import Manifest, rejects
from outrider.runtime.drafters.verify_length import PriceCurve, VerifyLength
from outrider.runtime.options.draft_limits import DraftLimits
from outrider.runtime.options.request import Request
from outrider.runtime.sampling import SamplingParams

_LOG = logging.getLogger("outrider")

WINDOW = 64  # drafting rounds that a judgement stands on: texts have easy and hard stretches
LONGEST_WINDOW = 256  # doubled up to here while drafting pays
BURST = 4  # plain rounds after a window, of which the first, on which caches are cold, does not count
KEPT = 3  # bursts that count, each against the window before it
LEAST_GAIN = 1.0  # two windows in a row below it end drafting
CLEAR_LOSS = 0.7  # and so does one below this
DISABLED_ROUNDS = 64  # plain rounds before the first probe, doubled after each that fails
MOST_DISABLED_ROUNDS = 1024

_TINY = 1e-9  # seconds


class AdaptiveSpeculation:
    """Enables one drafter while a token costs less with its drafts than without them, and disables it otherwise.

    Rounds of both kinds are measured side by side: what counts is the median of their ratios, since a machine's
    hiccups, and its faster and slower hours, are no property of a drafter. The choice changes when tokens come, never
    which (of drafters that the target's own draws accept). What it has learned holds for one way of sampling. A window
    is of rounds over one KV cache: they cost different times.

    `verify_length` says how much of a draft is worth verifying, where the prices of the target's passes are known.
    """

    def __init__(self, drafter: str, prices: PriceCurve | None = None) -> None:
        self._drafter = drafter
        self.verify_length = None if prices is None else VerifyLength(prices)
        self._window = WINDOW
        self._watches = _Watch(), _Watch()  # over the full KV cache, and over the partial one
        self._watch = self._watches[0]  # of the last round that was noted
        self._lost = False  # the window before
        self._disabled_rounds = 0  # plain rounds still to come
        self._next_disabled = DISABLED_ROUNDS

    @property
    def drafting(self) -> bool:
        """Whether the next round is to draft."""
        return self._disabled_rounds == 0 and len(self._watch.seconds) < self._window

    @property
    def disabled(self) -> bool:
        """Whether the drafter is disabled: it drafts again once the plain rounds to come have passed."""
        return self._disabled_rounds > 0

    def note(self, seconds: float, tokens: int, *, others: int = 0, partial: bool = False) -> None:
        """A round, over the `partial` cache or the full one, took `seconds` and committed `tokens`; it drafted if
        `drafting` was true before the call.

        `others` are tokens of sequences that shared the pass: what counts is what all of them get from it.
        """
        if self._disabled_rounds:
            self._disabled_rounds -= 1
            return
        drafted = self.drafting
        watch = self._watch = self._watches[partial]
        full = len(watch.seconds) >= self._window
        if drafted and not full:
            watch.seconds.append(seconds)
            watch.tokens.append((tokens + others) / (1 + others))
        elif full and not drafted:
            watch.burst.append(seconds)
            if len(watch.burst) == BURST:
                self._judge(watch)

    def gain(self) -> float:
        """Plain seconds a token over drafted seconds a token, from the rounds at hand; 1 while there are none."""
        return self._watch.gain()

    def _judge(self, watch: _Watch) -> None:
        watch.ratios.append(_median(watch.burst[1:]) / max(_median(watch.seconds), _TINY))
        gain = watch.gain()
        watch.forget_window()
        if gain >= LEAST_GAIN:
            self._lost, self._next_disabled = False, DISABLED_ROUNDS
            self._window = min(2 * self._window, LONGEST_WINDOW)
            return
        self._window = WINDOW
        if not self._lost and gain >= CLEAR_LOSS:
            self._lost = True
            return
        _LOG.info("drafter %s: gain %.2f, decoding plainly for %d rounds", self._drafter, gain, self._next_disabled)
        self._lost = True  # so that a probe has one window
        self._disabled_rounds = self._next_disabled
        for each in self._watches:
            each.forget_window()
            each.ratios.clear()
        self._next_disabled = min(2 * self._next_disabled, MOST_DISABLED_ROUNDS)


@dataclass
class _Watch:
    """Cost and tokens of rounds over one KV cache."""

    tokens: list[float] = field(default_factory=list)  # of the window's drafting rounds, over those of plain ones
    seconds: list[float] = field(default_factory=list)
    burst: list[float] = field(default_factory=list)  # seconds of the plain rounds after the window
    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))  # of plain rounds to drafting ones

    def gain(self) -> float:
        if not self.ratios or not self.tokens:
            return 1.0
        return _median(self.ratios) * sum(self.tokens) / len(self.tokens)

    def forget_window(self) -> None:
        self.tokens.clear()
        self.seconds.clear()
        self.burst.clear()


_Way = tuple[SamplingParams, bool, DraftLimits]  # but for the seed; whether rules apply; how much is drafted


class AdaptiveSpeculations:
    """Measurements of each drafter, kept from generation to generation while these sample alike."""

    def __init__(self, manifest: Manifest, prices: PriceCurve | None = None) -> None:
        """`prices` are those of the target's passes, None where they are not known."""
        self._prices = prices
        # By rejection, which draws decide depends on what was drafted: tokens must not depend on the clock.
        self._measured = {d.name for d in manifest.drafters if not rejects([d])}
        self._idle: dict[str, tuple[_Way, AdaptiveSpeculation]] = {}

    def take(self, request: Request) -> AdaptiveSpeculation | None:
        """Take the state for one sequence, until it is given back, with earlier measurements of the same sampling.

        None where speculation is not adaptive: switched off, or in lossy mode, where tokens depend on where rounds end,
        and so on what was drafted.
        """
        name = request.drafter
        if name not in self._measured or not request.auto_disable or request.partial_kv == "lossy":
            return None
        way, known = self._idle.pop(name, (None, None))
        return known if known is not None and way == _way_of(request) else AdaptiveSpeculation(name, self._prices)

    def give_back(self, request: Request, adaptive: AdaptiveSpeculation | None) -> None:
        """The sequence is over; the next one continues from there."""
        if adaptive is not None and request.drafter is not None:
            self._idle[request.drafter] = _way_of(request), adaptive


def _way_of(request: Request) -> _Way:
    return replace(request.sampling, seed=0, stream_id=0), bool(request.rules), request.limits


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]
