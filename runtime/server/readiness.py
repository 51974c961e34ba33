"""Whether the server serves: what `/health/ready` says from the first moment to the last."""

from __future__ import annotations

from enum import Enum

from outrider.runtime.options.options import Options
from outrider.runtime.server.served import ServedRuntime

_TOKENS = 4  # of a warm-up: those after the prompt are drafted and verified


class Phase(Enum):
    """The phases of a server; the value says why it is not ready, where it is not."""

    LOADING = "the plan is being loaded"
    WARMING = "the plan is loaded, and a first request warms it up"
    NO_REPLICA = "no replica answers; requests wait for one"
    READY = ""
    DRAINING = "the server is shutting down; requests that run are finished"


class Readiness:
    """The phase of a server. Safe in any thread and in signal handlers: every change is one assignment."""

    def __init__(self, phase: Phase = Phase.READY) -> None:
        self._reached, self.draining = phase, False

    def reach(self, phase: Phase) -> None:
        """Continue to `phase`. Nothing comes after DRAINING."""
        if phase is Phase.DRAINING:
            self.draining = True
        else:
            self._reached = phase

    @property
    def phase(self) -> Phase:
        return Phase.DRAINING if self.draining else self._reached

    @property
    def response(self) -> tuple[int, dict[str, str]]:
        """Status and body of `/health/ready`."""
        phase = self.phase
        if phase is Phase.READY:
            return 200, {"status": "ready"}
        return 503, {"status": phase.name.lower(), "reason": phase.value}


def warm_up(served: ServedRuntime) -> None:
    """Serve one short request from prompt to text, as clients' are: no later one is the first. It is counted as they.

    Raises the error that it ends with.
    """
    options = Options(max_new_tokens=_TOKENS, ignore_eos=True, remember=False)
    (handle,) = served.submit_all([([0], options)])
    handle.result()
