"""A server that may take no more memory: requests have their tokens or an error, and it recovers once it may again."""

from __future__ import annotations

import resource
from contextlib import suppress
from pathlib import Path
from subprocess import TimeoutExpired
from time import sleep

from outrider.tools.lab.faults.client import Answer
from outrider.tools.lab.faults.crowd import Crowd, Ways, ask_all
from outrider.tools.lab.faults.figures import Figures
from outrider.tools.lab.faults.server import Server
from outrider.tools.lab.faults.setting import Setting

_ROOMS = (0, 2**20, 2**22, 2**24)  # bytes that it may take beyond what it has


def run(setting: Setting, figures: Figures) -> None:
    """The limit (RLIMIT_AS) is set under load, and lifted again, each with a little more room.

    A process may die of it, as libraries abort where memory is not given, and the system where a stack cannot grow. Its
    connections end then, and the next one serves.
    """
    ways = Ways(excuses=_is_error, breaks=True)
    died = list[int]()
    for room in _ROOMS:
        setting.show(f"{room >> 10} KB more")
        with setting.serve() as server:
            ask_all(server.port, setting.questions, figures)
            with Crowd(server.port, setting.questions, figures, setting.clients // 2, setting.seed, ways):
                sleep(setting.seconds / len(_ROOMS) / 2)
                limit_memory(server.process.pid, room)
                figures.count("faults")
                _await_end(server, setting.seconds / len(_ROOMS))
                limit_memory(server.process.pid, None)
            if server.process.poll() is None:
                figures.check(server.settle(), f"Requests hang after a lack of memory: {server.said[-1000:]}")
                ask_all(server.port, setting.questions, figures)
                figures.check(server.end() == 0, "The server does not end with status 0 after a lack of memory.")
            else:
                died.append(server.process.returncode)
    figures.notes["died of signals"] = [-status for status in died]
    with setting.serve() as server:
        ask_all(server.port, setting.questions, figures)


def _await_end(server: Server, seconds: float) -> None:
    with suppress(TimeoutExpired):
        server.process.wait(seconds)


def limit_memory(pid: int, room: int | None) -> None:
    """Let a process take `room` bytes more of addresses than it has; without, any number."""
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    with suppress(OSError):  # it has ended
        if room is None:
            resource.prlimit(pid, resource.RLIMIT_AS, (most, most))
        else:
            pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[0])
            resource.prlimit(pid, resource.RLIMIT_AS, (pages * resource.getpagesize() + room, most))


def _is_error(answer: Answer) -> bool:
    """Whether it is the error of a server, in its usual shape."""
    return (answer.status >= 500 or answer.status == 200) and bool((answer.error or {}).get("message"))
