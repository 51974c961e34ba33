"""How models write calls of tools, by what their chat templates print."""

from __future__ import annotations

from dataclasses import dataclass

from plans.errors import RequestError


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
        """What stands before the arguments, behind `begin`."""
        return f'{{"name": "{name}", "{self.arguments}": '

    @property
    def tail(self) -> str:
        """What stands behind the arguments."""
        return "}" + self.end


HERMES = ToolFormat("<tool_call>\n", "arguments", "\n</tool_call>", "\n")
LLAMA = ToolFormat("", "parameters", "", None)
PLAIN = ToolFormat("", "arguments", "", None)

_NOT_SERVED = {
    "<function=": "as XML",
    "[TOOL_CALLS]": "behind [TOOL_CALLS]",
    "<\uff5ctool": "between special tokens of DeepSeek's",
    "<|channel|>": "in channels",
}
_SERVED = (("<tool_call>", HERMES), ('"parameters": ', LLAMA))


def format_of(template: str) -> ToolFormat:
    """Return the format that a chat template shows the model; a plain object where it shows none that is known.

    Raises RequestError where that is one that is not served.
    """
    for mark, how in _NOT_SERVED.items():
        if mark in template:
            raise RequestError(
                f"The chat template of the plan has the model write calls of tools {how}, which is not served; leave "
                "tools out."
            )
    return next((form for mark, form in _SERVED if mark in template), PLAIN)
