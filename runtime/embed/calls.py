"""The Python side of every call of `outrider.h`: arguments to Python, errors to a status, handles to objects."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

from plans.check import session_bytes
from plans.errors import BusyError, OutriderError, RequestError
from plans.plan import open_plan
from runtime.backends import reason_against
from runtime.embed.handles import Handles, InvalidArgumentError, InvalidHandleError, Kind
from runtime.generation import FinishReason, Generation
from runtime.prefix_cache.cache import PrefixCacheConfig
from runtime.request import Options
from runtime.runtime import Runtime
from runtime.session import Session
from runtime.text.structured_outputs import FORMS


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
    CALLBACK = 8  # given by the library itself
    INTERNAL = 9


STATUS: tuple[tuple[type[BaseException], Status], ...] = (
    (InvalidHandleError, Status.INVALID_HANDLE),
    (InvalidArgumentError, Status.INVALID_ARGUMENT),
    (BusyError, Status.BUSY),
    (RequestError, Status.REQUEST),
    (OutriderError, Status.PLAN),
    (MemoryError, Status.NO_MEMORY),
    (ImportError, Status.ENVIRONMENT),
)
FINISHED = {FinishReason.STOP: 0, FinishReason.LENGTH: 1, FinishReason.CANCELLED: 2, FinishReason.DEADLINE: 2}
OPEN_OPTIONS: dict[str, type] = {
    "backend": str, "threads": int, "verify": bool, "cuda_graphs": bool, "prefix_cache_tokens": int, "exactness": str,
}  # fmt: skip
INTEGERS = (
    "max_new_tokens", "top_k", "seed", "stream_id", "partial_budget", "min_tokens", "draft_tokens", "draft_depth",
    "gamma_min", "gamma_max",
)  # fmt: skip
AUTO = -1  # of partial_budget
DOUBLES = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
BOOLEANS = ("ignore_eos", "auto_disable", "skip_sample_adjustment", "remember")
TEXTS = ("drafter", "filter_order", "partial_kv")
OBJECTS = ("logit_bias", "structured_outputs")  # set as texts of JSON
TEXT_LISTS = ("stop", "bad_words")
INTEGER_LISTS = ("eos_token_ids", "allowed_token_ids")
OF_A_BRANCH = (
    "prompt", "predicted_tokens", *INTEGERS, *DOUBLES, *BOOLEANS, *TEXTS, *OBJECTS, *TEXT_LISTS, *INTEGER_LISTS,
)  # fmt: skip
BRANCH_KEYS = ("prompt", "branches", "n", "mode", "max_parallel")

T = TypeVar("T")


@dataclass
class OpenSession:
    """A session and the flag that ends its generation, while there is one."""

    session: Session
    cancel: threading.Event | None = None
    _busy: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def generating(self) -> Iterator[threading.Event]:
        if not self._busy.acquire(blocking=False):
            raise BusyError("This session is generating already; wait for that call, or create another session.")
        try:
            self.cancel = threading.Event()
            yield self.cancel
        finally:
            self.cancel = None
            self._busy.release()


@dataclass(frozen=True)
class Bytes:
    """A text for C: UTF-8 with a zero behind it, and how long it is without."""

    data: Any
    length: int


@dataclass(frozen=True)
class Result:
    """The result of a generation, in C's memory."""

    tokens: Any
    count: int
    text: Bytes
    finish_reason: int
    stats: Bytes


@dataclass(frozen=True)
class Branches:
    """The results of a run of branches, a generation each, and their cost together."""

    results: list[Generation]
    stats: Bytes


def attach(ffi: Any, lib: Any) -> None:
    """Define every call of `calls.h`."""
    Calls(ffi, lib).define()


