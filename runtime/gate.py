"""Whether drafting pays, by the clock: a session decodes plainly while it does not."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

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
        self._tokens: list[int] = []  # of the window's drafting rounds
        self._seconds: list[float] = []
        self._burst: list[float] = []  # seconds of the plain rounds behind the window
        self._ratios: deque[float] = deque(maxlen=KEPT)  # of plain rounds to drafting ones
        self._lost = False  # the window before
        self._partial = False  # the arena of the window's rounds
        self._resting = 0  # plain rounds still to come
        self._rest = REST

    @property
    def drafting(self) -> bool:
        """Whether the next round is to draft."""
        return self._resting == 0 and len(self._seconds) < self._window

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
        if partial != self._partial:
            self._partial = partial
            self._ratios.clear()
            self._forget_window()
        if drafted:
            self._seconds.append(seconds)
            self._tokens.append(tokens)
        elif self._seconds:
            self._burst.append(seconds)
            if len(self._burst) == BURST:
                self._judge()

    def gain(self) -> float:
        """Plain seconds a token over drafted seconds a token, from the rounds at hand; 1 while there are none."""
        if not self._ratios or not self._tokens:
            return 1.0
        return _median(self._ratios) * sum(self._tokens) / len(self._tokens)

    def _judge(self) -> None:
        self._ratios.append(_median(self._burst[1:]) / max(_median(self._seconds), _TINY))
        gain = self.gain()
        self._forget_window()
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
        self._ratios.clear()
        self._rest = min(2 * self._rest, LONGEST_REST)

    def _forget_window(self) -> None:
        self._tokens.clear()
        self._seconds.clear()
        self._burst.clear()


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
