"""Any server of OpenAI's API, started, asked over HTTP and ended, under conditions that a client can bring about.

It is compared with its own first answers.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from tempfile import TemporaryFile
from threading import Event
from time import monotonic, sleep
from types import TracebackType
from typing import IO, Any

from outrider.commands.console import progress_bar
from outrider.plans.errors import RequestError
from outrider.tools.exactness.conditions import LeftOut
from outrider.tools.exactness.measure import shown
from outrider.tools.exactness.requests import Asked, read_texts, server_requests
from outrider.tools.identity import git_sha
from outrider.tools.parting import Outcome, compare, read_logprobs

OURS = "outrider"
"""The owner of models that our own server names."""

_STEP_SECONDS = 0.05  # between arrivals, times 0 to 3


@dataclass(frozen=True)
class Side:
    """A server, and fields that every request to it has."""

    server: Server
    body: dict[str, Any]

    def alone(self, asked: Sequence[Asked], *, stream: bool = False) -> list[Outcome]:
        return [self.server.ask(each, self.body, stream=stream) for each in asked]

    def company(self, asked: Sequence[Asked], at_once: int, order: int = 0) -> list[Outcome]:
        """`at_once` requests in flight. With an `order`, its seed: another order, and pauses between arrivals."""
        draw, pausing = random.Random(order), Event()
        places = draw.sample(range(len(asked)), len(asked)) if order else list(range(len(asked)))
        futures = {}
        with ThreadPoolExecutor(at_once) as pool:
            for place in places:
                futures[place] = pool.submit(self.server.ask, asked[place], self.body)
                if order:
                    pausing.wait(_STEP_SECONDS * draw.randrange(4))
        return [futures[place].result() for place in range(len(asked))]

    def restarted(self) -> Side:
        self.server.restart()
        return self

    def answers_after(self, asked: Sequence[Asked], beginning: Callable[[Asked], Asked]) -> list[Outcome]:
        """Each after another request, which `beginning` makes of it."""
        found = []
        for each in asked:
            self.server.ask(beginning(each), self.body)
            found.append(self.server.ask(each, self.body))
        return found


@dataclass(frozen=True)
class Row:
    """A condition: requests that are made when it is its turn. `streams` has no log-probabilities; `again` repeats
    another condition with other orders or times."""

    group: str
    name: str
    side: Side
    run: Callable[[Side], list[Outcome]]
    again: bool = False
    streams: bool = False


def measure_server(options: argparse.Namespace) -> dict[str, Any]:
    """Run every condition against `--against`. Raises `RequestError` where a server answers no request."""
    asked = server_requests(
        read_texts(options.plan, options.prompts), options.requests, options.new, options.characters
    )
    with ExitStack() as stack:
        first = Side(stack.enter_context(Server(options.against, options.start, options.model)), options.body or {})
        second = first.server
        if options.against_drafting is not None:
            second = Server(options.against_drafting, options.start_drafting, options.model)
            stack.enter_context(second)
        drafting = [Side(second, {**(options.body or {}), **body}) for body in options.drafting_body or ()]
        if options.against_drafting is not None and not drafting:
            drafting = [Side(second, options.body or {})]
        rows = _rows(first, drafting, asked, options.at_once, options.quick)
        report = _compared(first, rows, asked)
        left_out = _left_out(first, drafting)
    owners = {first.server.owner, second.owner}
    return {
        "git_sha": git_sha(),
        "about": f"{options.against}, model {first.server.model!r} of {first.server.owner or 'nobody named'}; "
        f"{len(asked)} requests of at most {options.new} tokens, compared with the first answers, alone",
        "ours": owners == {OURS},
        "requests": len(asked),
        "left_out": [asdict(each) for each in left_out],
        **report,
    }


def _compared(first: Side, rows: Sequence[Row], asked: Sequence[Asked]) -> dict[str, Any]:
    found = list[dict[str, Any]]()
    with progress_bar("comparing") as progress:
        progress(0, 1 + len(rows), "the first answers")
        expected = first.alone(asked)
        if all(outcome.error for outcome in expected):
            raise RequestError(f"{first.server.url} answers no request: {expected[0].error}")
        names = [each.name for each in asked]
        for row in rows:
            progress(1 + len(found), 1 + len(rows), f"{row.group}: {row.name}")
            server = row.side.server
            server.costs.clear()
            outcomes = row.run(row.side)
            ours = server.owner == OURS and not row.streams
            listed = all(outcome.logprobs for outcome in (*expected, *outcomes) if outcome.text)
            seen = {name: sum(each[name] for each in server.costs) for name in ("accepted", "reused")}
            figures = {"witness": seen if ours else None, "without_logprobs": row.streams or not listed}
            found.append(
                {"group": row.group, "condition": row.name, **shown(compare(names, expected, outcomes)), **figures}
            )
    return {
        "tokens": sum(len(outcome.tokens) for outcome in expected) or None,
        "failed_at_first": sum(bool(outcome.error) for outcome in expected),
        "rows": found,
        "diverged": sum(bool(row["diverged"] or row["logprobs_diverged"]) for row in found),
    }


def _rows(first: Side, drafting: Sequence[Side], asked: Sequence[Asked], at_once: int, quick: bool) -> list[Row]:
    together = f"{at_once} at once"

    def alone(side: Side) -> list[Outcome]:
        return side.alone(asked)

    def company(side: Side, order: int = 0) -> list[Outcome]:
        return side.company(asked, at_once, order)

    rows = [
        Row("alone", "again, in the same order", first, alone),
        Row("alone", "again, in reverse order", first, lambda side: side.alone(asked[::-1])[::-1], again=True),
        Row("alone", "streamed", first, lambda side: side.alone(asked, stream=True), again=True, streams=True),
        Row("warm prompt", "each twice in a row, the second", first, lambda side: side.answers_after(asked, _itself)),
        Row("warm prompt", "after one that begins alike", first, lambda side: side.answers_after(asked, _beginning)),
        Row("company", together, first, company),
        Row("company", f"{together}, other order and times", first, lambda side: company(side, 1), again=True),
    ]
    if first.server.restarts:
        rows += [
            Row("restart", "alone, in the same order", first, lambda side: alone(side.restarted())),
            Row("restart", f"{together} from the first on", first, lambda side: company(side.restarted()), again=True),
        ]
    for side in drafting:
        group = f"drafting {side.body['drafter']}" if "drafter" in side.body else "drafting"
        rows += [Row(group, "alone", side, alone), Row(group, "alone, again", side, alone, again=True)]
        rows.append(Row(group, together, side, company))
    return [row for row in rows if not (quick and row.again)]


def _itself(asked: Asked) -> Asked:
    return asked


def _beginning(asked: Asked) -> Asked:
    """A request of which the first two thirds of the prompt are the same."""
    beginning = asked.prompt[: 2 * len(asked.prompt) // 3]
    return Asked(asked.name, f"{beginning} # otherwise", {**asked.options, "max_tokens": 1})


def _left_out(first: Side, drafting: Sequence[Side]) -> list[LeftOut]:
    found = []
    if not first.server.lists_logprobs:
        found.append(LeftOut("log-probabilities", "the server returns none; texts are compared"))
    if not first.server.restarts:
        found.append(LeftOut("rows of a restart", "they need --start COMMAND"))
    if not drafting:
        found.append(LeftOut("rows with drafts", "they need --against-drafting URL or --drafting-body JSON"))
    return found


_READY_SECONDS, _GLANCE_SECONDS, _END_SECONDS, _ANSWER_SECONDS = 300.0, 0.2, 40.0, 900.0
_LOGPROBS = 5
_KEY = "OPENAI_API_KEY"


class Server:
    """A server whose API is at `url`; with a `command`, a process that this one starts, restarts and ends.

    Once it was started, `owner` and `model` are those that it lists, and `lists_logprobs` says whether it
    returns log-probabilities.
    """

    def __init__(self, url: str, command: str | None = None, model: str | None = None) -> None:
        """Raises `RequestError` for what is no address."""
        if not url.startswith(("http://", "https://")):
            raise RequestError(f"{url!r} is no address of a server; pass one such as http://127.0.0.1:8000.")
        self.url = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._command, self._model = command, model
        self._process: subprocess.Popen[str] | None = None
        self._said: IO[str] | None = None
        self.owner, self.model, self.lists_logprobs = "", model or "", False
        self.costs: list[dict[str, int]] = []
        """Of each answer that was not streamed: tokens of drafts `accepted`, of the prompt `reused`."""

    def __enter__(self) -> Server:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def restarts(self) -> bool:
        return self._command is not None

    def start(self) -> None:
        """Start it, where it has a command, and wait until it answers. Raises `RequestError` where it does not."""
        if self._command is not None:
            if self._answers():
                raise RequestError(f"Something answers at {self.url} already; end it, or leave its command out.")
            self._said = TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  (closed by `stop`)
            try:
                self._process = subprocess.Popen(
                    shlex.split(self._command),
                    stdout=self._said,
                    stderr=subprocess.STDOUT,
                    text=True,
                    start_new_session=True,  # a command may be a shell that starts the server
                )
            except (OSError, ValueError) as error:
                raise RequestError(f"{self._command!r} cannot be started: {error}") from None
        until = monotonic() + (_READY_SECONDS if self._process is not None else 0.0)
        while not self._answers():
            if self._process is not None and self._process.poll() is not None:
                raise RequestError(f"{self._command!r} ended: {self._last_words()}")
            if monotonic() >= until:
                raise RequestError(f"No server answers at {self.url}; start one, or pass its command to start it.")
            sleep(_GLANCE_SECONDS)
        listed = self._listed()
        if not listed:
            raise RequestError(f"{self.url}/models lists no model; name one with --model.")
        self.owner = str(listed[0].get("owned_by", ""))
        self.model = self._model or str(listed[0]["id"])
        self.lists_logprobs = bool(self._ask_plainly({"prompt": "#", "max_tokens": 1, "logprobs": 1}).logprobs)

    def restart(self) -> None:
        self.stop()
        self.start()

    def stop(self) -> None:
        """End the process, where there is one; again without effect."""
        if self._process is not None:
            self._signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)
            self._signal(signal.SIGKILL)  # what is left of its group
            self._process.wait()
            self._process = None
        if self._said is not None:
            self._said.close()
            self._said = None

    def _signal(self, number: int) -> None:
        assert self._process is not None
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def ask(self, asked: Asked, more: dict[str, Any], *, stream: bool = False) -> Outcome:
        """Make a request with `more` fields; what it came to, an error of the server's included."""
        body = {"prompt": asked.prompt, **asked.options, **more}
        if stream:
            return self._ask_streaming(body | {"stream": True})
        return self._ask_plainly(body | ({"logprobs": _LOGPROBS} if self.lists_logprobs else {}))

    def _ask_plainly(self, body: dict[str, Any]) -> Outcome:
        try:
            with self._open("/completions", body) as answer:
                said = json.loads(answer.read())
            self.costs.append(_costs(said))
            return _read(said, "logprobs" in body)
        except (OSError, ValueError, KeyError, IndexError, AttributeError) as error:
            return Outcome(error=_reason(error))

    def _ask_streaming(self, body: dict[str, Any]) -> Outcome:
        text, finish = "", ""
        try:
            with self._open("/completions", body) as answer:
                for line in answer:
                    said = line.decode("utf-8").strip()
                    if not said.startswith("data:") or said == "data: [DONE]":
                        continue
                    piece = json.loads(said.removeprefix("data:"))
                    if "error" in piece:
                        return Outcome(error=str(piece["error"].get("message", piece["error"])))
                    for choice in piece["choices"]:
                        text, finish = text + (choice["text"] or ""), choice["finish_reason"] or finish
        except (OSError, ValueError, KeyError) as error:
            return Outcome(error=_reason(error))
        return Outcome(text=text, finish=finish)

    def _answers(self) -> bool:
        with suppress(OSError, ValueError, KeyError):
            self._listed()
            return True
        return False

    def _listed(self) -> list[dict[str, Any]]:
        """The models that it lists."""
        with self._open("/models", None, 10.0) as answer:
            found: list[dict[str, Any]] = json.loads(answer.read())["data"]
            return found

    def _open(self, path: str, body: dict[str, Any] | None, seconds: float = _ANSWER_SECONDS) -> Any:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(_KEY):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps({"model": self.model, **body}).encode()
        return urllib.request.urlopen(urllib.request.Request(self.url + path, data, headers), timeout=seconds)

    def _last_words(self) -> str:
        assert self._said is not None
        self._said.seek(0)
        said = self._said.read().strip().splitlines()
        return said[-1] if said else "it said nothing"


def _read(answer: dict[str, Any], with_logprobs: bool) -> Outcome:
    """Return what an answer of /v1/completions holds, that was asked for `with_logprobs` or without."""
    choice = answer["choices"][0]
    listed = choice.get("logprobs") or {}
    tokens, logprobs = tuple(map(str, listed.get("tokens") or ())), read_logprobs(listed)
    whole = len(logprobs) == len(tokens) and all(each.logprob == each.logprob for each in logprobs)
    kept = (logprobs if whole else ()) if with_logprobs else None
    return Outcome(tokens, choice["text"], str(choice.get("finish_reason")), kept)


def _costs(answer: dict[str, Any]) -> dict[str, int]:
    """The figures of an answer on how it was made; 0 for those that it lacks."""
    drafts = (answer.get("metrics") or {}).get("speculative_decoding") or {}
    prompt = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    return {"accepted": drafts.get("num_accepted_draft_tokens") or 0, "reused": prompt.get("cached_tokens") or 0}


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        said = error.read().decode("utf-8", "replace")
        with suppress(ValueError, KeyError, TypeError):
            said = json.loads(said)["error"]["message"]
        return f"status {error.code}: {said[:200]}"
    return f"{type(error).__name__}: {error}"
