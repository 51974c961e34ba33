"""The parent's side of a worker: a process that holds one engine, asked in turn with the others."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from time import perf_counter, sleep
from typing import Any

from outrider.plans.errors import OutriderError
from outrider.tools.lab.child import Child, ChildError
from outrider.tools.lab.peers.engine import Generated, Settings
from outrider.tools.parting import Parting

_GLANCE_SECONDS, _PATIENCE_SECONDS = 0.02, 10.0
_IDLE_SHARE = 0.1  # of one core; a thread that spins takes a whole one


class WorkerError(OutriderError):
    """An engine cannot be loaded, or cannot do what it is asked: its own words."""


class LostEngineError(WorkerError):
    """The process of `engine` ended, or does not rest: none of its modes can continue."""

    def __init__(self, engine: str, reason: str) -> None:
        super().__init__(reason)
        self.engine = engine


class Worker(Child):
    """A process with `engine` loaded. Raises `WorkerError` where it cannot be, or does not do what it is asked, and
    `LostEngineError` once it has ended."""

    def __init__(self, engine: str, settings: Settings) -> None:
        threads = str(settings.threads)
        environment = os.environ | {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
        }
        self.engine = engine
        super().__init__([sys.executable, "-m", "outrider.tools.lab.peers.worker", engine], env=environment)
        try:
            about = self._do(asdict(settings))
        except BaseException:
            self.close()
            raise
        self.version: str = about["version"]
        self.modes: list[str] = about["modes"]
        self.missing: dict[str, str] = about["missing"]

    def generate(self, mode: str, ids: list[int], new: int) -> Generated:
        found = Generated(**self._do({"do": "generate", "mode": mode, "ids": ids, "new": new}))
        if len(found.ids) != new:
            raise WorkerError(f"{self.engine} ({mode}) generated {len(found.ids)} tokens where {new} were asked for")
        return found

    def part(self, number: int, ids: list[int], plain: list[int], other: list[int]) -> Parting | None:
        """Of our own engine: `find_parting`."""
        parting = self._do({"do": "part", "number": number, "ids": ids, "plain": plain, "other": other})["parting"]
        return None if parting is None else Parting(**parting)

    def cpu_ms(self) -> float:
        """What all its threads have used so far."""
        return float(self._do({"do": "cpu"})["cpu_ms"])

    def _do(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = json.loads(self.ask(json.dumps(request)))
        except ChildError as error:
            raise LostEngineError(self.engine, f"the process of {self.engine} ended: {error}") from None
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer


def rest(workers: Sequence[Worker]) -> float:
    """Wait until no worker uses a core: pools of threads spin on for a while after their work.

    Returns the milliseconds of CPU that all have used so far. Raises `LostEngineError` for one that does not rest.
    """
    began = perf_counter()
    before, at = [worker.cpu_ms() for worker in workers], perf_counter()
    while True:
        sleep(_GLANCE_SECONDS)
        now, then = [worker.cpu_ms() for worker in workers], at
        at = perf_counter()
        allowed = 1000 * (at - then) * _IDLE_SHARE
        busy = [w for w, start, end in zip(workers, before, now, strict=True) if end - start > allowed]
        if not busy:
            return sum(now)
        if at - began > _PATIENCE_SECONDS:
            engine = busy[0].engine
            raise LostEngineError(
                engine, f"the idle process of {engine} keeps computing, which would falsify the others' times"
            )
        before = now
