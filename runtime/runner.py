"""What a scheduler drives: requests, a pass at a time. `BranchRunner` runs many at once, `SessionRunner` one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from runtime.branch_request import BranchRequest
from runtime.branch_stream import BranchSpan, BranchStats


class Runs(Protocol):
    """A request that runs."""

    @property
    def decoding(self) -> bool:
        """Whether its passes bring tokens, and a long prompt of another one would delay them."""

    @property
    def stopped(self) -> bool:
        """Whether its text has ended: what was committed since is nothing."""


class Committed(Protocol):
    """What a pass has brought of one request."""

    @property
    def running(self) -> Runs: ...


R = TypeVar("R", bound=Runs)
C = TypeVar("C", bound=Committed)


class Runner(Protocol[R, C]):
    """Runs requests for a scheduler, in its thread; `show` alone may be called in another one."""

    def begin(self, prefix: Sequence[int], drafters: set[str | None]) -> bool:
        """Forget what runs, such as after a fault; those to come stand behind `prefix` and ask these drafters.

        Returns whether the prefix's rows are there.
        """

    def fits(self, asked: BranchRequest) -> bool:
        """Whether there is room for one more request, whatever the others come to."""

    def admit(self, place: int, asked: BranchRequest) -> R:
        """A request that fits begins; what it says is told by `place`."""

    def advance(self, running: list[R], stats: BranchStats, chunk: int | None = None) -> list[C]:
        """One pass: what it commits of each request, for `show`. At most `chunk` tokens of prompts go in."""

    def show(self, committed: C) -> BranchSpan:
        """The text of what was committed, pass by pass; may run beside the next pass."""

    def settle(self, running: list[R]) -> None:
        """Let go of those who are over; they are `running` no more."""
