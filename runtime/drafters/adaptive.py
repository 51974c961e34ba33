"""Whether drafting pays, by the clock: a session decodes plainly while it does not."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from plans.manifest import Manifest, rejects
from runtime.request import Request
from runtime.sampling import SamplingParams

_LOG = logging.getLogger("outrider")

WINDOW = 64  # drafting rounds that a judgement stands on: texts have easy and hard stretches
LONGEST_WINDOW = 256  # doubled up to here while drafting pays
BURST = 4  # plain rounds behind a window, of which the first, on which caches are cold, does not count
KEPT = 3  # bursts that count, each against the window before it
LEAST_GAIN = 1.0  # two windows in a row below it end drafting
CLEAR_LOSS = 0.7  # and so does one below this
REST = 64  # plain rounds before the first probe, doubled after each that fails
LONGEST_REST = 1024

_TINY = 1e-9  # seconds


class Gate:
    """Lets a session draft while a token costs less with drafts than without.

    Rounds of both kinds are measured side by side: what counts is the median of their ratios, since a machine's
    hiccups, and its faster and slower hours, are no property of a drafter. The choice changes when tokens come, never
    which (of drafters that the target's own draws accept). What it has learned holds for one way of sampling. A window
    is of rounds over one arena: they cost different times.
    """

    def __init__(self, drafter: str) -> None:
        self._drafter = drafter
        self._window = WINDOW
        self._watches = _Watch(), _Watch()  # over the full arena, and over the partial one
        self._watch = self._watches[0]  # of the last round that was noted
        self._lost = False  # the window before
        self._resting = 0  # plain rounds still to come
        self._rest = REST

    @property
    def drafting(self) -> bool:
        """Whether the next round is to draft."""
        return self._resting == 0 and len(self._watch.seconds) < self._window

    @property
    def resting(self) -> bool:
        """Whether drafting has been ended, and is not being tried again yet."""
        return self._resting > 0

    def note(self, seconds: float, tokens: int, *, partial: bool = False) -> None:
        """A round, over the `partial` arena or the full one, took `seconds` and committed `tokens`; it drafted if
        `drafting` was true before the call."""
        if self._resting:
            self._resting -= 1
            return
        drafted = self.drafting
        watch = self._watch = self._watches[partial]
        full = len(watch.seconds) >= self._window
        if drafted and not full:
            watch.seconds.append(seconds)
            watch.tokens.append(tokens)
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
            self._lost, self._rest = False, REST
            self._window = min(2 * self._window, LONGEST_WINDOW)
            return
        self._window = WINDOW
        if not self._lost and gain >= CLEAR_LOSS:
            self._lost = True
            return
        _LOG.info("drafter %s: gain %.2f, decoding plainly for %d rounds", self._drafter, gain, self._rest)
        self._lost = True  # so that a probe has one window
        self._resting = self._rest
        for each in self._watches:
            each.forget_window()
            each.ratios.clear()
        self._rest = min(2 * self._rest, LONGEST_REST)


@dataclass
class _Watch:
    """What rounds over one arena have cost and brought."""

    tokens: list[int] = field(default_factory=list)  # of the window's drafting rounds
    seconds: list[float] = field(default_factory=list)
    burst: list[float] = field(default_factory=list)  # seconds of the plain rounds behind the window
    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))  # of plain rounds to drafting ones

    def gain(self) -> float:
        if not self.ratios or not self.tokens:
            return 1.0
        return _median(self.ratios) * sum(self.tokens) / len(self.tokens)

    def forget_window(self) -> None:
        self.tokens.clear()
        self.seconds.clear()
        self.burst.clear()


class Gates:
    """The gates of a session's drafters, each for the way of sampling of its last generation."""

    def __init__(self, manifest: Manifest) -> None:
        # By rejection, which draws decide depends on what was drafted: tokens must not depend on the clock.
        self._gated = {d.name for d in manifest.drafters if not rejects([d])}
        self._gates: dict[str, tuple[SamplingParams, Gate]] = {}

    def of(self, request: Request) -> Gate | None:
        """The gate of the request's drafter: the one before, if that was for the same sampling.

        In lossy mode tokens depend on where rounds end, and so on what was drafted: there is none.
        """
        name, sampling = request.drafter, request.sampling
        if name not in self._gated or not request.auto_disable or request.partial_kv == "lossy":
            return None
        unseeded = replace(sampling, seed=0, stream=0)
        if name not in self._gates or self._gates[name][0] != unseeded:
            self._gates[name] = unseeded, Gate(name)
        return self._gates[name][1]


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]
