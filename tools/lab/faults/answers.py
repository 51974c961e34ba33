"""An answer of a server, whole or as far as it has come, and where it parts from the expected one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from outrider.tools.parting import Divergence, Outcome, divergence, read_logprobs


@dataclass
class Answer:
    """Choices by index, the number of tokens, and the error that a body or an event told."""

    status: int = 0
    choices: dict[int, Outcome] = field(default_factory=dict)
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
            known = self.choices.get(each["index"], Outcome(logprobs=()))
            said = each.get("message") or each.get("delta") or {}
            calls = dict(enumerate(known.calls))
            for place, call in enumerate(said.get("tool_calls") or ()):
                name, arguments = calls.get(at := call.get("index", place), ("", ""))
                more = call["function"]
                calls[at] = name + (more.get("name") or ""), arguments + more["arguments"]
            self.choices[each["index"]] = replace(
                known,
                text=known.text + (each.get("text") or said.get("content") or ""),
                finish=each["finish_reason"] or known.finish,
                calls=tuple(call for _, call in sorted(calls.items())),
                logprobs=(known.logprobs or ()) + read_logprobs(each.get("logprobs") or {}),
            )

    def part(self, expected: Answer, *, counted: bool = True) -> Divergence | None:
        """Where the two part, to the last bit of a log-probability; None where they are the same. Where tokens are not
        `counted`, their number may be unknown."""
        if self.choices.keys() != expected.choices.keys():
            return Divergence(
                "choices", None, str(sorted(expected.choices)), str(sorted(self.choices)), None, "the answer"
            )
        parted = (divergence(f"choice {index}", each, self.choices[index]) for index, each in expected.choices.items())
        if found := next(filter(None, parted), None):
            return found
        if self.tokens == expected.tokens or not (counted or self.tokens is not None):
            return None
        return Divergence("number of tokens", None, str(expected.tokens), str(self.tokens), None, "the answer")

    def begins(self, expected: Answer) -> bool:
        """Whether it is the beginning of what is expected."""
        return all(
            index in expected.choices and each.begins(expected.choices[index]) for index, each in self.choices.items()
        )
