"""Whether drafting pays, by the clock: a session decodes plainly while it does not."""

from __future__ import annotations

import logging
from collections import deque

_LOG = logging.getLogger("outrider")

WINDOW = 64  # rounds that a judgement stands on: texts have easy and hard stretches
LEAST_GAIN = 0.95  # below which drafting stops: a rest misses the next easy stretch
BASELINE = 4  # plain rounds that tell what a token costs without drafts
STALE = 16  # windows after which that is measured again: sequences grow
REST = 64  # plain rounds before the first probe, doubled after each that fails
LONGEST_REST = 1024


class Gate:
    """Lets a session draft while a token costs less with drafts than without.

    It measures rounds of both kinds: of every `STALE` windows of drafting rounds, `BASELINE` rounds are run plainly,
    for comparison. Medians, since a machine's hiccups are no property of a drafter. It belongs to a session, whose
    generations may be short. The choice changes when tokens come, never which (of drafters that the target's own
    draws accept).
    """

    def __init__(self, drafter: str) -> None:
        self._drafter = drafter
        self._drafted: deque[tuple[float, int]] = deque(maxlen=WINDOW)  # seconds and tokens of a round
        self._plain: deque[float] = deque(maxlen=WINDOW)
        self._windows = 0
        self._resting = 0  # plain rounds still to come
        self._rest = REST

    @property
    def drafting(self) -> bool:
        return self._resting == 0

    def note(self, seconds: float, tokens: int) -> None:
        """A round took `seconds` and committed `tokens`; it drafted if `drafting` was true before the call."""
        if self._resting:
            self._plain.append(seconds)
            self._resting -= 1
            if not self._resting and len(self._drafted) == WINDOW:
                self._judge()
            return
        self._drafted.append((seconds, tokens))
        if len(self._drafted) < WINDOW:
            return
        self._windows += 1
        if self._windows % STALE == 0:
            self._plain.clear()
        if len(self._plain) < BASELINE:
            self._resting = BASELINE
        else:
            self._judge()

    def gain(self) -> float:
        """Plain seconds a token over drafted seconds a token, from the rounds at hand; 1 while there are none."""
        if not self._plain or not self._drafted:
            return 1.0
        plain = sorted(self._plain)[len(self._plain) // 2]
        seconds = sorted(seconds for seconds, _ in self._drafted)[len(self._drafted) // 2]
        tokens = sum(count for _, count in self._drafted) / len(self._drafted)
        return plain * tokens / seconds if seconds > 0 else 1.0

    def _judge(self) -> None:
        gain = self.gain()
        self._drafted.clear()
        if gain >= LEAST_GAIN:
            self._rest = REST
            return
        _LOG.info("drafter %s: gain %.2f, decoding plainly for %d rounds", self._drafter, gain, self._rest)
        self._resting = self._rest
        self._rest = min(2 * self._rest, LONGEST_REST)
        self._plain.clear()
