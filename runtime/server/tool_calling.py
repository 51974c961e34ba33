"""Calls of tools: the grammar that keeps them to their functions' schemas, and what a text says as it comes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.runtime.server.stamps import FreshStamps, Stamps
from outrider.runtime.server.tool_formats import ToolFormat
from outrider.runtime.text.structured_outputs import lark_text

_ANYTHING = r"/(.|\n)*/"


@dataclass(frozen=True)
class ToolCalling:
    """What an answer may call: functions' schemas by name, as llguidance reads them.

    It may call `several` times, and `must` call or may answer with text: of the schema `text`, where there is one. That
    takes a format with a trigger.
    """

    form: ToolFormat
    functions: Mapping[str, Mapping[str, Any]]
    must: bool
    several: bool
    text: Mapping[str, Any] | None = None

    @property
    def grammar(self) -> str:
        """The answer's grammar, for Lark.

        Where any text is allowed, a call begins at the format's trigger, wherever that comes in the text; without a
        trigger where the text begins with a brace. An answer of a schema is all of that, or calls.
        """
        form, between = self.form, self.form.between
        again = "" if between is None or not self.several else f" ({lark_text(between + form.begin)} call)*"
        calls = f"call{again}"
        if self.must:
            start = f"start: {lark_text(form.begin)} {calls}" if form.begin else f"start: {calls}"
        elif self.text is not None:
            start = f"start: answer | {lark_text(form.begin)} {calls}\nanswer: %json {json.dumps(self.text)}"
        elif form.trigger:
            rest = form.begin.partition(form.trigger)[2]
            start = f"start: TEXT | before {lark_text(rest)} {calls}\nTEXT: {_ANYTHING}\n"
            start += rf"before[lazy]: /(.|\n)*{re.escape(form.trigger)}/"
        else:
            start = f"start: TEXT? | {calls}\nTEXT: /[^{{](.|\\n)*/"
        rules = [start, "call: " + " | ".join(f"call_{place}" for place in range(len(self.functions)))]
        for place, (name, schema) in enumerate(self.functions.items()):
            rules.append(f"call_{place}: {lark_text(form.head(name))} arguments_{place} {lark_text(form.tail)}")
            rules.append(f"arguments_{place}: %json {json.dumps(schema)}")
        return "\n".join(rules) + "\n"

    def reader(self, stamps: Stamps | None = None) -> CallReader:
        """A reader of one answer, whose calls get the ids of `stamps` (default: fresh ones)."""
        return CallReader(self, stamps or FreshStamps())


@dataclass
class Read:
    """What a piece of text said: text of the message, and pieces of calls as OpenAI's deltas, by place."""

    content: str = ""
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)


class CallReader:
    """Parts an answer that keeps to a `ToolCalling` grammar into text and calls, as it comes.

    Text that may be the beginning of a call is held back until that is known.
    """

    def __init__(self, calling: ToolCalling, stamps: Stamps) -> None:
        self._stamps = stamps
        form = self._form = calling.form
        self._heads = {form.head(name): name for name in calling.functions}
        if calling.must:
            self._state = self._before_call
        else:
            self._state = self._text if form.trigger and calling.text is None else self._beginning
        self._expected = form.begin  # before the next call's head
        self._held = ""
        self._depth, self._in_string, self._escaped = 0, False, False
        self.calls = 0
        self.whole = False  # whether the last call has been read to its end

    def push(self, text: str) -> Read:
        """Read text; return what is certain now."""
        self._held += text
        read = Read()
        state = None
        while self._held and state != (self._state, self._held):
            state = self._state, self._held
            self._state(read)
        return read

    def finish(self) -> Read:
        """What was held back, when no more text comes; a call that was cut off stays as far as it was read."""
        read = Read()
        if not self.calls and self._state in (self._text, self._beginning):
            read.content, self._held = self._held, ""
        return read

    def _beginning(self, read: Read) -> None:
        """Without a trigger, or where all of a text has a form, it is a call if it begins as one."""
        begins = [self._expected + head for head in self._heads]
        if any(self._held.startswith(begin) for begin in begins):
            self._state = self._before_call
        elif not any(begin.startswith(self._held) for begin in begins):
            self._state = self._rest

    def _rest(self, read: Read) -> None:
        read.content += self._held
        self._held = ""

    def _text(self, read: Read) -> None:
        trigger = self._form.trigger
        content, found, _ = self._held.partition(trigger)
        if found:
            self._held = self._held[len(content) :]
            self._state = self._before_call
        else:
            longest = max(n for n in range(len(trigger)) if self._held.endswith(trigger[:n]))
            content = self._held[: len(self._held) - longest]
            self._held = self._held[len(content) :]
        read.content += content

    def _before_call(self, read: Read) -> None:
        if not self._held.startswith(self._expected):
            return
        for head, name in self._heads.items():
            if self._held.startswith(self._expected + head):
                self._held = self._held[len(self._expected + head) :]
                call = {"index": self.calls, "id": f"call_{self._stamps.token()}", "type": "function"}
                read.calls[self.calls] = {**call, "function": {"name": name, "arguments": ""}}
                self.calls, self.whole, self._state = self.calls + 1, False, self._arguments
                return

    def _arguments(self, read: Read) -> None:
        length = next((place + 1 for place, each in enumerate(self._held) if self._closes(each)), len(self._held))
        place = self.calls - 1
        call = read.calls.setdefault(place, {"index": place, "function": {"arguments": ""}})
        call["function"]["arguments"] += self._held[:length]
        self._held = self._held[length:]
        if self._depth == 0:
            self._state = self._after_call

    def _closes(self, character: str) -> bool:
        """Follow JSON by a character; whether it ends the arguments' object."""
        if self._in_string:
            if self._escaped or character == "\\":
                self._escaped = not self._escaped
            elif character == '"':
                self._in_string = False
            return False
        self._in_string = character == '"'
        self._depth += (character in "{[") - (character in "}]")
        return self._depth == 0 and character == "}"

    def _after_call(self, read: Read) -> None:
        if self._held.startswith(self._form.tail):
            self._held = self._held[len(self._form.tail) :]
            self._expected = (self._form.between or "") + self._form.begin
            self.whole, self._state = True, self._before_call


def joined(read: Sequence[Read]) -> Read:
    """Put the pieces of an answer together, to its text and its whole calls."""
    found = Read("".join(each.content for each in read))
    for each in read:
        for place, call in each.calls.items():
            if place in found.calls:
                found.calls[place]["function"]["arguments"] += call["function"]["arguments"]
            else:
                found.calls[place] = {key: value for key, value in call.items() if key != "index"}
    return found
