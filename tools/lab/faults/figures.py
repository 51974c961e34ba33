"""The figures of a scenario: what became of every request, and what the server still holds after them."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass, field
from typing import Any

_KEPT = 20  # sentences about what went wrong


@dataclass
class Figures:
    """Counts of requests and of what leaked. Safe to count in from several threads.

    Every request that is `sent` ends as one of the next five: `answered` whole, and compared; `refused` with an error
    that the scenario provokes; `cut`, as its client left, or its deadline or the server's end came, and what had come
    until then compared; `lost`: no answer, or an error that nothing excuses; `different`: other tokens than plain
    decoding's. `retried` requests continued on another replica. `faults` counts what the scenario did to the server.
    """

    name: str
    faults: int = 0
    sent: int = 0
    answered: int = 0
    refused: int = 0
    cut: int = 0
    lost: int = 0
    different: int = 0
    retried: int = 0
    leaked_files: int = 0
    leaked_threads: int = 0
    leaked_mb: float = 0.0
    seconds: float = 0.0
    notes: dict[str, Any] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def count(self, what: str, number: int = 1) -> None:
        with self._lock:
            setattr(self, what, getattr(self, what) + number)

    def lose(self, sentence: str) -> None:
        self.count("lost")
        self.fail(sentence)

    def differ(self, sentence: str) -> None:
        """Count an answer with other tokens, and say which."""
        self.count("different")
        self.fail(sentence)

    def fail(self, sentence: str) -> None:
        """Note what is wrong besides requests: the scenario has failed."""
        with self._lock:
            if len(self.wrong) < _KEPT:
                self.wrong.append(sentence)

    def check(self, holds: object, sentence: str) -> None:
        """`fail` with the sentence unless `holds`."""
        if not holds:
            self.fail(sentence)

    @property
    def passed(self) -> bool:
        """Whether nothing is lost, different, leaked or otherwise wrong, and every request is accounted for."""
        ends = self.answered + self.refused + self.cut + self.lost + self.different
        return not self.wrong and ends == self.sent

    def to_json(self) -> dict[str, Any]:
        """All fields with stable keys, and whether the scenario passed."""
        with self._lock:
            fields = {key: value for key, value in self.__dict__.items() if not key.startswith("_")}
        return {**fields, "passed": self.passed}


@dataclass(frozen=True)
class Held:
    """What a process holds at a moment: open files, threads, resident memory."""

    files: int
    threads: int
    megabytes: float

    def to_json(self) -> dict[str, float]:
        return asdict(self)
