"""The wall clock jumps by an hour and a day, there and back, while requests, deadlines and idle connections run.

The server runs over a library (`clock.c`) that moves the clock of its whole process, in any of its languages.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
import threading
from pathlib import Path
from time import monotonic, sleep, time

from outrider.plans.errors import RequestError
from outrider.tools.lab.faults.client import Client, plain, read_all
from outrider.tools.lab.faults.crowd import Crowd, Ways, ask_all
from outrider.tools.lab.faults.figures import Figures
from outrider.tools.lab.faults.server import MODEL, Server
from outrider.tools.lab.faults.setting import Setting

_HOUR, _DAY = 3600, 86400
_JUMPS = (_HOUR, -_HOUR, 0, _DAY, -_DAY, 0)
_FAR = 3000.0  # seconds of a deadline that no request reaches, unless a jump counts
_DRAIN = 30.0


def run(setting: Setting, figures: Figures) -> None:
    """The seconds go to the jumps in equal parts; requests have a deadline of milliseconds, or one of 50 minutes."""
    library, clock = build_clock(setting.file("clock.so")), setting.file("clock")
    _set(clock, 0)
    environment = {"LD_PRELOAD": str(library), "FAULTS_CLOCK": str(clock)}
    options = ("--drain-seconds", str(_DRAIN), "--head-seconds", "5", "--idle-seconds", "5")
    ways = Ways(deadlines=0.2, far_deadline=_FAR)
    with setting.serve(*options, environment=environment) as server:
        with setting.watched(server, figures):
            with Crowd(server.port, setting.questions, figures, setting.clients // 2, setting.seed, ways) as crowd:
                for jump in _JUMPS:
                    setting.show(f"{jump / _HOUR:+.0f} h")
                    figures.count("faults")
                    with plain(server.port) as idle:
                        idle.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                        sleep(setting.seconds / len(_JUMPS) / 2)
                        _set(clock, jump)
                        sleep(setting.seconds / len(_JUMPS) / 2)
                        figures.check(b"200 OK" in idle.recv(4096), "An idle connection had no answer.")
                    _check_created(server, figures, jump)
                    _check_idle(server, figures, clock, jump)
            figures.notes["longest wait, s"] = round(max(crowd.waits), 2)
        _drain(server, setting, figures, clock)


def build_clock(out: Path) -> Path:
    """Compile the library. Raises RequestError without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("g++")
    if compiler is None:
        raise RequestError("The clock is moved by a library in C, and there is no compiler (cc); install one.")
    source = Path(__file__).with_name("clock.c")
    command = [compiler, "-x", "c", "-shared", "-fPIC", "-O1", str(source), "-o", str(out), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RequestError(f"{source} cannot be compiled: {done.stderr.strip()}")
    return out


def _set(clock: Path, seconds: int) -> None:
    """In place: the server has the file mapped."""
    with clock.open("r+b" if clock.exists() else "w+b") as file:
        file.write(struct.pack("=q", seconds))


def _check_created(server: Server, figures: Figures, jump: int) -> None:
    """`created`, which alone depends on the clock, shows that it has moved."""
    created = Client(server.port).ask({"model": MODEL, "prompt": [1], "max_tokens": 1}).created or 0
    figures.check(abs(created - time() - jump) < _HOUR / 4, f"created is off by {created - time():.0f} s at {jump} s.")


def _check_idle(server: Server, figures: Figures, clock: Path, jump: int) -> None:
    """A connection may idle for its seconds from the last answer, by any clock."""
    with plain(server.port) as idle:
        idle.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        idle.recv(4096)
        _set(clock, jump + _HOUR)
        sleep(1.0)
        idle.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        figures.check(b"200 OK" in read_all(idle), "A connection that idled for a second was closed.")
        _set(clock, jump)


def _drain(server: Server, setting: Setting, figures: Figures, clock: Path) -> None:
    """The server is asked to end, and the clock jumps while the last requests run."""
    asking = threading.Thread(target=ask_all, args=(server.port, setting.questions, figures, 16), daemon=True)
    asking.start()
    while not server.metrics()["outrider_requests_running"] and asking.is_alive():
        sleep(0.01)
    asking.join()
    stream = {"model": MODEL, "prompt": [1], "max_tokens": 100, "ignore_eos": True, "stream": True, "drafter": "none"}
    figures.count("sent")
    ended: list[float] = []

    def leave(events: int) -> bool:
        if events == 1:
            server.process.terminate()
            _set(clock, _DAY)
            ended.append(monotonic())
        return False

    answer = Client(server.port).ask(stream, leave)
    if answer.done and answer.error is None and answer.choices[0].finish == "length":
        figures.count("answered")
    else:
        figures.lose(f"A stream did not end while the server drained and the clock jumped: {answer.error}")
    figures.check(server.process.wait(_DRAIN) == 0, "The server did not end with status 0.")
    figures.notes["drained in, s"] = round(monotonic() - ended[0], 2)