class Calls:
    """A method for each call; `define` gives them to cffi under their names in C."""

    def __init__(self, ffi: Any, lib: Any) -> None:
        self._ffi, self._lib, self._handles = ffi, lib, Handles()

    def define(self) -> None:
        for name in (
            "inspect", "open", "session", "reset", "cancel", "params", "set_int", "set_uint", "set_double", "set_bool",
            "set_text", "add_text", "add_int", "generate", "text", "tokens", "result_text", "finish_reason", "stats",
            "branches", "branch_count", "branch_result", "branches_stats", "destroy",
        ):  # fmt: skip
            call = self._told(getattr(self, name))
            self._ffi.def_extern(name=f"outrider_py_{name}", error=int(Status.INTERNAL))(call)

    def _told(self, method: Callable[..., None]) -> Callable[..., int]:
        @wraps(method)
        def call(*arguments: Any) -> int:
            try:
                method(*arguments)
            except BaseException as error:  # nothing may leave for C but a status
                return self._tell(error)
            return int(Status.OK)

        return call

    def _tell(self, error: BaseException) -> int:
        status = next((status for kind, status in STATUS if isinstance(error, kind)), Status.INTERNAL)
        text = str(error) or type(error).__name__
        if status is Status.NO_MEMORY:
            text = "there is not enough memory for this"
        elif status is Status.ENVIRONMENT:
            text = f"Outrider's environment is incomplete ({error}); copy or install it whole again"
        elif status is Status.INTERNAL:
            text = f"a fault of Outrider's own, please report it: {type(error).__name__}: {error}"
        data = text.encode("utf-8", "replace").replace(b"\0", b"?")
        self._lib.outrider_tell(data, len(data))
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
        out[0] = self._handles.add(Kind.TEXT, self._bytes(json.dumps(described)))

    def text(self, text: int, data: Any, length: Any) -> None:
        self._give(self._handles.get(Kind.TEXT, text), data, length)

    def open(self, plan: Any, length: int, options: Any, options_length: int, out: Any) -> None:
        path, given = self._path(plan, length), self._text(options, options_length, "options")
        runtime = Runtime.load(path, **_open_options(given))
        out[0] = self._handles.add(Kind.RUNTIME, runtime)

    # Sessions.

    def session(self, runtime: int, out: Any) -> None:
        session = self._handles.get(Kind.RUNTIME, runtime).session()
        out[0] = self._handles.add(Kind.SESSION, OpenSession(session))

    def reset(self, session: int) -> None:
        cast(OpenSession, self._handles.get(Kind.SESSION, session)).session.reset()

    def cancel(self, session: int) -> None:
        running = cast(OpenSession, self._handles.get(Kind.SESSION, session)).cancel
        if running is not None:
            running.set()

    # Options.

    def params(self, out: Any) -> None:
        out[0] = self._handles.add(Kind.PARAMS, {})

    def set_int(self, params: int, key: Any, length: int, value: int) -> None:
        self._set(params, key, length, INTEGERS, "integer", value)

    def set_uint(self, params: int, key: Any, length: int, value: int) -> None:
        self._set(params, key, length, INTEGERS, "integer", value)

    def set_double(self, params: int, key: Any, length: int, value: float) -> None:
        self._set(params, key, length, DOUBLES, "double", value)

    def set_bool(self, params: int, key: Any, length: int, value: int) -> None:
        if value not in (0, 1):
            raise InvalidArgumentError(f"a bool is 0 or 1, not {value}")
        self._set(params, key, length, BOOLEANS, "bool", bool(value))

    def set_text(self, params: int, key: Any, length: int, value: Any, value_length: int) -> None:
        options = self._handles.get(Kind.PARAMS, params)
        name = self._key(key, length, (*TEXTS, *OBJECTS), "text options are set")
        text = self._text(value, value_length, "value")
        options[name] = (
            _json_object(text, name, FORMS if name == "structured_outputs" else None) if name in OBJECTS else text
        )

    def add_text(self, params: int, key: Any, length: int, value: Any, value_length: int) -> None:
        self._add(params, key, length, TEXT_LISTS, self._text(value, value_length, "value"))

    def add_int(self, params: int, key: Any, length: int, value: int) -> None:
        self._add(params, key, length, INTEGER_LISTS, value)

    def _set(self, params: int, key: Any, length: int, keys: tuple[str, ...], kind: str, value: object) -> None:
        options = self._handles.get(Kind.PARAMS, params)
        name = self._key(key, length, keys, f"{kind} options are set")
        options[name] = "auto" if (name, value) == ("partial_budget", AUTO) else value

    def _add(self, params: int, key: Any, length: int, keys: tuple[str, ...], value: object) -> None:
        options = self._handles.get(Kind.PARAMS, params)
        name = self._key(key, length, keys, "lists are added to")
        options[name] = [*options.get(name, ()), value]

    def _key(self, key: Any, length: int, keys: tuple[str, ...], how: str) -> str:
        name = self._text(key, length, "key")
        if name not in keys:
            raise InvalidArgumentError(f"there is no key {name[:100]!r} here; by this call {how}: {', '.join(keys)}")
        return name

    # Generating.

    def generate(
        self,
        session: int,
        text: Any,
        length: int,
        tokens: Any,
        count: int,
        params: int,
        on_span: Any,
        user: Any,
        out: Any,
    ) -> None:
        held: OpenSession = self._handles.get(Kind.SESSION, session)
        options = Options()
        if params:
            options |= self._handles.get(Kind.PARAMS, params)
        prompt: str | list[int] = self._text(text, length, "prompt")
        if count or not length:
            prompt = self._ffi.unpack(tokens, count) if count else []
        with held.generating() as cancel:
            options["cancel"] = cancel
            stream = held.session.stream(prompt, **options)
            if on_span:
                for span in stream:
                    ids, told = self._ffi.new("int64_t[]", span.token_ids), self._bytes(span.text)
                    if on_span(user, ids, len(span.token_ids), told.data, told.length):
                        cancel.set()
            made = stream.result
        out[0] = self._handles.add(Kind.RESULT, self._result(made))

    def _result(self, made: Generation) -> Result:
        return Result(
            tokens=self._ffi.new("int64_t[]", made.token_ids),
            count=len(made.token_ids),
            text=self._bytes(made.text),
            finish_reason=FINISHED[made.finish_reason],
            stats=self._bytes(json.dumps(made.stats.to_json())),
        )

    def branches(
        self, runtime: int, request: Any, length: int, params: int, on_branch: Any, user: Any, out: Any
    ) -> None:
        loaded: Runtime = self._handles.get(Kind.RUNTIME, runtime)
        options = dict(self._handles.get(Kind.PARAMS, params)) if params else {}
        asked = _json_object(self._text(request, length, "request"), "request", BRANCH_KEYS)
        prompt, branches = asked.pop("prompt", ""), asked.pop("branches", None)
        together = threading.Event()  # ends samples, which are asked for by number
        cancels: list[threading.Event] = []
        if isinstance(branches, list):
            cancels = [threading.Event() for _ in branches]
            given = [branch if isinstance(branch, dict) else {"prompt": branch} for branch in branches]
            for branch in given:
                _check_keys(branch, OF_A_BRANCH)
            branches = [branch | {"cancel": cancel} for branch, cancel in zip(given, cancels, strict=True)]
        else:
            options["cancel"] = together
        stream = loaded.stream_branches(prompt, branches, **asked, **options)
        for each in stream:
            if on_branch:
                ids, told = self._ffi.new("int64_t[]", each.token_ids), self._bytes(each.text)
                if on_branch(user, each.sequence, ids, len(each.token_ids), told.data, told.length):
                    (cancels[each.sequence] if cancels else together).set()
        made = Branches(stream.results, self._bytes(json.dumps(stream.stats.to_json())))
        out[0] = self._handles.add(Kind.BRANCHES, made)

    def branch_count(self, branches: int, count: Any) -> None:
        count[0] = len(self._handles.get(Kind.BRANCHES, branches).results)

    def branch_result(self, branches: int, index: int, out: Any) -> None:
        results = self._handles.get(Kind.BRANCHES, branches).results
        if index >= len(results):
            raise InvalidArgumentError(f"there is no branch {index}; they are 0 to {len(results) - 1}")
        out[0] = self._handles.add(Kind.RESULT, self._result(results[index]))

    def branches_stats(self, branches: int, data: Any, length: Any) -> None:
        self._give(self._handles.get(Kind.BRANCHES, branches).stats, data, length)

    def tokens(self, result: int, tokens: Any, count: Any) -> None:
        found: Result = self._handles.get(Kind.RESULT, result)
        tokens[0], count[0] = found.tokens, found.count

    def result_text(self, result: int, data: Any, length: Any) -> None:
        self._give(self._handles.get(Kind.RESULT, result).text, data, length)

    def stats(self, result: int, data: Any, length: Any) -> None:
        self._give(self._handles.get(Kind.RESULT, result).stats, data, length)

    def finish_reason(self, result: int, reason: Any) -> None:
        reason[0] = self._handles.get(Kind.RESULT, result).finish_reason

    def destroy(self, handle: int, kind: int) -> None:
        self._handles.remove(Kind(kind), handle)

    # Texts.

    def _bytes(self, text: str) -> Bytes:
        data = text.encode("utf-8", "replace")
        return Bytes(self._ffi.new("char[]", data), len(data))

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

    def _path(self, data: Any, length: int) -> Path:
        path = self._text(data, length, "plan")
        if not path or "\0" in path:
            raise InvalidArgumentError("plan is no path; pass the folder that `outrider build` has made")
        return Path(path)


