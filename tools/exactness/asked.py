"""A request, as every process of a comparison knows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Asked:
    """A request: its name for the reader, its prompt (token ids, or a text for a server), and its options.

    `sampling` is the index of its options of sampling in their table, and `place` that of its prompt.
    """

    name: str
    prompt: Any
    options: dict[str, Any]
    sampling: int = 0
    place: int = 0

    @property
    def turn(self) -> int:
        """Index, modulo their number, of the drafter that serves this request in a mixed condition.

        Each sampling meets every drafter, as the next prompt moves on by one.
        """
        return self.sampling + self.place

    def in_half(self, group: int) -> bool:
        """Whether the request is in one of two halves: alternate groups of `group` samplings, swapped from prompt to
        prompt. Other group sizes give halves that are independent of it, and of `turn`."""
        return bool((self.sampling // group + self.place) % 2)
