"""What an answer carries that its request does not say: ids, and the time.

A server's are new for every answer. A batch's are functions of the request, so that the same batch has the same bytes.
"""

from __future__ import annotations

import hashlib
import secrets
from time import time
from typing import Protocol

_DIGITS = 24


class Stamps(Protocol):
    """Stamps of one answer: the time of `created`, in seconds since 1970, and ids."""

    @property
    def created(self) -> int: ...

    def token(self) -> str:
        """24 hexadecimal digits, others in every call."""


class FreshStamps:
    """The time now, and random ids."""

    def __init__(self) -> None:
        self.created = int(time())

    def token(self) -> str:
        return secrets.token_hex(_DIGITS // 2)


class DerivedStamps:
    """Ids and a seed that are functions of `name`, and a time that is given."""

    def __init__(self, name: str, created: int) -> None:
        self.created, self._name, self._count = created, name, 0

    def token(self) -> str:
        self._count += 1
        return self._digest(f"id {self._count}")[:_DIGITS]

    @property
    def seed(self) -> int:
        """A seed from 0 to 2**63 - 1, for a request that has none."""
        return int(self._digest("seed")[:16], 16) >> 1

    def _digest(self, purpose: str) -> str:
        return hashlib.sha256(f"{purpose}\n{self._name}".encode()).hexdigest()