def _open_options(given: str) -> dict[str, Any]:
    """Keyword arguments of `Runtime.load`."""
    options = _json_object(given, "options", OPEN_OPTIONS)
    for key, value in options.items():
        kind = OPEN_OPTIONS[key]
        if type(value) is not kind:
            raise InvalidArgumentError(f"the option {key!r} is a {_JSON[kind]}, not {json.dumps(value)[:100]}")
    if tokens := options.pop("prefix_cache_tokens", 0):
        options["prefix_cache"] = PrefixCacheConfig(max_cached_tokens=tokens)
    return options


def _json_object(given: str, name: str, keys: Collection[str] | None = None) -> dict[str, Any]:
    """A JSON object with no other keys than these, if any are known; nothing is an empty one."""
    if not given.strip():
        return {}
    try:
        value = json.loads(given)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"{name} must be a JSON object, and is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidArgumentError(f'{name} must be a JSON object, such as {{"{next(iter(keys or ("12",)))}": ...}}')
    if keys is not None:
        _check_keys(value, keys)
    return value


def _check_keys(given: Mapping[str, Any], keys: Collection[str]) -> None:
    for key in given:
        if key not in keys:
            raise InvalidArgumentError(f"there is no option {key[:100]!r}; the options are {', '.join(keys)}")


_JSON = {str: "string", int: "whole number", bool: "truth value"}
