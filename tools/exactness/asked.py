"""A request, as every process of a comparison knows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Asked:
    """A request: its name for the reader, its prompt (token ids, or a text for a server), and its options.

    `way` is the index of its way of choosing tokens, and `place` that of its prompt.
    """

    name: str
    prompt: Any
    options: dict[str, Any]
    way: int = 0
    place: int = 0

    @property
    def turn(self) -> int:
        """Whose turn it is among any number of drafters: at its next prompt, a way has the next one."""
        return self.way + self.place

    def in_half(self, ways: int) -> bool:
        """Whether it is in the half that every second run of so many ways makes; at the next prompt, the other one.

        Halves of different runs, and turns, cross: none goes with another one, or with a way, alone.
        """
        return bool((self.way // ways + self.place) % 2)
