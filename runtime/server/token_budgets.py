"""Budgets of tokens: what each client may take within a minute, prompts and new tokens together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil, floor
from time import monotonic

from outrider.runtime.server.errors import ApiError


@dataclass
class _Bucket:
    level: float  # tokens that are left
    at: float  # when that was, by the clock


class TokenBudgets:
    """A token bucket for each client, of `per_minute` tokens, which fills up evenly within a minute.

    A request takes at its start the most that it may use, and gives back at its end what it has not used: a client
    never has more under way than its bucket held. Any thread may call. `clock` is monotonic, in seconds, so that the
    time of day may jump.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = monotonic) -> None:
        self.per_minute, self._clock = per_minute, clock
        self._buckets: dict[str, _Bucket] = {}  # by client, which are keys
        self._changing = threading.Lock()

    def reserve(self, client: str, prompt: int, most_new: int) -> Reservation:
        """Take `prompt + most_new` tokens. Raises ApiError, status 429, where they are not left, or never can be."""
        wanted = prompt + most_new
        with self._changing:
            bucket = self._filled(client)
            if wanted > bucket.level:
                raise self._refusal(bucket, prompt, most_new)
            bucket.level -= wanted
        return Reservation(self, client, wanted)

    def give_back(self, client: str, tokens: int) -> None:
        with self._changing:
            bucket = self._filled(client)
            bucket.level = min(self.per_minute, bucket.level + tokens)

    def headers(self, client: str) -> dict[str, str]:
        """OpenAI's headers: the budget, what is left of it, and when it is whole again if nothing is taken."""
        with self._changing:
            return self._headers(self._filled(client))

    def _filled(self, client: str) -> _Bucket:
        now = self._clock()
        bucket = self._buckets.setdefault(client, _Bucket(self.per_minute, now))
        bucket.level = min(self.per_minute, bucket.level + (now - bucket.at) * self.per_minute / 60)
        bucket.at = now
        return bucket

    def _headers(self, bucket: _Bucket) -> dict[str, str]:
        return {
            "x-ratelimit-limit-tokens": str(self.per_minute),
            "x-ratelimit-remaining-tokens": str(floor(bucket.level)),
            "x-ratelimit-reset-tokens": _duration(self._seconds(self.per_minute - bucket.level)),
        }

    def _seconds(self, tokens: float) -> float:
        """The time in which `tokens` come."""
        return tokens * 60 / self.per_minute

    def _refusal(self, bucket: _Bucket, prompt: int, most_new: int) -> ApiError:
        wanted = prompt + most_new
        asked = f"The request may take {wanted} tokens (prompt: {prompt}, new: at most {most_new})"
        if wanted > self.per_minute:
            message = f"{asked}, and a key has {self.per_minute} a minute; ask for fewer by max_tokens."
            again = {"x-should-retry": "false"}  # OpenAI's clients heed it
        else:
            seconds = max(1, ceil(self._seconds(wanted - bucket.level)))
            message = (
                f"{asked}; of its {self.per_minute} a minute the key has {floor(bucket.level)} left. Send it again in "
                f"{seconds} s, or ask for fewer by max_tokens."
            )
            again = {"Retry-After": str(seconds)}
        return ApiError(429, message, "tokens", "rate_limit_exceeded", self._headers(bucket) | again)


@dataclass
class Reservation:
    """Tokens that a request has taken from its client's budget."""

    budgets: TokenBudgets
    client: str
    tokens: int
    _settled: bool = field(default=False, repr=False)

    def settle(self, used: int) -> None:
        """Give back what was not used; a second time changes nothing."""
        if not self._settled:
            self._settled = True
            self.budgets.give_back(self.client, max(0, self.tokens - used))


def _duration(seconds: float) -> str:
    """As OpenAI's headers have it: `250ms`, `1.5s`, `6m0s`."""
    if seconds < 1:
        return f"{ceil(1000 * seconds)}ms"
    minutes, rest = divmod(ceil(10 * seconds) / 10, 60)
    return f"{int(minutes)}m{rest:.3g}s" if minutes else f"{rest:.3g}s"
