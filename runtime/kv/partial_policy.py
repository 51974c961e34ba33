"""How far a sequence runs ahead of the full cache, and how many blocks it retrieves: by what was measured."""

from __future__ import annotations

_LENGTHS = (4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_KNOWN = 2  # rounds, or confirmations, that say something
_CYCLES = 16  # confirmations before a plain round
_DISABLED_ROUNDS, _MOST_DISABLED_ROUNDS = 16, 256  # plain rounds
_FADING = 0.9  # weight of what was measured before, a confirmation later
_FADING_PASS = 0.98  # and a pass later: there are several to a confirmation


class Interval:
    """The number of tokens to confirm at once that brings most tokens a second; none while rounds over the full cache
    alone bring more.

    With `a` the share of tokens that agree, `n` that wait become (1 - a^(n+1)) / (1 - a) in the mean. They cost passes
    over the partial cache and one over the full one, whose time grows with n. A round over the full cache alone would
    bring what a pass over the partial one does (texts have easy and hard stretches), or what such rounds last brought,
    if that is more.
    """

    def __init__(self, most: int) -> None:
        self._lengths = [length for length in _LENGTHS if length <= most] or [most]
        self._agreed, self._parted = 30.0, 1.0  # tokens
        self._small = [0.0] * 4  # sums of 1, ms, tokens, drafted tokens over passes over the partial cache
        self._full = [0.0] * 5  # sums of 1, n, n^2, ms, n ms over confirmations
        self._fill_ms = 0.0  # sum over them
        self._plain = [0.0] * 3  # sums of 1, ms, tokens over plain rounds
        self._plain_rounds = 0
        self._cycles = 0  # confirmations since the last plain round
        self._tried = 0  # confirmations since running ahead began, or began again
        self._disabled_rounds = 0  # plain rounds to come before it is tried again
        self._next_disabled = _DISABLED_ROUNDS
        self.length = min(16, self._lengths[-1])

    @property
    def agreement(self) -> float:
        """Share of tokens that agree with the full cache, where those before them do."""
        return self._agreed / (self._agreed + self._parted)

    @property
    def ahead(self) -> bool:
        """Whether to run ahead now: not before plain rounds have been measured, and again once in a while."""
        return self._plain_rounds >= _KNOWN and not self._disabled_rounds and self._cycles < _CYCLES

    def note_plain(self, ms: float, tokens: int) -> None:
        """Record a round over the full cache alone, which brought `tokens`."""
        self._plain = _faded(self._plain, _FADING, (1, ms, tokens))
        self._plain_rounds += 1
        self._cycles = 0
        if self._disabled_rounds:
            self._disabled_rounds -= 1
            self._tried = 0

    def note_pass(self, ms: float, tokens: int, drafted: int) -> None:
        """Record a pass over the partial cache, which brought `tokens`, of `drafted` ones and one more."""
        self._small = _faded(self._small, _FADING_PASS, (1, ms, tokens, drafted))

    def note_confirmed(self, ms: float, waited: int, agreed: int, fill_ms: float) -> None:
        """Record a pass over the full cache that confirmed `agreed` of `waited` tokens; filling the partial cache
        before it took `fill_ms`.
        """
        self._agreed = _FADING * self._agreed + agreed
        self._parted = _FADING * self._parted + (agreed < waited)
        self._full = _faded(self._full, _FADING, (1, waited, waited**2, ms, waited * ms))
        self._fill_ms = _FADING * self._fill_ms + fill_ms
        self.length = max(self._lengths, key=self._tokens_per_ms)
        self._cycles += 1
        self._tried += 1
        if self._tried < _KNOWN or not self._plain_rounds:
            return
        if self._tokens_per_ms(self.length) < self._alone_per_ms():
            self._disabled_rounds = self._next_disabled
            self._next_disabled = min(2 * self._next_disabled, _MOST_DISABLED_ROUNDS)
        else:
            self._next_disabled = _DISABLED_ROUNDS

    def _tokens_per_ms(self, length: int) -> float:
        agreement = min(self.agreement, 0.9999)
        tokens = (1 - agreement ** (length + 1)) / (1 - agreement)
        _, ms, brought, _ = self._small
        small = length * ms / brought if brought else 0.0
        return tokens / (small + self._full_ms(length) + self._fill_ms / self._full[0])

    def _alone_per_ms(self) -> float:
        """Return the tokens a millisecond of rounds over the full cache alone."""
        passes, _, brought, drafted = self._small
        rounds, plain_ms, plain_tokens = self._plain
        if not passes:
            return plain_tokens / plain_ms
        ms = max(self._full_ms(drafted / passes), plain_ms / rounds / 2)  # a line through few points may end anywhere
        return max(brought / passes / ms, plain_tokens / plain_ms)

    def _full_ms(self, length: float) -> float:
        count, n, squares, ms, products = self._full
        spread = count * squares - n * n
        if spread < 1e-6 * squares * count:  # always the same length: in proportion, so that others are tried
            return ms / count * (length + 1) / (n / count + 1)
        slope = max(0.0, (count * products - n * ms) / spread)
        return max(1e-3, (ms - slope * n) / count + slope * length)


def _faded(sums: list[float], by: float, new: tuple[float, ...]) -> list[float]:
    return [by * old + more for old, more in zip(sums, new, strict=True)]


class Budget:
    """Blocks that a generation retrieves. One that was not asked for a number finds its own.

    It begins with an eighth of the context, or fewer where little is left to say, as they have to be copied first.
    Where tokens part too often it doubles, where they hardly do it halves.
    """

    LEAST = 8
    _OFTEN, _HARDLY = 0.05, 0.01  # of tokens that are checked
    _WORTH = 64  # checked tokens that say something

    def __init__(self, most: int, asked: int | None, blocks: int, room: int, needed: int = 1) -> None:
        """The number `asked` for, or one that suits `blocks` of context and `room` for tokens to come; at most `most`.

        Layers with windows need `needed` blocks, independent of measurements.
        """
        self._most, self._fixed = most, asked is not None
        least = min(max(self.LEAST, needed), most)
        self.blocks = asked if asked is not None else min(max(least, min(blocks // 8, room)), most)
        self._least = least
        self._checked = self._parted = 0

    def note_confirmed(self, waited: int, agreed: int) -> None:
        """Record that `agreed` of `waited` tokens were confirmed."""
        self._checked += min(agreed + 1, waited)
        self._parted += agreed < waited
        if self._fixed or self._checked < self._WORTH:
            return
        share = self._parted / self._checked
        if share > self._OFTEN:
            self.blocks = min(2 * self.blocks, self._most)
        elif share < self._HARDLY:
            self.blocks = max(self.blocks // 2, self._least)
        self._checked = self._parted = 0
