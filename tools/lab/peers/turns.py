"""The modes of all engines, one generation at a time, in turn. One that fails leaves, and the others continue."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, zip_longest
from time import perf_counter

from outrider.plans.errors import OutriderError
from outrider.tools.bench.runs import cost_of
from outrider.tools.lab.peers.engine import ENGINES
from outrider.tools.lab.peers.figures import Generation, Mode
from outrider.tools.lab.peers.process import LostEngineError, Worker, WorkerError, rest
from outrider.tools.measuring import measuring, run_in_turn, turns

Missing = dict[str, str | None]
"""`engine`, `mode` (None: the whole engine) and `reason`."""


class Turns:
    """All modes of `workers`, the engines in turn; first comes the first worker's first mode, our plain decoding.

    What fails is added to `missing` with the reason, and none of its runs count: every mode that is left has run as
    often as the others. Without our plain decoding there is nothing to compare with: its `WorkerError` is raised.
    """

    def __init__(self, workers: Sequence[Worker], missing: list[Missing]) -> None:
        named = [[Mode(worker.engine, mode) for mode in worker.modes] for worker in workers]
        self._modes = [mode for mode in chain.from_iterable(zip_longest(*named)) if mode is not None]
        self._workers = {worker.engine: worker for worker in workers}
        self._plain, self._missing = self._modes[0], missing
        self.idle_share = 0.0
        """The largest share of a core that the idle processes had during a generation."""

    @property
    def modes(self) -> list[Mode]:
        """Modes that have not failed, by engine, our plain decoding first."""
        return sorted(self._modes, key=lambda mode: ENGINES.index(mode.engine))

    def run(self, prompts: Sequence[list[int]], new: int, reps: int) -> None:
        """Every mode on every prompt, `reps` times, after one run that does not count."""

        def run(mode: Mode, prompt: tuple[int, list[int]], repetition: int) -> Generation:
            return self._generate(mode, *prompt, new, counts=repetition > 0)

        items = list(enumerate(prompts))
        planned = turns(self._modes, items, reps, items[:1])
        with measuring([cost_of(len(ids), new) for _, _, (_, ids), _ in planned]) as begin:
            found = run_in_turn(self._modes, items, reps, run, begin=begin, leave=self._leave)
        for mode, runs in found.items():
            mode.runs = runs

    def _generate(self, mode: Mode, index: int, ids: list[int], new: int, *, counts: bool) -> Generation:
        """A generation, once all processes rest. Raises `WorkerError`."""
        worker = self._workers[mode.engine]
        idle = [other for other in self._workers.values() if other is not worker]
        rest([worker, *idle])
        before, started = sum(other.cpu_ms() for other in idle), perf_counter()
        generated = worker.generate(mode.name, ids, new)
        wall_ms = 1000 * (perf_counter() - started)
        if counts:
            self.idle_share = max(self.idle_share, (sum(other.cpu_ms() for other in idle) - before) / wall_ms)
        return Generation(index, generated)

    def _leave(self, mode: Mode, prompt: tuple[int, list[int]], error: OutriderError) -> list[Mode]:
        """The mode, or all those of an engine whose process is lost, which may be another one. Raises for our plain
        decoding."""
        lost = error.engine if isinstance(error, LostEngineError) else None
        gone = [each for each in self._modes if (each is mode if lost is None else each.engine == lost)]
        engine, reason = lost or mode.engine, str(error) if lost else f"prompt {prompt[0]}: {error}"
        if self._plain in gone:
            raise WorkerError(f"{engine}, {self._plain.name}: {reason}")
        self._missing.append({"engine": engine, "mode": None if lost else mode.name, "reason": reason})
        self._modes = [each for each in self._modes if each not in gone]
        if not any(each.engine == engine for each in self._modes):
            self._workers.pop(engine).close()
        return gone
