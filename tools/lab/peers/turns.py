"""The modes of all engines, one generation at a time, in turn. One that fails leaves, and the others go on."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, zip_longest
from time import perf_counter

from outrider.commands.console import progress_bar, stderr
from outrider.tools.bench.time_left import Step, TimeLeft, guess_work
from outrider.tools.lab.peers.engine import ENGINES, Generated
from outrider.tools.lab.peers.figures import Generation, Mode
from outrider.tools.lab.peers.process import LostEngineError, Worker, WorkerError, rest

Missing = dict[str, str | None]
"""`engine`, `mode` (None: the whole engine) and `reason`."""


class Turns:
    """All modes of `workers`, the engines in turn; first comes the first worker's first mode, our plain decoding.

    What fails is added to `missing` with the reason, and none of its runs count: every mode that is left has run as
    often as the others. Without our plain decoding there is nothing to compare with: its `WorkerError` is raised.
    """

    def __init__(self, workers: Sequence[Worker], missing: list[Missing]) -> None:
        named = [[(Mode(worker.engine, mode), worker) for mode in worker.modes] for worker in workers]
        self._turns = [pair for pair in chain.from_iterable(zip_longest(*named)) if pair is not None]
        self._plain, self._missing = self._turns[0][0], missing

    @property
    def modes(self) -> list[Mode]:
        """Modes that have not failed, by engine, our plain decoding first."""
        return sorted((mode for mode, _ in self._turns), key=lambda mode: ENGINES.index(mode.engine))

    def warm_up(self, ids: list[int], new: int) -> None:
        """One generation of each mode, which does not count."""
        for mode, worker in self._turns.copy():
            with stderr.status(f"warming up {mode.engine}, {mode.name}"):
                self._generate(mode, worker, 0, ids, new)

    def run(self, prompts: Sequence[list[int]], new: int, reps: int) -> float:
        """Every mode on every prompt, `reps` times; every second repetition goes the other way round.

        Returns the largest share of a core that the idle processes had during a generation.
        """
        steps = [Step("all modes", index, guess_work(len(ids), new)) for index, ids in enumerate(prompts)]
        left, largest = TimeLeft(steps * reps), 0.0
        with progress_bar("measuring") as progress:
            for repetition in range(reps):
                for index, ids in enumerate(prompts):
                    done, total, seconds = left.begin(steps[index])
                    progress(done, total, f"repetition {repetition}, prompt {index}", seconds)
                    for mode, worker in self._turns[:: -1 if repetition % 2 else 1]:
                        found = self._generate(mode, worker, index, ids, new)
                        if found is not None:
                            mode.runs.append(Generation(index, found[0]))
                            largest = max(largest, found[1])
        return largest

    def _generate(
        self, mode: Mode, worker: Worker, index: int, ids: list[int], new: int
    ) -> tuple[Generated, float] | None:
        """A generation behind the prompt `ids` of this index, once all processes rest, and the share of a core that
        the others had meanwhile. None of a mode that has failed."""
        while any(mode is other for other, _ in self._turns):
            idle = [other for other in dict.fromkeys(of for _, of in self._turns) if other is not worker]
            try:
                rest([worker, *idle])
                before, started = sum(other.cpu_ms() for other in idle), perf_counter()
                generated = worker.generate(mode.name, ids, new)
                wall_ms = 1000 * (perf_counter() - started)
                return generated, (sum(other.cpu_ms() for other in idle) - before) / wall_ms
            except LostEngineError as lost:  # perhaps another one than that whose turn it is: that one then tries again
                self._leave(lost.engine, None, str(lost))
            except WorkerError as error:
                self._leave(mode.engine, mode.name, f"prompt {index}: {error}")
        return None

    def _leave(self, engine: str, name: str | None, reason: str) -> None:
        """A mode goes, or, without `name`, all those of an engine, and its process. Raises for our plain decoding."""
        gone = [(mode, worker) for mode, worker in self._turns if mode.engine == engine and name in (None, mode.name)]
        if any(mode is self._plain for mode, _ in gone):
            raise WorkerError(f"{engine}, {self._plain.name}: {reason}")
        self._missing.append({"engine": engine, "mode": name, "reason": reason})
        self._turns = [pair for pair in self._turns if not any(pair[0] is mode for mode, _ in gone)]
        for worker in dict.fromkeys(worker for _, worker in gone if name is None):
            worker.close()
