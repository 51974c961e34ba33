"""Clients that ask questions at once, in every way, and compare every answer."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic, sleep
from types import TracebackType
from typing import Any, Self

from outrider.tools.lab.faults.client import FAILURES, PATIENCE, Answer, Client
from outrider.tools.lab.faults.figures import Figures
from outrider.tools.lab.faults.questions import Question


@dataclass(frozen=True)
class Ways:
    """Shares of the requests that stream, whose client leaves, and that have a deadline too short for many; seconds
    without a byte (`patience`), after which an answer is lost.

    `excuses` says of an error's status, body and answer so far whether the scenario provokes it: such a request is
    refused, not lost. `breaks`: likewise are connections that end in the middle, or cannot be had.
    """

    streams: float = 0.5
    leaves: float = 0.0
    deadlines: float = 0.0
    deadline_seconds: float = 0.05
    far_deadline: float | None = None
    pause: float = 0.0
    patience: float = PATIENCE
    excuses: Callable[[Answer], bool] = lambda _: False
    breaks: bool = False


class Crowd:
    """`count` clients of a port, from entering the block until its end; every one finishes the request that it has
    begun. `port` may be a function, where servers come and go."""

    def __init__(
        self,
        port: int | Callable[[], int],
        questions: Sequence[Question],
        figures: Figures,
        count: int,
        seed: int,
        ways: Ways | None = None,
    ) -> None:
        self._port = port if callable(port) else lambda: port
        self._questions, self._figures, self._ways = questions, figures, ways or Ways()
        self._stopped = threading.Event()
        self.waits: list[float] = []  # seconds until an answer was whole
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(f"{seed} {place}"),), daemon=True)
            for place in range(count)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._stopped.set()
        until = monotonic() + 2 * self._ways.patience
        for thread in self._threads:
            thread.join(max(0.0, until - monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            self._figures.fail("A client has not had the end of its answer.")

    def _run(self, draw: random.Random) -> None:
        patience, port = self._ways.patience, self._port()
        client = Client(port, patience)
        while not self._stopped.is_set():
            if draw.random() < 0.3 or port != self._port():  # else the connection is used again
                client.close()
                port = self._port()
                client = Client(port, patience)
            began = monotonic()
            ask(client, draw.choice(self._questions), self._figures, draw, self._ways)
            self.waits.append(monotonic() - began)
            if self._ways.pause:
                sleep(draw.random() * self._ways.pause)
        client.close()


def ask_all(port: int, questions: Sequence[Question], figures: Figures, at_once: int = 8, rounds: int = 1) -> None:
    """Ask every question `rounds` times, whole and as a stream by turns."""
    waiting = list(enumerate(question for _ in range(rounds) for question in questions))
    lock = threading.Lock()

    def run() -> None:
        client = Client(port)
        while True:
            with lock:
                if not waiting:
                    break
                place, question = waiting.pop()
            ask(client, question, figures, random.Random(place), Ways(streams=float(place % 2)))
        client.close()

    threads = [threading.Thread(target=run, daemon=True) for _ in range(min(at_once, len(waiting)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def ask(client: Client, question: Question, figures: Figures, draw: random.Random, ways: Ways) -> Answer | None:
    """Ask once in one of the ways, compare, and count."""
    body: dict[str, Any] = dict(question.body)
    if draw.random() < ways.streams:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    hurried = draw.random() < ways.deadlines
    if hurried:
        body["deadline"] = draw.random() * ways.deadline_seconds + 0.001
    elif ways.far_deadline is not None:
        body["deadline"] = ways.far_deadline
    leaves = draw.random() < ways.leaves
    last = draw.choice([0, 0, 1, 2, draw.randrange(1, 40)]) if leaves else -1
    figures.count("sent")
    try:
        answer = client.ask(body, (lambda events: events >= last) if leaves else None)
    except FAILURES as error:
        if ways.breaks:
            figures.count("refused")
            sleep(0.1)  # nobody may be listening
        else:
            figures.lose(f"No answer, {type(error).__name__}: {error}; {_short(body)}")
        return None
    judge(answer, question, figures, ways, body, may_end=hurried, left=leaves and not answer.done)
    return answer


def judge(
    answer: Answer,
    question: Question,
    figures: Figures,
    ways: Ways,
    body: dict[str, Any],
    *,
    may_end: bool = False,
    left: bool = False,
) -> None:
    """Count an answer. `may_end`: a deadline may have cut it off; `left`: its client has."""
    if answer.error is not None or (answer.status != 200 and not left):
        if not answer.begins(question.expected):
            figures.differ(f"Other tokens before {answer.error}: {answer.choices}; {_short(body)}")
        elif ways.excuses(answer):
            figures.count("refused")
        else:
            figures.lose(f"Status {answer.status}, {answer.error}; {_short(body)}")
    elif not answer.done and not left:
        if ways.breaks and answer.begins(question.expected):
            figures.count("refused")
            return
        figures.lose(f"A stream without its end; {_short(body)}")
    elif answer.done and (parted := answer.part(question.expected)) is None:
        figures.count("answered")
    elif (left or may_end) and answer.begins(question.expected):
        figures.count("cut")
    else:
        said = parted.text if answer.done and parted else f"{answer.choices} begins otherwise"
        figures.differ(f"{said}; {_short(body)}")


def _short(body: dict[str, Any]) -> str:
    return repr({key: value for key, value in body.items() if key not in ("prompt", "messages", "tools")})[:400]
