"""The KV that a drafter's cache keeps of a long sequence: its beginning and its end."""

from __future__ import annotations

from collections.abc import Iterator

from outrider.plans.manifest import Geometry
from outrider.runtime.kv.memory import KvMemory
from outrider.runtime.kv.slots import FIRST, SlotTable
from outrider.runtime.kv.token_kv import TokenKv

_FEW = 16  # tokens


class WindowedRow:
    """KV is counted in the sequence: `end` is the number of the next token. `lead` tokens at the beginning have none.

    With a `window`, KV between the sink and the last `window` to twice as many tokens is dropped. What is kept lies in
    order from slot 0 on: `_front` tokens of the beginning, and where `_dropped` are missing, those after the gap.
    """

    def __init__(self, kv: KvMemory, geometry: Geometry, slots: SlotTable, lead: int) -> None:
        self.slots, self._kv, self._lead = slots, kv, lead
        self._sink, self.window = geometry.sink, geometry.window
        self._room = geometry.sink + 2 * geometry.window
        self._front = self._dropped = 0
        self.leading = TokenKv(self._kv, lead)  # KV of the beginning, by tokens

    @property
    def end(self) -> int:
        return self.slots.length + self._dropped

    @property
    def known(self) -> int:
        """Number of leading tokens that have KV, up to the gap."""
        solid = self._front if self._dropped else self.slots.length
        return solid + self._lead if solid else 0

    @property
    def reach(self) -> int:
        """Number of leading tokens up to the last that has KV."""
        return self.end + self._lead if self.end else 0

    def truncate(self, end: int) -> None:
        """Drop KV from token `end` on; where that is in the gap, drop what lies after the gap too."""
        if self._dropped and end < self._front + self._dropped:
            end, self._dropped = min(end, self._front), 0
        self.slots.truncate(max(end - self._dropped, 0))

    def make_room(self, count: int) -> None:
        """Make room for `count` more tokens, at most a window."""
        if not self.window or self.slots.length + count <= self._room:
            return
        first = self.slots.length - self.window
        if not self._dropped:
            self._front = self._sink
        self._kv.copy(self._front, self._kv, first, self.window)
        self.slots.shift(first, self._front, self.window)
        self._dropped += first - self._front

    def skip_to(self, end: int) -> None:
        """Drop the KV between the sink and token `end`, which is the next one."""
        if end <= self.end:
            return
        if not self._dropped:
            self._front = min(self.slots.length, self._sink)
        self.slots.truncate(self._front)
        self._dropped = end - self._front

    def too_far(self, end: int) -> bool:
        """Whether token `end` lies so far after the last one with KV that those between are better dropped: of a
        sequence that the KV cache could not hold whole, and not just a few."""
        return bool(self.window) and end > self._room and end - self.end > _FEW

    def pass_over(self, length: int, end: int) -> None:
        """The sequence has `length` tokens: KV up to token `end` that will be dropped need not be computed."""
        if self.window and self.end >= self._sink:
            self.skip_to(min(length - self.window, end))

    def missing(self, known: int) -> Iterator[tuple[int, int, TokenKv]]:
        """Parts to copy here so that `known` leading tokens have KV, but for those that a window drops.

        First token, the one after the last, and where their KV goes; then `restore`.
        """
        gap = self._gap(known)
        if not gap:
            yield self.known, known, self.leading
            return
        if self.known < self._sink + self._lead:
            yield self.known, self._sink + self._lead, self.leading
        yield known - self.window, known, TokenKv(self._kv, self._lead + gap)

    def restore(self, known: int) -> None:
        """Count the KV that was `missing` as copied."""
        gap = self._gap(known)
        last = known - self._lead - gap - self._sink
        self.slots.truncate(0)
        self.slots.claim(self._sink + min(last, 0), FIRST, 0)
        self.slots.claim(max(last, 0), FIRST, self._sink + gap)
        self._front, self._dropped = self._sink, gap

    def _gap(self, known: int) -> int:
        """Return the tokens whose KV is dropped where `known` leading tokens have KV."""
        end = known - self._lead
        return 0 if not self.window or end <= self._room else end - self.window - self._sink
