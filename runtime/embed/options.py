"""Options as C has them: what its calls set, by key, and JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.plans.errors import RequestError
from outrider.runtime.embed.handles import InvalidArgumentError
from outrider.runtime.options.kinds import Call
from outrider.runtime.options.options import Doors, offered
from outrider.runtime.prefix_cache.cache import PrefixCacheConfig
from outrider.runtime.request_queue import SchedulerConfig
from outrider.runtime.text.structured_outputs import FORMS

AUTO = -1  # of partial_budget
OF_SUBMIT: dict[str, Call | None] = {"priority": "int", "deadline": "double", "client": "text"}
OF_MESSAGES: dict[str, Call | None] = {"chat_template_kwargs": "json"}
OFFERED: dict[str, Call | None] = (
    {name: option.kind.c for name, option in offered(Doors.C).items()} | OF_SUBMIT | OF_MESSAGES
)
"""The call that sets each option; of lists, the one that adds to them."""
OF_A_BRANCH = ("prompt", "predicted_tokens", *(name for name in offered(Doors.C) if name != "generated"))
BRANCH_KEYS = ("prompt", "branches", "n", "mode", "max_parallel")

OPEN_OPTIONS: dict[str, type] = {
    "backend": str, "threads": int, "verify": bool, "cuda_graphs": bool, "share_memory": bool, "exactness": str,
    "prefix_cache": dict, "prefix_cache_tokens": int, "scheduler": dict,
}  # fmt: skip
_JSON = {str: "string", int: "whole number", bool: "truth value", float: "number", dict: "JSON object"}


OnLogits = Callable[[list[int], NDArray[np.float32]], None]


@dataclass
class Params:
    """Options of a generation, and functions that change its logits."""

    values: dict[str, Any] = field(default_factory=dict)
    functions: list[OnLogits] = field(default_factory=list)

    def set(self, key: str, kind: Call, value: object) -> None:
        """Set what a call for this `kind` sets. Raises InvalidArgumentError for a key of another."""
        _check_key(key, keys_of(kind), f"{kind} options are set")
        self.values[key] = "auto" if (key, value) == ("partial_budget", AUTO) else value

    def set_text(self, key: str, text: str) -> None:
        """The same of texts, and of options that are JSON."""
        _check_key(key, keys_of("text", "json"), "text options are set")
        forms = FORMS if key == "structured_outputs" else None
        self.values[key] = json_object(text, key, forms) if OFFERED[key] == "json" else text

    def add(self, key: str, kind: Call, values: list[Any]) -> None:
        """Add to a list."""
        _check_key(key, keys_of(kind), "lists are added to")
        self.values[key] = [*self.values.get(key, ()), *values]

    def options(self, wrap: Callable[[OnLogits], OnLogits] = lambda function: function) -> dict[str, Any]:
        """Options for Python, a copy; `wrap` is put around each function of logits."""
        functions = {"logits_processors": list(map(wrap, self.functions))} if self.functions else {}
        return self.values | functions


def _check_key(name: str, keys: Collection[str], how: str) -> None:
    if name not in keys:
        raise InvalidArgumentError(f"there is no key {name[:100]!r} here; by this call {how}: {', '.join(keys)}")


def refuse(options: Mapping[str, Any], keys: Collection[str], why: str) -> None:
    """Raise `RequestError` where one of `keys` is among the options, which this call does not have."""
    for key in keys:
        if key in options:
            raise RequestError(f"{key} is given, which {why}.")


def open_options(given: str) -> dict[str, Any]:
    """Keyword arguments of `Runtime.load`. Raises InvalidArgumentError, and RequestError for values out of limits."""
    options = json_object(given, "options", OPEN_OPTIONS)
    for key, value in options.items():
        _check_type(key, value, OPEN_OPTIONS[key])
    tokens = options.pop("prefix_cache_tokens", 0)
    if tokens and "prefix_cache" in options:
        raise InvalidArgumentError("prefix_cache and prefix_cache_tokens are given; pass one of them")
    if tokens:
        options["prefix_cache"] = {"max_cached_tokens": tokens}
    for key, kind in (("prefix_cache", PrefixCacheConfig), ("scheduler", SchedulerConfig)):
        if key in options:
            options[key] = kind(**_settings(key, options[key], kind))
    return options


def _settings(
    name: str, given: dict[str, Any], kind: type[PrefixCacheConfig] | type[SchedulerConfig]
) -> dict[str, Any]:
    """Check names, and types by the defaults; the configuration itself checks the rest."""
    defaults = {each.name: each.default for each in fields(kind)}
    check_keys(given, defaults)
    for key, value in given.items():
        default = defaults[key]
        if default is not None and default is not MISSING:
            _check_type(f"{name}.{key}", value, type(default))
    return given


def _check_type(key: str, value: object, kind: type) -> None:
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise InvalidArgumentError(f"the option {key!r} is a {_JSON[kind]}, not {json.dumps(value)[:100]}")


def json_value(given: str, name: str, what: str) -> Any:
    """Parse JSON; `what` says what it must be."""
    try:
        return json.loads(given)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"{name} must be {what}, and is not JSON: {error}") from None


def json_object(given: str, name: str, keys: Collection[str] | None = None) -> dict[str, Any]:
    """A JSON object with no other keys than these, if any are known; nothing is an empty one."""
    if not given.strip():
        return {}
    value = json_value(given, name, "a JSON object")
    if not isinstance(value, dict):
        raise InvalidArgumentError(f'{name} must be a JSON object, such as {{"{next(iter(keys or ("12",)))}": ...}}')
    if keys is not None:
        check_keys(value, keys)
    return value


def json_messages(given: str) -> list[Any]:
    """A conversation: a JSON list. What its messages are to be, the chat template knows."""
    what = 'a JSON list of messages, such as [{"role": "user", "content": "..."}]'
    value = json_value(given, "messages", what)
    if not isinstance(value, list):
        raise InvalidArgumentError(f"messages must be {what}")
    return value


def check_keys(given: Mapping[str, Any], keys: Collection[str]) -> None:
    for key in given:
        if key not in keys:
            raise InvalidArgumentError(f"there is no option {key[:100]!r}; the options are {', '.join(keys)}")


def keys_of(*calls: Call) -> list[str]:
    """Return the options that these calls set."""
    return [name for name, call in OFFERED.items() if call in calls]


def describe_options() -> str:
    """Return the part of `outrider.h` that says what each option is; a test holds the two together."""
    calls = {"json": "text", "texts": "add_text", "ints": "add_int"}
    lines = []
    for name, option in offered(Doors.C).items():
        call = option.kind.c or ""
        text = option.text.replace("or auto", f"or {AUTO} (auto)")
        lines += textwrap.wrap(
            f"{name} ({calls.get(call, call)}): {text}", 117, initial_indent=" * - ", subsequent_indent=" *   "
        )
    return "\n".join(lines)
