"""The Python side of every call of `outrider.h`: arguments to Python, errors to a status, handles to objects."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from time import monotonic
from typing import Any

from outrider.plans.check import session_bytes
from outrider.plans.errors import BusyError, ClosedError, RequestError
from outrider.plans.plan import open_plan
from outrider.runtime.backends import reason_against
from outrider.runtime.embed.c_memory import Bytes, CMemory
from outrider.runtime.embed.handles import Handles, InvalidArgumentError, Kind, QueueFullError
from outrider.runtime.embed.options import (
    BRANCH_KEYS,
    OF_A_BRANCH,
    OF_MESSAGES,
    OF_SUBMIT,
    Params,
    check_keys,
    json_messages,
    json_object,
    open_options,
    refuse,
)
from outrider.runtime.embed.requests import Functions, Notifier, OpenRequest, OpenSession, ProgramFunctions, seconds
from outrider.runtime.embed.status import Status, describe_error
from outrider.runtime.generation import Generation
from outrider.runtime.runtime import Runtime
from outrider.runtime.scheduler import close_all
from outrider.runtime.session import Session


class Form(IntEnum):
    """What a prompt is (`bridge.h`)."""

    TEXT = 0
    TOKENS = 1
    MESSAGES = 2


_THE_PLAN = "pass the folder that `outrider build` has made"
MOST_STOPPING = 10.0  # seconds that the process's end waits for sessions


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
        self._memory, self._notifier, self._program = CMemory(ffi), Notifier(), ProgramFunctions(ffi)

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
        status, text = describe_error(error)
        data = text.encode("utf-8", "replace").replace(b"\0", b"?")
        self._lib.outrider_report(data, len(data))
        return int(status)

    # Plans.

    def inspect(self, plan: Any, length: int, out: Any) -> None:
        opened = open_plan(self._memory.read_path(plan, length, "plan", _THE_PLAN))
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
        self._handles.get(Kind.TEXT, text).give(data, length)

    def open(self, plan: Any, length: int, options: Any, options_length: int, out: Any) -> None:
        path = self._memory.read_path(plan, length, "plan", _THE_PLAN)
        given = open_options(self._memory.read_text(options, options_length, "options"))
        out[0] = self._handles.add(Kind.RUNTIME, Runtime.load(path, **given))

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
        file = self._memory.read_path(path, length, "path", "name a file")
        try:
            count = loaded.save_prefix_cache(file)
        except OSError as error:
            raise RequestError(f"The prefix cache cannot be saved to {file}: {error}.") from None
        if tokens:
            tokens[0] = count

    def load_cache(self, runtime: int, path: Any, length: int, tokens: Any) -> None:
        loaded: Runtime = self._handles.get(Kind.RUNTIME, runtime)
        count = loaded.load_prefix_cache(self._memory.read_path(path, length, "path", "name a file"))
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
        self._params(params).set(self._key(key, length), "int", value)

    set_uint = set_int

    def set_double(self, params: int, key: Any, length: int, value: float) -> None:
        self._params(params).set(self._key(key, length), "double", value)

    def set_bool(self, params: int, key: Any, length: int, value: int) -> None:
        if value not in (0, 1):
            raise InvalidArgumentError(f"a bool is 0 or 1, not {value}")
        self._params(params).set(self._key(key, length), "bool", bool(value))

    def set_text(self, params: int, key: Any, length: int, value: Any, value_length: int) -> None:
        self._params(params).set_text(self._key(key, length), self._memory.read_text(value, value_length, "value"))

    def add_text(self, params: int, key: Any, length: int, value: Any, value_length: int) -> None:
        text = self._memory.read_text(value, value_length, "value")
        self._params(params).add(self._key(key, length), "texts", [text])

    def add_ints(self, params: int, key: Any, length: int, values: Any, count: int) -> None:
        self._params(params).add(self._key(key, length), "ints", self._memory.read_ids(values, count))

    def add_function(self, params: int, call: Any, function: Any, user: Any) -> None:
        self._params(params).functions.append(partial(self._program.change_logits, call, function, user))

    def _params(self, params: int) -> Params:
        held: Params = self._handles.get(Kind.PARAMS, params)
        return held

    def _options(self, params: int) -> Params:
        """None are set where NULL is passed."""
        return self._params(params) if params else Params()

    def _key(self, key: Any, length: int) -> str:
        return self._memory.read_text(key, length, "key")

    def _prompt(self, prompt: Any) -> dict[str, Any]:
        """The argument of Python's calls that an `outrider_prompt` is."""
        if prompt.form == Form.TOKENS:
            return {"prompt": self._memory.read_ids(self._ffi.cast("int64_t *", prompt.data), prompt.length)}
        name = "messages" if prompt.form == Form.MESSAGES else "prompt"
        text = self._memory.read_text(prompt.data, prompt.length, name)
        return {name: json_messages(text) if prompt.form == Form.MESSAGES else text}

    def count_tokens(self, runtime: int, prompt: Any, params: int, count: Any) -> None:
        loaded: Runtime = self._handles.get(Kind.RUNTIME, runtime)
        variables = self._options(params).options().get("chat_template_kwargs")
        count[0] = loaded.count_tokens(**self._prompt(prompt), chat_template_kwargs=variables)

    # Generating.

    def generate(self, session: int, prompt: Any, params: int, on_span: Any, user: Any, out: Any) -> None:
        held: OpenSession = self._handles.get(Kind.SESSION, session)
        options = self._options(params).options()
        refuse(options, OF_SUBMIT, "is of submitted requests; leave it out, or use outrider_submit")
        options |= self._prompt(prompt)
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

    def submit(self, runtime: int, prompt: Any, params: int, call: Any, function: Any, user: Any, out: Any) -> None:
        loaded: Runtime = self._handles.get(Kind.RUNTIME, runtime)
        functions = Functions()
        options = self._options(params).options(functions.until_the_end) | self._prompt(prompt)
        try:
            handle = loaded.submit(**options)
        except ClosedError:
            raise
        except BusyError as error:
            raise QueueFullError(str(error)) from None
        request = OpenRequest(handle, functions, self._memory, self._notifier)
        out[0] = number = self._handles.add(Kind.REQUEST, request)
        if function:
            request.notify(partial(self._program.notify, call, function, user, number))

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
        options = self._options(params).options()
        refuse(options, OF_SUBMIT, "is of submitted requests; leave it out")
        refuse(options, OF_MESSAGES, "is of messages; leave it out")
        asked = json_object(self._memory.read_text(request, length, "request"), "request", BRANCH_KEYS)
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
        self._handles.get(Kind.BRANCHES, branches).stats.give(data, length)

    # Results.

    def tokens(self, result: int, tokens: Any, count: Any) -> None:
        found = self._handles.get(Kind.RESULT, result)
        tokens[0], count[0] = found.tokens, found.count

    def result_text(self, result: int, data: Any, length: Any) -> None:
        self._handles.get(Kind.RESULT, result).text.give(data, length)

    def stats(self, result: int, data: Any, length: Any) -> None:
        self._handles.get(Kind.RESULT, result).stats.give(data, length)

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
