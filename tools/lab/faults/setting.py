"""What all scenarios are given: the plan, its questions, how long, and how much may change in what a server holds."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep

from outrider.tools.lab.faults.crowd import ask_all
from outrider.tools.lab.faults.figures import Figures, Held
from outrider.tools.lab.faults.questions import Question
from outrider.tools.lab.faults.server import Server

# Servers here have one arena of memory, which gives back what is freed: with one for each thread, as usual, a process
# keeps 300 MB of what large grammars took for a moment. What stays is learnt once: shapes of passes, modules.
_ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": "131072"}
MEMORY_MB = 96.0
_CACHE_BYTES = 2**26  # full after the warm-up, or nearly: else filling it would look like a leak
THREADS = 6  # workers that a pool makes when more ask at once than in the warm-up, and ends when it likes to
_SETTLING = 30.0  # seconds until connections that idle have been closed


@dataclass
class Setting:
    """`seconds` is how long a scenario puts its fault under load, `clients` how many ask, `scale` a share of what the
    whole form does, for faults that are counted. `work` is a folder for files, `show` reports progress."""

    plan: Path
    questions: list[Question]
    work: Path
    seconds: float
    seed: int
    clients: int = 32
    scale: float = 1.0
    threads: int = 1
    new: int = 40
    prompts: Path | None = None
    show: Callable[[str], None] = lambda _: None
    _made: int = field(default=0, repr=False)

    def draw(self, name: str) -> random.Random:
        return random.Random(f"{self.seed} {name}")

    def times(self, whole: int, least: int = 1) -> int:
        return max(least, round(whole * self.scale))

    def file(self, name: str) -> Path:
        """A file of its own in the folder for files."""
        self._made += 1
        return self.work / f"{self._made}-{name}"

    def serve(self, *options: str, plan: Path | None = None, environment: dict[str, str] | None = None) -> Server:
        cache = ("--cache-tokens", "8192", "--cache-bytes", str(_CACHE_BYTES))
        own = ("--threads", str(self.threads), "--max-waiting", "4096", *cache, *options)
        return Server(plan or self.plan, self.file("server.log"), own, _ALLOCATOR | (environment or {}))

    def until(self) -> Iterator[float]:
        """The seconds since the first value, every tenth of one, for as long as the scenario is under load."""
        began = monotonic()
        while (spent := monotonic() - began) < self.seconds:
            yield spent
            sleep(0.1)

    @contextmanager
    def watched(self, server: Server, figures: Figures) -> Iterator[None]:
        """Warm the server up; after the block hold what it holds against what it held before, and its answers too."""
        ask_all(server.port, self.questions, figures, self.clients, rounds=2)
        before = self._held(server, None)
        yield
        if not server.settle():
            figures.fail(f"Requests still wait or run: {_counts(server)}.")
        ask_all(server.port, self.questions, figures, self.clients)
        after = self._held(server, before)
        compare(figures, before, after)

    def _held(self, server: Server, before: Held | None) -> Held:
        """What it holds once it has settled, and once connections are closed that idle."""
        server.settle()
        until = monotonic() + _SETTLING
        held = server.held()
        while monotonic() < until:
            sleep(0.25)
            last, held = held, server.held()
            if held.files == last.files and (before is None or held.files <= before.files):
                break
        return held


def _counts(server: Server) -> str:
    figures = server.metrics()
    return ", ".join(f"{name} {figures[f'outrider_requests_{name}']:g}" for name in ("waiting", "running"))


def compare(figures: Figures, before: Held, after: Held) -> None:
    """Note what a process holds more than before, and fail where that is a leak."""
    figures.leaked_files = max(0, after.files - before.files)
    figures.leaked_threads = max(0, after.threads - before.threads)
    figures.leaked_mb = round(max(0.0, after.megabytes - before.megabytes), 1)
    figures.notes |= {"before": before.to_json(), "after": after.to_json()}
    figures.check(not figures.leaked_files, f"{figures.leaked_files} files are open more than before.")
    figures.check(figures.leaked_threads <= THREADS, f"{figures.leaked_threads} threads run more than before.")
    figures.check(figures.leaked_mb <= MEMORY_MB, f"{figures.leaked_mb} MB are held more than before.")
