"""How models write calls of tools, by what their chat templates print."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from outrider.plans.chat_template import ChatTemplate
from outrider.plans.errors import OutriderError, RequestError
from outrider.plans.manifest import ToolParser


@dataclass(frozen=True)
class ToolFormat:
    """A call is `begin`, an object of the function's `name` and, under the key `arguments`, what it is called with, and
    `end`. `between` stands between calls; None where there is one call alone.
    """

    begin: str
    arguments: str
    end: str
    between: str | None

    @property
    def trigger(self) -> str:
        """What a text must not hold but in a call; "" where a call is known by how the text begins."""
        return self.begin.strip()

    def head(self, name: str) -> str:
        """What stands before the arguments, after `begin`."""
        return f'{{"name": "{name}", "{self.arguments}": '

    @property
    def tail(self) -> str:
        """What stands after the arguments."""
        return "}" + self.end


HERMES = ToolFormat("<tool_call>\n", "arguments", "\n</tool_call>", "\n")
LLAMA = ToolFormat("", "parameters", "", None)
PLAIN = ToolFormat("", "arguments", "", None)

FORMATS: dict[ToolParser, ToolFormat] = {"hermes": HERMES, "llama": LLAMA, "json": PLAIN}
_CALLED, _VALUE = "called_for_a_probe", "a value for a probe"
_PROBE = {"name": _CALLED, "arguments": {"key": _VALUE}}
_TOOLS = [{"type": "function", "function": {"name": _CALLED, "description": "", "parameters": {"type": "object"}}}]


def format_of(template: ChatTemplate, special: Collection[str] = (), named: ToolParser | None = None) -> ToolFormat:
    """Return the format in which a chat template prints a call to the model, or the one that the plan has `named`.

    Raises RequestError where that is none of `FORMATS`, or marked with one of the tokens that are `special`, which are
    no part of a text.
    """
    form = FORMATS[named] if named is not None else _printed(template)
    if form is None:
        raise RequestError(
            "The chat template of the plan prints calls of tools in no format that is served, so that they would look "
            "like text; leave tools out, or, if the model writes them in one of "
            f"{', '.join(FORMATS)} all the same, name it as target.tool_parser in the recipe."
        )
    if form.trigger in special:
        raise RequestError(
            f"The model marks calls of tools with the special token {form.trigger!r}, which is no part of a text; "
            "leave tools out."
        )
    return form


@lru_cache(maxsize=16)
def _printed(template: ChatTemplate) -> ToolFormat | None:
    """Return the format of the call in a conversation that the template renders."""
    call = {"id": "probe0000", "type": "function", "function": _PROBE}
    try:
        said = _rendered(template, {"content": _VALUE})
        called = _rendered(template, {"content": "", "tool_calls": [call]})
    except OutriderError:
        return None
    opening = said[: said.find(_VALUE)].rstrip()  # of an assistant's message
    for form in FORMATS.values():
        start = re.escape(form.begin) if form.begin else re.escape(opening) + r"\s*"
        arguments = rf'\{{\s*"key":\s*"{_VALUE}"\s*\}}'
        whole = rf'{start}\{{\s*"name":\s*"{_CALLED}",\s*"{form.arguments}":\s*{arguments}\s*\}}{re.escape(form.end)}'
        if re.search(whole, called):
            return form
    return None


def _rendered(template: ChatTemplate, answer: dict[str, Any]) -> str:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", **answer}]
    return template.render(messages, False, {"tools": _TOOLS})
