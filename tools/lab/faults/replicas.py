"""A plan on Ray Serve, in a cluster of its own, whose replicas are killed, or may take no more memory.

A replica without memory dies, fails or hangs. One that hangs is replaced by Ray once it has missed three health checks,
and has had its time to drain: its requests wait that long.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep

import psutil

from outrider.tools.lab.faults.crowd import Crowd, Ways, ask_all
from outrider.tools.lab.faults.figures import Figures
from outrider.tools.lab.faults.out_of_memory import limit_memory
from outrider.tools.lab.faults.server import Server, held_by
from outrider.tools.lab.faults.setting import Setting, compare

_LOST = "a request lost its replica"  # what the ingress logs
_ENDING = 20.0  # seconds for the processes of a cluster to end by themselves
_STARTING = 120.0  # seconds for replicas to come back
_REPLICAS = 3
_SECONDS_A_KILL = 90.0  # on average: 20 kills in 30 minutes
_FEW = 5  # kills, which may all meet idle replicas
_PATIENCE = 300.0  # seconds: three health checks of 15 s that are missed, 40 s to drain, and a machine that is busy


class Replicas:
    """`count` replicas after `server`; `folder` is Ray's."""

    def __init__(self, server: Server, count: int, folder: Path) -> None:
        self.server, self.count, self._folder = server, count, folder

    def alive(self) -> list[int]:
        """Process ids of the replicas that live, those that still start among them."""
        return self._named("Replica")

    def ingress(self) -> int:
        """Process id of what accepts requests."""
        return self._named("Ingress")[0]

    def _named(self, deployment: str) -> list[int]:
        """The processes that Ray calls replicas of a deployment."""
        title = re.compile(rf"ray::ServeReplica:.*:{deployment}")
        return [each.pid for each in _below(self.server) if title.match(_title(each))]

    def serving(self) -> list[int]:
        """Process ids of the replicas that have loaded the plan, whose weights they have mapped."""
        return [pid for pid in self.alive() if _maps_weights(pid)]

    def kill(self, pid: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def wait(self, least: int) -> bool:
        """Wait until at least that number have loaded the plan; whether that came."""
        until = monotonic() + _STARTING
        while len(self.serving()) < least:
            if monotonic() > until:
                return False
            sleep(0.1)
        return True

    def end_well(self, setting: Setting, figures: Figures) -> None:
        """Hold against a scenario that all replicas are there again, and answer, and that no request is left."""
        figures.check(self.wait(self.count), "A replica that was lost is not replaced.")
        ask_all(self.server.port, setting.questions, figures)
        figures.check(self.server.settle(), "Requests still wait or run.")
        figures.retried = self.retried()

    def retried(self) -> int:
        """How often a request has lost a replica, by the logs."""
        logs = [path for path in self._folder.rglob("*.err") if path.is_file()]
        return sum(path.read_text(encoding="utf-8", errors="replace").count(_LOST) for path in logs)


@contextmanager
def replicas_of(setting: Setting, count: int) -> Iterator[Replicas]:
    """Serve the plan by `count` replicas for a while."""
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # short: Ray's sockets lie in it
    environment = {"RAY_TMPDIR": str(folder), "RAY_USAGE_STATS_ENABLED": "0"}
    cache = ("--cache-tokens", "8192", "--cache-bytes", str(2**26))
    own = ["--replicas", str(count), "--replica-cpus", "0.1", "--threads", str(setting.threads)]
    own += ["--max-waiting", "4096", *cache]
    server = Server(setting.plan, setting.file("ray.log"), own, environment, ("outrider.runtime.ray_serve",))
    started = set[psutil.Process]()
    try:
        with server:
            try:
                yield Replicas(server, count, folder)
            finally:
                started |= set(_below(server))
    finally:
        _end(started)
        shutil.rmtree(folder, ignore_errors=True)


def _end(started: set[psutil.Process]) -> None:
    """Kill what a cluster that did not end well has left of the processes that it started."""
    ours = [process for process in started if "ray" in _title(process)]
    for process in psutil.wait_procs(ours, _ENDING)[1]:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _below(server: Server) -> list[psutil.Process]:
    """All processes that a server has started, directly or not."""
    return list(psutil.Process(server.process.pid).children(recursive=True))


def _title(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def _maps_weights(pid: int) -> bool:
    with suppress(psutil.Error):
        return any("weights" in mapped.path for mapped in psutil.Process(pid).memory_maps())
    return False


def kill(setting: Setting, figures: Figures) -> None:
    """Kills come at random moments of equal slots; each takes one of the replicas that serve, the last one too."""
    draw, kills = setting.draw("killed"), max(2, round(setting.seconds / _SECONDS_A_KILL))
    slot = setting.seconds / kills
    moments = [slot * (place + draw.random()) for place in range(kills)]
    with replicas_of(setting, _REPLICAS) as replicas:
        figures.check(replicas.wait(_REPLICAS), "Not all replicas begin.")
        ask_all(replicas.server.port, setting.questions, figures, setting.clients, rounds=2)
        before = held_by(replicas.ingress())
        with Crowd(replicas.server.port, setting.questions, figures, setting.clients, setting.seed, Ways()):
            began = monotonic()
            for moment in moments:
                while (spent := monotonic() - began) < moment:
                    setting.show(f"{figures.faults} of {kills} kills, {figures.sent} requests, {spent:.0f} s")
                    sleep(min(1.0, moment - spent))
                if replicas.wait(1):
                    replicas.kill(draw.choice(replicas.serving()))
                    figures.count("faults")
            sleep(max(0.0, setting.seconds - (monotonic() - began)))
        replicas.end_well(setting, figures)
        after = held_by(replicas.ingress())
    figures.check(figures.faults == kills, f"{figures.faults} of {kills} kills met a replica.")
    figures.check(figures.retried or kills < _FEW, "No request was under way on a replica that was killed.")
    figures.notes |= {"at, s": [round(moment) for moment in moments], "seed": setting.seed}
    compare(figures, before, after)


def starve(setting: Setting, figures: Figures) -> None:
    """The limit (RLIMIT_AS) is set under load, on one replica, and stays."""
    draw = setting.draw("starved")
    with replicas_of(setting, _REPLICAS) as replicas:
        figures.check(replicas.wait(_REPLICAS), "Not all replicas begin.")
        ask_all(replicas.server.port, setting.questions, figures, setting.clients)
        victim = draw.choice(replicas.serving())
        ways = Ways(patience=_PATIENCE)
        with Crowd(replicas.server.port, setting.questions, figures, setting.clients, setting.seed, ways) as crowd:
            sleep(setting.seconds / 4)
            limit_memory(victim, 0)
            figures.count("faults")
            for spent in setting.until():
                setting.show(f"{figures.sent} requests, {spent:.0f} s")
        replicas.end_well(setting, figures)
        figures.check(victim not in replicas.serving(), "The replica without memory was not replaced.")
    figures.notes["longest wait, s"] = round(max(crowd.waits), 1)
