"""Grammars of texts: deterministic automata over bytes, built from a few combinators.

A piece is built with `literal`, `one_of`, `sequence`, `choice` and `repeat`; `Grammar` makes a table of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

DEAD = -1
_MOST_STATES = 20_000

_Edges = list[tuple[frozenset[int], int]]


@dataclass(frozen=True)
class Piece:
    """Part of a grammar: an operator, and its parts or bytes."""

    kind: str
    parts: tuple[Piece, ...] = ()
    given: tuple[frozenset[int], ...] = ()
    least: int = 1
    most: int | None = 1


def literal(text: str) -> Piece:
    """Match exactly this text."""
    return Piece("bytes", given=tuple(frozenset({byte}) for byte in text.encode()))


def one_of(allowed: Iterable[int]) -> Piece:
    """Match one of these bytes."""
    return Piece("bytes", given=(frozenset(allowed),))


def sequence(*parts: Piece) -> Piece:
    """Match the parts one behind another."""
    return Piece("sequence", parts)


def choice(*parts: Piece) -> Piece:
    """Match any one of the parts."""
    return Piece("choice", parts)


def repeat(part: Piece, least: int = 0, most: int | None = None) -> Piece:
    """Match from `least` to `most` times; without `most`, any number of times."""
    return Piece("repeat", (part,), least=least, most=most)


class Grammar:
    """An automaton: `table` int32 `[states, 256]` is the next state of each byte, `DEAD` where the byte is not allowed.

    `ends` bool `[states]` says where the text may end. The text begins in state 0, and from every state an end can be
    reached.
    """

    def __init__(self, form: Piece) -> None:
        self._edges: list[_Edges] = []
        self._free: list[list[int]] = []  # states that are reached without a byte
        first = self._state()
        last = self._build(form, first)
        self.table, self.ends = self._determine(first, last)

    def follow(self, state: int, text: bytes) -> int:
        """Return the state behind `text`; `DEAD` where it is not allowed."""
        for byte in text:
            if state == DEAD:
                break
            state = int(self.table[state, byte])
        return state

    def _state(self) -> int:
        self._edges.append([])
        self._free.append([])
        return len(self._edges) - 1

    def _build(self, piece: Piece, first: int) -> int:
        """Add a piece behind a state; return the state behind it."""
        if piece.kind == "bytes":
            for allowed in piece.given:
                then = self._state()
                self._edges[first].append((allowed, then))
                first = then
        elif piece.kind == "sequence":
            for part in piece.parts:
                first = self._build(part, first)
        elif piece.kind == "choice":
            last = self._state()
            for part in piece.parts:
                start = self._state()
                self._free[first].append(start)
                self._free[self._build(part, start)].append(last)
            first = last
        else:
            (part,) = piece.parts
            for _ in range(piece.least):
                first = self._build(part, first)
            last = self._state()
            self._free[first].append(last)
            if piece.most is None:
                start = self._state()
                self._free[first].append(start)
                behind = self._build(part, start)
                self._free[behind] += [start, last]
            else:
                for _ in range(piece.most - piece.least):
                    first = self._build(part, first)
                    self._free[first].append(last)
            first = last
        return first

    def _determine(self, first: int, last: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Subset construction."""
        start = self._reach({first})
        states = {start: 0}
        waiting, rows = [start], []
        while waiting:
            found = waiting.pop(0)
            leads: dict[int, set[int]] = {}
            for state in found:
                for allowed, then in self._edges[state]:
                    for byte in allowed:
                        leads.setdefault(byte, set()).add(then)
            row = np.full(256, DEAD, np.int32)
            known: dict[frozenset[int], int] = {}
            for byte, behind in leads.items():
                key = frozenset(behind)
                if key not in known:
                    closed = self._reach(key)
                    if closed not in states:
                        if len(states) == _MOST_STATES:
                            raise ValueError(
                                f"the form has more than {_MOST_STATES} states; make its repetitions shorter"
                            )
                        states[closed] = len(states)
                        waiting.append(closed)
                    known[key] = states[closed]
                row[byte] = known[key]
            rows.append(row)
        return _trimmed(np.stack(rows), np.array([last in found for found in states]))

    def _reach(self, states: Iterable[int]) -> frozenset[int]:
        found, waiting = set(states), list(states)
        while waiting:
            for state in self._free[waiting.pop()]:
                if state not in found:
                    found.add(state)
                    waiting.append(state)
        return frozenset(found)


def _trimmed(table: NDArray[np.int32], ends: NDArray[np.bool_]) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Return the table without transitions to states from which no end can be reached."""
    alive = ends.copy()
    while True:
        more = alive | (alive[table] & (table != DEAD)).any(axis=1)
        if (more == alive).all():
            return np.where((table != DEAD) & alive[table], table, DEAD).astype(np.int32), ends
        alive = more
