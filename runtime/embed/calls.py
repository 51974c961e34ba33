"""The Python side of every call of `outrider.h`: arguments to Python, errors to a status, handles to objects."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.plans.check import session_bytes
from outrider.plans.errors import BusyError, ClosedError, OutriderError, RequestError
from outrider.plans.plan import open_plan
from outrider.runtime.backends import reason_against
from outrider.runtime.embed.c_memory import Bytes, CMemory
from outrider.runtime.embed.handles import (
    CallbackError,
    Handles,
    InvalidArgumentError,
    InvalidHandleError,
    Kind,
    QueueFullError,
)
from outrider.runtime.embed.options import (
    AUTO,
    BRANCH_KEYS,
    OF_A_BRANCH,
    OF_MESSAGES,
    OF_SUBMIT,
    OFFERED,
    check_keys,
    json_messages,
    json_object,
    keys_of,
    open_options,
    refuse,
)
from outrider.runtime.embed.requests import Functions, Notifier, OnLogits, OpenRequest, seconds
from outrider.runtime.generation import Generation
from outrider.runtime.options.kinds import Call
from outrider.runtime.runtime import Runtime
from outrider.runtime.scheduler import close_all
from outrider.runtime.session import Session
from outrider.runtime.text.structured_outputs import FORMS


class Status(IntEnum):
    """`outrider_status`."""

    OK = 0
    INVALID_HANDLE = 1
    INVALID_ARGUMENT = 2
    REQUEST = 3
    PLAN = 4
    BUSY = 5
    ENVIRONMENT = 6
    NO_MEMORY = 7
    CALLBACK = 8  # of a callback of outrider_generate, the library itself gives it
    INTERNAL = 9
    TIMEOUT = 10
    CLOSED = 11
    FULL = 12


class Form(IntEnum):
    """What a prompt is (`bridge.h`)."""

    TEXT = 0
    TOKENS = 1
    MESSAGES = 2


STATUS: tuple[tuple[type[BaseException], Status], ...] = (
    (InvalidHandleError, Status.INVALID_HANDLE),
    (InvalidArgumentError, Status.INVALID_ARGUMENT),
    (CallbackError, Status.CALLBACK),
    (TimeoutError, Status.TIMEOUT),
    (QueueFullError, Status.FULL),
    (ClosedError, Status.CLOSED),
    (BusyError, Status.BUSY),
    (RequestError, Status.REQUEST),
    (OutriderError, Status.PLAN),
    (MemoryError, Status.NO_MEMORY),
    (ImportError, Status.ENVIRONMENT),
)
_THE_PLAN = "pass the folder that `outrider build` has made"
MOST_STOPPING = 10.0  # seconds that the process's end waits for sessions
MOST_SAID = 512  # bytes of what an exception of the program's says


@dataclass
class OpenSession:
    """A session and the flag that ends its generation, while there is one."""

    session: Session
    cancel: threading.Event | None = None
    thread: int | None = None  # that generates
    _busy: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def generating(self) -> Iterator[threading.Event]:
        if not self._busy.acquire(blocking=False):
            raise BusyError("This session is generating already; wait for that call, or create another session.")
        try:
            self.cancel, self.thread = threading.Event(), threading.get_ident()
            yield self.cancel
        finally:
            self.cancel = self.thread = None
            self._busy.release()

    def end(self) -> None:
        """End its generation at the next token, if there is one."""
        if (cancel := self.cancel) is not None:
            cancel.set()

    def wait(self, timeout: float) -> None:
        """Wait at most `timeout` seconds for the end of its generation, unless this is called from its callback."""
        if self.thread != threading.get_ident() and self._busy.acquire(timeout=timeout):
            self._busy.release()


@dataclass
class Params:
    """Options of a generation, and functions that change its logits."""

    values: dict[str, Any] = field(default_factory=dict)
    functions: list[OnLogits] = field(default_factory=list)


@dataclass(frozen=True)
class Branches:
    """A run of branches and its cost."""

    results: list[Generation]
    stats: Bytes


def attach(ffi: Any, lib: Any) -> None:
    """Define every call of `calls.h`: the public methods of `Calls`."""
    calls = Calls(ffi, lib)
    for name in vars(Calls):
        if not name.startswith("_"):
            ffi.def_extern(name=f"outrider_py_{name}", error=int(Status.INTERNAL))(calls._guarded(name))


class Calls:
    """A method for each call, by its name in C."""

    def __init__(self, ffi: Any, lib: Any) -> None:
        self._ffi, self._lib, self._handles = ffi, lib, Handles()
        self._memory, self._notifier = CMemory(ffi), Notifier()

    def _guarded(self, name: str) -> Callable[..., int]:
        method = getattr(self, name)

        def call(*arguments: Any) -> int:
            try:
                method(*arguments)
            except BaseException as error:  # nothing may leave for C but a status
                return self._report(error)
            return int(Status.OK)

        return call

    def _report(self, error: BaseException) -> int:
        if isinstance(error.__cause__, CallbackError):  # of a function of logits, which the request ends with
            error = error.__cause__
        status = next((status for kind, status in STATUS if isinstance(error, kind)), Status.INTERNAL)
        text = str(error) or type(error).__name__
        if status is Status.NO_MEMORY:
            text = "there is not enough memory for this"
        elif status is Status.ENVIRONMENT:
            text = f"Outrider's environment is incomplete ({error}); copy or install it whole again"
        elif status is Status.INTERNAL:
            text = f"a fault of Outrider's own, please report it: {type(error).__name__}: {error}"
        data = text.encode("utf-8", "replace").replace(b"\0", b"?")
        self._lib.outrider_report(data, len(data))
        return int(status)

    # Plans.

    def inspect(self, plan: Any, length: int, out: Any) -> None:
        opened = open_plan(self._path(plan, length))
        manifest = opened.manifest
        described = manifest.model_dump(
            mode="json", include={"name", "identity", "format_version", "models", "text", "drafters", "tools"}
        )
        described["bytes"] = sum(file.size for file in manifest.files)
        described["backends"] = {
            name: {
                "session_bytes": session_bytes(backend),
                "symbols": backend.symbols,
                "engines": sorted(backend.engines),
                "cannot_run": reason_against(name, backend),
            }
            for name, backend in manifest.backends.items()
        }
        out[0] = self._handles.add(Kind.TEXT, self._memory.text(json.dumps(described)))

    def text(self, text: int, data: Any, length: Any) -> None:
        self._give(self._handles.get(Kind.TEXT, text), data, length)

    def open(self, plan: Any, length: int, options: Any, options_length: int, out: Any) -> None:
        path, given = self._path(plan, length), self._text(options, options_length, "options")
        runtime = Runtime.load(path, **open_options(given))
        out[0] = self._handles.add(Kind.RUNTIME, runtime)

    def drain(self, runtime: int, timeout_ms: int) -> None:
        loaded: Runtime = self._handles.get(Kind.RUNTIME, runtime)
        if loaded.close(timeout=seconds(timeout_ms)):
            return
        stats = loaded.scheduler_stats  # no more come
        loaded.close(drain=False)
        if late := stats.waiting + stats.running:
            raise TimeoutError(f"not all requests were over after {timeout_ms} ms; the others were cancelled: {late}")

    def runtime_stats(self, runtime: int, out: Any) -> None:
        loaded: Runtime = self._handles.get(Kind.RUNTIME, runtime)
        cache, kept = loaded.prefix_cache, None
        if cache is not None:
            kept = cache.get_stats().to_json() | {"cached_tokens": cache.get_cached_tokens()}
        described = {
            "backend": loaded.backend,
            "scheduler": loaded.scheduler_stats.to_json(),
            "prefix_cache": kept,
            "memory": loaded.memory().to_json(),
        }
        out[0] = self._handles.add(Kind.TEXT, self._memory.text(json.dumps(described)))

    def save_cache(self, runtime: int, path: Any, length: int, tokens: Any) -> None:
        loaded: Runtime = self._handles.get(Kind.RUNTIME, runtime)
        file = self._path(path, length, "path", "name a file")
        try:
            count = loaded.save_prefix_cache(file)
        except OSError as error:
            raise RequestError(f"The prefix cache cannot be saved to {file}: {error}.") from None
        if tokens:
            tokens[0] = count

    def load_cache(self, runtime: int, path: Any, length: int, tokens: Any) -> None:
        loaded: Runtime = self._handles.get(Kind.RUNTIME, runtime)
        count = loaded.load_prefix_cache(self._path(path, length, "path", "name a file"))
        if tokens:
            tokens[0] = count

    # Sessions.

    def session(self, runtime: int, out: Any) -> None:
        session = Session(self._handles.get(Kind.RUNTIME, runtime).engines)  # one that has been drained has some too
        out[0] = self._handles.add(Kind.SESSION, OpenSession(session))

    def reset(self, session: int) -> None:
        self._handles.get(Kind.SESSION, session).session.reset()

    def cancel(self, session: int) -> None:
        self._handles.get(Kind.SESSION, session).end()

    # Options.

    def params(self, out: Any) -> None:
        out[0] = self._handles.add(Kind.PARAMS, Params())

    def set_int(self, params: int, key: Any, length: int, value: int) -> None:
        self._set(params, key, length, "int", value)

    set_uint = set_int

    def set_double(self, params: int, key: Any, length: int, value: float) -> None:
        self._set(params, key, length, "double", value)

    def set_bool(self, params: int, key: Any, length: int, value: int) -> None:
        if value not in (0, 1):
            raise InvalidArgumentError(f"a bool is 0 or 1, not {value}")
        self._set(params, key, length, "bool", bool(value))

    def set_text(self, params: int, key: Any, length: int, value: Any, value_length: int) -> None:
        options = self._handles.get(Kind.PARAMS, params).values
        name = self._key(key, length, keys_of("text", "json"), "text options are set")
        text = self._text(value, value_length, "value")
        forms = FORMS if name == "structured_outputs" else None
        options[name] = json_object(text, name, forms) if OFFERED[name] == "json" else text

    def add_text(self, params: int, key: Any, length: int, value: Any, value_length: int) -> None:
        self._add(params, key, length, "texts", [self._text(value, value_length, "value")])

    def add_ints(self, params: int, key: Any, length: int, values: Any, count: int) -> None:
        self._add(params, key, length, "ints", self._ffi.unpack(values, count) if count else [])

    def add_function(self, params: int, call: Any, function: Any, user: Any) -> None:
        held: Params = self._handles.get(Kind.PARAMS, params)
        held.functions.append(partial(self._change_logits, call, function, user))

    def _change_logits(
        self, call: Any, function: Any, user: Any, tokens: list[int], logits: NDArray[np.float32]
    ) -> None:
        """Call a function of logits, by `call` of the library's. Raises CallbackError."""
        said, row = self._ffi.new("char[]", MOST_SAID), self._ffi.from_buffer("float[]", logits, require_writable=True)
        returned = call(function, user, self._memory.ids(tokens), len(tokens), row, len(logits), said, MOST_SAID)
        self._check_said(said, "the function of logits")
        if returned:
            raise CallbackError(f"the function of logits gave up: it returned {returned}")

    def _check_said(self, said: Any, who: str) -> None:
        if text := self._ffi.string(said).decode("utf-8", "replace"):
            raise CallbackError(f"{who} threw an exception, {text}; it must return")

    def _set(self, params: int, key: Any, length: int, kind: Call, value: object) -> None:
        options = self._handles.get(Kind.PARAMS, params).values
        name = self._key(key, length, keys_of(kind), f"{kind} options are set")
        options[name] = "auto" if (name, value) == ("partial_budget", AUTO) else value

    def _add(self, params: int, key: Any, length: int, kind: Call, values: list[Any]) -> None:
        options = self._handles.get(Kind.PARAMS, params).values
        name = self._key(key, length, keys_of(kind), "lists are added to")
        options[name] = [*options.get(name, ()), *values]

    def _key(self, key: Any, length: int, keys: Collection[str], how: str) -> str:
        name = self._text(key, length, "key")
        if name not in keys:
            raise InvalidArgumentError(f"there is no key {name[:100]!r} here; by this call {how}: {', '.join(keys)}")
        return name

    def _options(self, params: int, wrap: Callable[[OnLogits], OnLogits] | None = None) -> dict[str, Any]:
        """Options for Python, a copy; `wrap` is put around each function of logits."""
        if not params:
            return {}
        held: Params = self._handles.get(Kind.PARAMS, params)
        options = dict(held.values)
        if held.functions:
            options["logits_processors"] = [each if wrap is None else wrap(each) for each in held.functions]
        return options

    def _prompt(self, data: Any, length: int, form: int) -> dict[str, Any]:
        """The argument of Python's calls that the prompt is."""
        if form == Form.MESSAGES:
            return {"messages": json_messages(self._text(data, length, "messages"))}
        if form == Form.TOKENS:
            return {"prompt": self._ffi.unpack(self._ffi.cast("int64_t *", data), length) if length else []}
        return {"prompt": self._text(data, length, "prompt")}

    def count_tokens(self, runtime: int, prompt: Any, length: int, form: int, params: int, count: Any) -> None:
        loaded: Runtime = self._handles.get(Kind.RUNTIME, runtime)
        given, options = self._prompt(prompt, length, form), self._options(params)
        count[0] = loaded.count_tokens(**given, chat_template_kwargs=options.get("chat_template_kwargs"))

    # Generating.

    def generate(
        self, session: int, prompt: Any, length: int, form: int, params: int, on_span: Any, user: Any, out: Any
    ) -> None:
        held: OpenSession = self._handles.get(Kind.SESSION, session)
        options = self._options(params)
        refuse(options, OF_SUBMIT, "is of submitted requests; leave it out, or use outrider_submit")
        options |= self._prompt(prompt, length, form)
        with held.generating() as cancel:
            options["cancel"] = cancel
            stream = held.session.stream(**options)
            if on_span:
                for span in stream:
                    ids, text = self._memory.ids(span.token_ids), self._memory.text(span.text)
                    if on_span(user, ids, len(span.token_ids), text.data, text.length):
                        cancel.set()
            made = stream.result
        out[0] = self._handles.add(Kind.RESULT, self._memory.result(made))

    # Requests served beside others.

    def submit(
        self, runtime: int, prompt: Any, length: int, form: int, params: int, call: Any, function: Any, user: Any,
        out: Any,
    ) -> None:  # fmt: skip
        loaded: Runtime = self._handles.get(Kind.RUNTIME, runtime)
        functions = Functions()
        options = self._options(params, functions.until_the_end) | self._prompt(prompt, length, form)
        try:
            handle = loaded.submit(**options)
        except ClosedError:
            raise
        except BusyError as error:
            raise QueueFullError(str(error)) from None
        request = OpenRequest(handle, functions, self._memory, self._notifier)
        out[0] = number = self._handles.add(Kind.REQUEST, request)
        if function:
            request.notify(partial(self._notify, call, function, user, number))

    def _notify(self, call: Any, function: Any, user: Any, number: int) -> None:
        """Call a notification, by `call` of the library's. Raises CallbackError."""
        said = self._ffi.new("char[]", MOST_SAID)
        call(function, user, number, said, MOST_SAID)
        self._check_said(said, "the notification")

    def next(self, request: int, timeout_ms: int, span: Any) -> None:
        span[0] = self._handles.get(Kind.REQUEST, request).next(seconds(timeout_ms))

    def request_result(self, request: int, timeout_ms: int, out: Any) -> None:
        made = self._handles.get(Kind.REQUEST, request).result(seconds(timeout_ms))
        out[0] = self._handles.add(Kind.RESULT, self._memory.result(made))

    def cancel_request(self, request: int) -> None:
        self._handles.get(Kind.REQUEST, request).cancel()

    # Branches.

    def branches(
        self, runtime: int, request: Any, length: int, params: int, on_branch: Any, user: Any, out: Any
    ) -> None:
        loaded: Runtime = self._handles.get(Kind.RUNTIME, runtime)
        options = self._options(params)
        refuse(options, OF_SUBMIT, "is of submitted requests; leave it out")
        refuse(options, OF_MESSAGES, "is of messages; leave it out")
        asked = json_object(self._text(request, length, "request"), "request", BRANCH_KEYS)
        prompt, branches = asked.pop("prompt", ""), asked.pop("branches", None)
        together = threading.Event()  # ends samples, which are asked for by number
        cancels: list[threading.Event] = []
        if isinstance(branches, list):
            cancels = [threading.Event() for _ in branches]
            given = [branch if isinstance(branch, dict) else {"prompt": branch} for branch in branches]
            for branch in given:
                check_keys(branch, OF_A_BRANCH)
            branches = [branch | {"cancel": cancel} for branch, cancel in zip(given, cancels, strict=True)]
        else:
            options["cancel"] = together
        stream = loaded.stream_branches(prompt, branches, **asked, **options)
        for each in stream:
            if on_branch:
                ids, text = self._memory.ids(each.token_ids), self._memory.text(each.text)
                if on_branch(user, each.sequence, ids, len(each.token_ids), text.data, text.length):
                    (cancels[each.sequence] if cancels else together).set()
        made = Branches(stream.results, self._memory.text(json.dumps(stream.stats.to_json())))
        out[0] = self._handles.add(Kind.BRANCHES, made)

    def branch_count(self, branches: int, count: Any) -> None:
        count[0] = len(self._handles.get(Kind.BRANCHES, branches).results)

    def branch_result(self, branches: int, index: int, out: Any) -> None:
        results = self._handles.get(Kind.BRANCHES, branches).results
        if index >= len(results):
            raise InvalidArgumentError(f"there is no branch {index}; they are 0 to {len(results) - 1}")
        out[0] = self._handles.add(Kind.RESULT, self._memory.result(results[index]))

    def branches_stats(self, branches: int, data: Any, length: Any) -> None:
        self._give(self._handles.get(Kind.BRANCHES, branches).stats, data, length)

    # Results.

    def tokens(self, result: int, tokens: Any, count: Any) -> None:
        found = self._handles.get(Kind.RESULT, result)
        tokens[0], count[0] = found.tokens, found.count

    def result_text(self, result: int, data: Any, length: Any) -> None:
        self._give(self._handles.get(Kind.RESULT, result).text, data, length)

    def stats(self, result: int, data: Any, length: Any) -> None:
        self._give(self._handles.get(Kind.RESULT, result).stats, data, length)

    def logprobs(self, result: int, out: Any) -> None:
        out[0] = self._handles.get(Kind.RESULT, result).logprobs.struct

    def seed(self, result: int, seed: Any) -> None:
        seed[0] = self._handles.get(Kind.RESULT, result).seed

    def finish_reason(self, result: int, reason: Any) -> None:
        reason[0] = self._handles.get(Kind.RESULT, result).finish_reason

    def stop(self) -> None:
        """End all that generates before the process does."""
        sessions: list[OpenSession] = self._handles.all(Kind.SESSION)
        for session in sessions:
            session.end()
        close_all()
        until = monotonic() + MOST_STOPPING
        for session in sessions:
            session.wait(max(0.0, until - monotonic()))

    def destroy(self, handle: int, kind: int) -> None:
        found = self._handles.remove(Kind(kind), handle)
        if isinstance(found, Runtime):
            found.close(timeout=0)  # the thread that serves requests ends with the last of them
        elif isinstance(found, OpenRequest):
            found.destroy()

    # Texts.

    @staticmethod
    def _give(text: Bytes, data: Any, length: Any) -> None:
        data[0], length[0] = text.data, text.length

    def _text(self, data: Any, length: int, name: str) -> str:
        given = bytes(self._ffi.buffer(data, length)) if length else b""
        try:
            return given.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InvalidArgumentError(
                f"{name} is not UTF-8: {error.reason} at byte {error.start} of {len(given)}"
            ) from None

    def _path(self, data: Any, length: int, name: str = "plan", repair: str = _THE_PLAN) -> Path:
        path = self._text(data, length, name)
        if not path or "\0" in path:
            raise InvalidArgumentError(f"{name} is no path; {repair}")
        return Path(path)
