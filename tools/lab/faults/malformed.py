"""Bodies that are wrong, and requests that are none: each is refused in OpenAI's shape, and nobody waits."""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPConnection
from time import monotonic
from typing import Any, Protocol

from pydantic import ValidationError

from outrider.plans.errors import OutriderError
from outrider.runtime.server.errors import ApiError
from outrider.tools.lab.faults.client import FAILURES, Answer, plain, read_all
from outrider.tools.lab.faults.crowd import Crowd, Ways
from outrider.tools.lab.faults.figures import Figures
from outrider.tools.lab.faults.mutations import malformed, rubbish
from outrider.tools.lab.faults.questions import Oracle
from outrider.tools.lab.faults.server import Server
from outrider.tools.lab.faults.setting import Setting

BODIES = 10_000
_MOST_BYTES = 2**18  # of a body: the server's limit
_HANGING = 60.0  # seconds after which an answer counts as none
_SENDERS = 3


class Knows(Protocol):
    """Knows the answer to a body, as `Oracle` does."""

    def answer(self, body: dict[str, Any]) -> Answer: ...


@dataclass(frozen=True)
class Lucky:
    """A body that was right by chance, where it was sent, and the answer's bytes."""

    path: str
    sent: bytes
    said: bytes


def run(setting: Setting, figures: Figures) -> None:
    """Every tenth request is none at all. Others ask good ones meanwhile.

    What the server holds is compared from a third of the requests on: grammars that explode leave holes in its heap,
    which the next ones fill.
    """
    total, waits, lucky = setting.times(BODIES, 100), list[float](), list[Lucky]()

    def send_all(server: Server, places: range) -> None:
        left, lock = iter(places), threading.Lock()

        def send() -> None:
            while True:
                with lock:
                    place = next(left, None)
                if place is None:
                    return
                began = monotonic()
                _send_one(setting, server, figures, place, lucky)
                waits.append(monotonic() - began)
                setting.show(f"{figures.faults} of {total} malformed requests")

        senders = [threading.Thread(target=send, daemon=True) for _ in range(_SENDERS)]
        for thread in senders:
            thread.start()
        for thread in senders:
            thread.join()

    with setting.serve("--max-body-bytes", str(_MOST_BYTES), "--head-seconds", "1", "--idle-seconds", "1") as server:
        send_all(server, range(total // 3))
        crowd = Crowd(server.port, setting.questions, figures, 2, setting.seed, Ways(pause=0.2))
        with setting.watched(server, figures), crowd:
            send_all(server, range(total // 3, total))
        figures.notes |= {"longest refusal, s": round(max(waits), 2), "longest answer, s": round(max(crowd.waits), 2)}
        judge_lucky(figures, Oracle(setting.plan, setting.threads), lucky)
        figures.check("Traceback" not in server.said, f"The server has printed: {server.said[-1500:]}")


def _send_one(setting: Setting, server: Server, figures: Figures, place: int, lucky: list[Lucky]) -> None:
    draw = random.Random(f"{setting.seed} malformed {place}")
    figures.count("faults")
    figures.count("sent")
    if place % 10 == 9:
        _send_rubbish(server, figures, rubbish(draw), place)
        return
    good = dict(draw.choice(setting.questions).body) | {"max_tokens": 2}
    path = "/v1/chat/completions" if ("messages" in good) ^ (draw.random() < 0.05) else "/v1/completions"
    data = malformed(good, draw, _MOST_BYTES)
    kind = "application/json" if draw.random() < 0.97 else draw.choice(["text/plain", "", "application/xml", "\xe9"])
    connection = HTTPConnection("127.0.0.1", server.port, timeout=_HANGING)
    try:
        connection.request("POST", path, data, {"Content-Type": kind})
        response = connection.getresponse()
        body = response.read()
        if response.status == 200:
            lucky.append(Lucky(path, data, body))
            return
        _judge(figures, response.status, body, f"body {place}, {data[:200]!r}")
    except FAILURES as error:
        figures.lose(f"Body {place}: {type(error).__name__}: {error}; {len(data)} bytes, {data[:300]!r}")
    finally:
        connection.close()


def _judge(figures: Figures, status: int, body: bytes, what: str) -> None:
    """What is wrong is refused; a transfer encoding that is not there, by 501, as HTTP has it."""
    if (400 <= status < 500 or status == HTTPStatus.NOT_IMPLEMENTED) and _is_error(body):
        figures.count("refused")
    else:
        figures.lose(f"Status {status}, {body[:300]!r}: {what}")


def judge_lucky(figures: Figures, oracle: Knows, lucky: Sequence[Lucky]) -> None:
    """Hold answers against those of plain decoding; where chance or a clock has a say in tokens, only their shape."""
    compared = 0
    for each in lucky:
        try:
            asked, answer = json.loads(each.sent), _answer(each.said)
        except (ValueError, KeyError, TypeError) as error:
            figures.lose(f"{type(error).__name__}: {error}: {each.said[:300]!r} to {each.sent[:200]!r}")
            continue
        if not answer.done or answer.error is not None:
            figures.lose(f"An answer without an end: {each.said[-300:]!r} to {each.sent[:200]!r}")
            continue
        if _is_settled(each.path, asked):
            compared += 1
            try:
                expected = oracle.answer(asked)
            except (ApiError, OutriderError, ValidationError) as error:
                figures.differ(f"Plain decoding refuses what has an answer: {error}; {each.sent[:200]!r}")
                continue
            if (parted := answer.part(expected, counted=False)) is not None:
                figures.differ(f"{parted.text}; {each.sent[:200]!r}")
                continue
        figures.count("answered")
    figures.notes |= {"right by chance": len(lucky), "of those, compared": compared}


def _answer(said: bytes) -> Answer:
    answer = Answer(200)
    if not said.startswith(b"data: "):
        answer.take(json.loads(said))
        answer.done = True
        return answer
    for event in said.decode().split("\n\n"):
        if event == "data: [DONE]":
            answer.done = True
        elif event:
            answer.take(json.loads(event.removeprefix("data: ")))
    return answer


def _is_settled(path: str, asked: dict[str, Any]) -> bool:
    """Whether the body alone says which tokens come."""
    drawn = asked.get("seed") is None and asked.get("temperature") != 0
    other = path != "/v1/chat/completions" and "messages" in asked
    return not (drawn or other or asked.get("deadline") or asked.get("partial_kv"))


def _is_error(body: bytes) -> bool:
    """Whether it is an error in OpenAI's shape, with a sentence."""
    try:
        error = json.loads(body)["error"]
        return isinstance(error["message"], str) and len(error["message"]) > 10 and isinstance(error["type"], str)
    except (ValueError, KeyError, TypeError):
        return False


def _send_rubbish(server: Server, figures: Figures, data: bytes, place: int) -> None:
    """Refused in the same shape; or closed without a word, where not even a head has come."""
    with plain(server.port, _HANGING) as made:
        try:
            made.sendall(data)
            said = read_all(made)
        except FAILURES as error:
            if isinstance(error, TimeoutError):
                figures.lose(f"Rubbish {place} is waited for: {data[:100]!r}")
            else:
                figures.count("refused")
            return
    head, _, body = said.partition(b"\r\n\r\n")
    status = re.match(rb"HTTP/1\.1 (\d{3}) ", head)
    if not said:
        figures.count("refused")
        return
    length = re.search(rb"(?i)content-length: (\d+)", head)
    body = body[: int(length[1])] if length else body
    _judge(figures, int(status[1]) if status else 0, body, f"rubbish {place}, {data[:100]!r}")
