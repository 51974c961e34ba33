"""A server of OpenAI's API: started, asked over HTTP, ended."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import urllib.error
import urllib.request
from contextlib import suppress
from tempfile import TemporaryFile
from time import monotonic, sleep
from types import TracebackType
from typing import IO, Any

from outrider.plans.errors import RequestError
from outrider.tools.exactness.requests import Asked
from outrider.tools.parting import Outcome, read_logprobs

_READY_SECONDS, _GLANCE_SECONDS, _END_SECONDS, _ANSWER_SECONDS = 300.0, 0.2, 40.0, 900.0
_LOGPROBS = 5
_KEY = "OPENAI_API_KEY"


class Server:
    """A server whose API is at `url`; with a `command`, a process that this one starts, restarts and ends.

    Once it was started, `owner` and `model` are those that it lists, and `tells_logprobs` says whether it tells any.
    """

    def __init__(self, url: str, command: str | None = None, model: str | None = None) -> None:
        """Raises `RequestError` for what is no address."""
        if not url.startswith(("http://", "https://")):
            raise RequestError(f"{url!r} is no address of a server; pass one such as http://127.0.0.1:8000.")
        self.url = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._command, self._model = command, model
        self._process: subprocess.Popen[str] | None = None
        self._said: IO[str] | None = None
        self.owner, self.model, self.tells_logprobs = "", model or "", False
        self.costs: list[dict[str, int]] = []
        """Of each answer that was not streamed, as it tells: tokens of drafts `accepted`, of the prompt `reused`."""

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
        """Whether it can be started again."""
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
        listed = self._get("/models")["data"]
        if not listed:
            raise RequestError(f"{self.url}/models lists no model; name one with --model.")
        self.owner = str(listed[0].get("owned_by", ""))
        self.model = self._model or str(listed[0]["id"])
        self.tells_logprobs = bool(self._ask_plainly({"prompt": "#", "max_tokens": 1, "logprobs": 1}).logprobs)

    def restart(self) -> None:
        """End the process and start another."""
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
        return self._ask_plainly(body | ({"logprobs": _LOGPROBS} if self.tells_logprobs else {}))

    def _ask_plainly(self, body: dict[str, Any]) -> Outcome:
        try:
            with self._post("/completions", body) as answer:
                said = json.loads(answer.read())
            self.costs.append(_costs(said))
            return _read(said, "logprobs" in body)
        except (OSError, ValueError, KeyError, IndexError, AttributeError) as error:
            return Outcome(error=_reason(error))

    def _ask_streaming(self, body: dict[str, Any]) -> Outcome:
        text, finish = "", ""
        try:
            with self._post("/completions", body) as answer:
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
            return "data" in self._get("/models")
        return False

    def _get(self, path: str) -> dict[str, Any]:
        with urllib.request.urlopen(self._request(path), timeout=10) as answer:
            found: dict[str, Any] = json.loads(answer.read())
            return found

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        return urllib.request.urlopen(self._request(path, {"model": self.model, **body}), timeout=_ANSWER_SECONDS)

    def _request(self, path: str, body: dict[str, Any] | None = None) -> urllib.request.Request:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(_KEY):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        return urllib.request.Request(self.url + path, data, headers)

    def _last_words(self) -> str:
        assert self._said is not None
        self._said.seek(0)
        said = self._said.read().strip().splitlines()
        return said[-1] if said else "it said nothing"


def _read(answer: dict[str, Any], with_logprobs: bool) -> Outcome:
    """Return what an answer of /v1/completions holds, that was asked for `with_logprobs` or without."""
    choice = answer["choices"][0]
    told = choice.get("logprobs") or {}
    tokens, logprobs = tuple(map(str, told.get("tokens") or ())), read_logprobs(told)
    whole = len(logprobs) == len(tokens) and all(each.logprob == each.logprob for each in logprobs)
    kept = (logprobs if whole else ()) if with_logprobs else None
    return Outcome(tokens, choice["text"], str(choice.get("finish_reason")), kept)


def _costs(answer: dict[str, Any]) -> dict[str, int]:
    """What an answer tells of how it came about; 0 for what it does not tell."""
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
