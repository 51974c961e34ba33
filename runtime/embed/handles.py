"""Objects of Python that C holds by number."""

from __future__ import annotations

import threading
from enum import IntEnum
from itertools import count
from typing import Any


class Kind(IntEnum):
    """The object of a handle (`bridge.h`)."""

    RUNTIME = 1
    SESSION = 2
    PARAMS = 3
    RESULT = 4
    TEXT = 5
    BRANCHES = 6
    REQUEST = 7


class InvalidHandleError(Exception):
    """A number that stands for nothing, or for something else."""


class InvalidArgumentError(Exception):
    """Bytes that are no text, JSON that is no object of options, or a key that is unknown."""


class CallbackError(Exception):
    """A function of the program's has thrown an exception, or given up."""


class QueueFullError(Exception):
    """Too many requests wait."""


class Handles:
    """Objects by number. Numbers are never used again, so that a stale one finds nothing."""

    def __init__(self) -> None:
        self._numbers = count(0x1000)
        self._objects: dict[int, tuple[Kind, Any]] = {}
        self._lock = threading.Lock()

    def add(self, kind: Kind, made: object) -> int:
        with self._lock:
            number = next(self._numbers)
            self._objects[number] = kind, made
        return number

    def get(self, kind: Kind, number: int) -> Any:
        found = self._objects.get(number)
        if found is None or found[0] is not kind:
            raise InvalidHandleError(_wrong(kind, number, found))
        return found[1]

    def all(self, kind: Kind) -> list[Any]:
        with self._lock:
            return [made for own, made in self._objects.values() if own is kind]

    def remove(self, kind: Kind, number: int) -> Any:
        with self._lock:
            found = self.get(kind, number)
            del self._objects[number]
        return found


def _wrong(kind: Kind, number: int, found: tuple[Kind, Any] | None) -> str:
    wanted = f"a handle of a {kind.name.lower()} is expected"
    if not number:
        return f"{wanted}, and NULL was passed"
    if found is None:
        return f"{wanted}, and {number:#x} is none: it was destroyed, or never made"
    return f"{wanted}, and {number:#x} is one of a {found[0].name.lower()}"
