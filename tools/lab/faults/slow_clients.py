"""Clients that leave at random moments, or send or read a byte a second: nothing stays, and others do not wait."""

from __future__ import annotations

import json
import socket
import threading
from time import monotonic, sleep

import psutil

from outrider.tools.lab.faults.client import FAILURES, plain, read_all
from outrider.tools.lab.faults.crowd import Crowd, Ways
from outrider.tools.lab.faults.figures import Figures
from outrider.tools.lab.faults.server import MODEL, Server
from outrider.tools.lab.faults.setting import Setting

_HEAD, _BODY, _SEND = 3.0, 4.0, 3.0  # seconds that the server gives
_LATE = 15.0  # seconds beyond which a limit was not kept, on a machine that does other things
_RECEIVE = 2048  # bytes that the system keeps of what a slow reader has not read
_HEADERS = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
_READERS = 6  # of streams that do not fit into what the system keeps: each makes the server compute thousands of tokens
_MOST_MB = 256.0  # more than before, while spans of all readers wait
_WAITING = 5.0  # seconds that others may wait longer for their answers


def run(setting: Setting, figures: Figures) -> None:
    """Most are slow in the head or the body, some in reading. Others ask and are timed, without the slow ones first."""
    count = setting.times(300, 12)
    limits = ("--head-seconds", str(_HEAD), "--body-seconds", str(_BODY), "--send-seconds", str(_SEND))
    with setting.serve(*limits) as server, setting.watched(server, figures):
        quiet = _others(setting, server, figures, setting.seconds / 4)
        before = server.held().megabytes
        slow = [
            threading.Thread(target=_slow, args=(setting, server, figures, place), daemon=True)
            for place in range(count)
        ]
        for thread in slow:
            thread.start()
        most, waits = 0.0, list[float]()
        with Crowd(server.port, setting.questions, figures, 4, setting.seed, Ways(pause=0.05)) as crowd:
            while any(thread.is_alive() for thread in slow):
                most = max(most, server.held().megabytes)
                setting.show(f"{sum(thread.is_alive() for thread in slow)} slow clients, {len(crowd.waits)} answers")
                sleep(0.2)
        waits += crowd.waits
        figures.notes |= {
            "median wait without, s": round(_middle(quiet), 3),
            "median wait beside, s": round(_middle(waits), 3),
            "longest wait beside, s": round(max(waits), 2),
            "most memory, MB": round(most),
        }
        figures.check(most <= before + _MOST_MB, f"{most:.0f} MB are held for slow clients, and {before:.0f} before.")
        figures.check(_middle(waits) <= _middle(quiet) + _WAITING, "Others wait for slow clients.")


def disconnect(setting: Setting, figures: Figures) -> None:
    """Half of the clients' requests are left, a fifth of the others have milliseconds."""
    ways = Ways(streams=0.6, leaves=0.5, deadlines=0.2)
    with setting.serve() as server, setting.watched(server, figures):
        with Crowd(server.port, setting.questions, figures, setting.clients, setting.seed, ways):
            for spent in setting.until():
                setting.show(f"{figures.cut} of {figures.sent} cut off after {spent:.0f} s")
        figures.faults = figures.cut
        figures.check(figures.cut, "No request was cut off.")


def _others(setting: Setting, server: Server, figures: Figures, seconds: float) -> list[float]:
    with Crowd(server.port, setting.questions, figures, 4, setting.seed, Ways(pause=0.05)) as crowd:
        sleep(seconds)
    return crowd.waits


def _middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _slow(setting: Setting, server: Server, figures: Figures, place: int) -> None:
    figures.count("sent")
    figures.count("faults")
    reads = place % 3 == 2 and place // 3 < setting.times(_READERS, 2)
    way, seconds = (_in_reading, _SEND + _LATE) if reads else ((_in_head, _HEAD), (_in_body, _BODY))[place % 2]
    try:
        with plain(server.port, seconds + _LATE, _RECEIVE) as made:
            began = monotonic()
            wrong = way(made)
            if wrong is None and monotonic() - began > seconds + _LATE:
                wrong = f"It was closed after {monotonic() - began:.1f} s."
    except FAILURES as error:
        wrong = f"{type(error).__name__}: {error}"
    if wrong is None:
        figures.count("refused")
    else:
        figures.lose(f"A client slow {way.__name__.removeprefix('_').replace('_', ' ')}: {wrong}")


def _in_head(made: socket.socket) -> str | None:
    return _dribble(
        made, b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 1000, b"The request's head has not"
    )


def _in_body(made: socket.socket) -> str | None:
    head = f"{_HEADERS}Content-Length: 1000\r\n\r\n".encode()
    made.sendall(head)
    return _dribble(made, b'{"model": "' + b"x" * 1000, b"The request's body has not")


def _dribble(made: socket.socket, data: bytes, words: bytes) -> str | None:
    """Send a byte a second until the server says something, which is to be an error 408."""
    patience = made.gettimeout() or 0.0
    until = monotonic() + patience
    for place in range(len(data)):
        made.sendall(data[place : place + 1])
        made.settimeout(1.0)
        try:
            said = made.recv(65536)
            break
        except TimeoutError:
            if monotonic() > until:
                return "It is still open."
    made.settimeout(patience)
    said += read_all(made)
    return None if said.startswith(b"HTTP/1.1 408 ") and words in said else f"It received {said[:200]!r}."


def _in_reading(made: socket.socket) -> str | None:
    """Ask for a long stream and read a byte a second, until the server has gone.

    The system keeps 4 MB on its way, so that a shorter stream is over for the server before anybody reads it. So much
    takes a while to compute: others come first.
    """
    asked = {"model": MODEL, "prompt": [[1], [2], [3], [4]], "n": 16, "logprobs": 20, "max_tokens": 140, "priority": -1}
    body = json.dumps({**asked, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}).encode()
    head = f"{_HEADERS}Content-Length: {len(body)}"
    made.sendall(f"{head}\r\nConnection: close\r\n\r\n".encode() + body)
    until = monotonic() + (made.gettimeout() or 0.0)
    while made.recv(1) and monotonic() < until:
        sleep(1.0)
        if not _has_peer(made):
            return None
    return "It is still open."


def _has_peer(made: socket.socket) -> bool:
    """Whether the server has the connection still open, by the system's table of connections.

    What a server has sent before it closes is kept for the client, who would learn of the end after it alone.
    """
    server, client = made.getpeername()[1], made.getsockname()[1]
    return any(
        (each.laddr.port, each.status) == (server, psutil.CONN_ESTABLISHED) and each.raddr.port == client
        for each in psutil.net_connections("tcp4")
    )
