"""What of an answer must be the same whoever gives it: texts, calls, reasons and log-probabilities by choice."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_HALF = "\ufffd"  # stands for bytes of a character whose rest has not come


@dataclass
class Choice:
    """A choice as far as it has come. `calls` are names and arguments of tools by place."""

    text: str = ""
    reason: str | None = None
    calls: dict[int, list[str]] = field(default_factory=dict)
    logprobs: list[float] = field(default_factory=list)

    def begins(self, whole: Choice) -> bool:
        """Whether `whole` may go on from here."""
        text, calls = self.text.rstrip(_HALF), sorted(self.calls.items())
        return (
            whole.text.startswith(text)
            and whole.logprobs[: len(self.logprobs)] == self.logprobs
            and all(
                place in whole.calls and whole.calls[place][0] == name and whole.calls[place][1].startswith(arguments)
                for place, (name, arguments) in calls
            )
        )


@dataclass
class Answer:
    """Choices by index, the number of tokens, and the error that a body or an event told."""

    status: int = 0
    choices: dict[int, Choice] = field(default_factory=dict)
    tokens: int | None = None
    fingerprint: str | None = None
    created: int | None = None
    error: dict[str, Any] | None = None
    done: bool = False  # whether the end of a stream has come, or the whole body

    def take(self, body: dict[str, Any]) -> None:
        """Take in a whole answer, or the next event of a stream."""
        if "error" in body:
            self.error = body["error"]
            return
        self.fingerprint, self.created = body["system_fingerprint"], body["created"]
        if body.get("usage"):
            self.tokens = body["usage"]["completion_tokens"]
        for each in body["choices"]:
            choice = self.choices.setdefault(each["index"], Choice())
            said = each.get("message") or each.get("delta") or {}
            choice.text += each.get("text") or said.get("content") or ""
            choice.reason = each["finish_reason"] or choice.reason
            for place, call in enumerate(said.get("tool_calls") or ()):
                known = choice.calls.setdefault(call.get("index", place), ["", ""])
                known[0] += call["function"].get("name") or ""
                known[1] += call["function"]["arguments"]
            choice.logprobs += _values(each.get("logprobs"))

    def same(self, expected: Answer) -> bool:
        """Whether both say the same, to the last bit of a log-probability."""
        return (self.choices, self.tokens) == (expected.choices, expected.tokens)

    def begins(self, expected: Answer) -> bool:
        """Whether it is the beginning of what is expected."""
        return all(
            index in expected.choices and each.begins(expected.choices[index]) for index, each in self.choices.items()
        )


def _values(logprobs: dict[str, Any] | None) -> list[float]:
    """Of the chosen tokens, and of the most probable ones, in order."""
    if logprobs is None:
        return []
    if "content" in logprobs:
        return [
            value
            for entry in logprobs["content"]
            for value in (entry["logprob"], *(each["logprob"] for each in entry["top_logprobs"]))
        ]
    pairs = zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    return [value for chosen, top in pairs for value in (chosen, *top.values())]
