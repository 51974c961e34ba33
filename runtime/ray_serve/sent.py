"""What goes to a replica: a checked request as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from runtime.request import Options


@dataclass(frozen=True, slots=True)
class Sent:
    """Token ids of a prompt, and options that were checked where it came in.

    `deadline` is in seconds from the moment of sending. `identity` is that of the plan whose tokenizer and limits the
    request was checked with; a replica of another plan refuses it. `caller` is the actor that reads the answer.
    """

    token_ids: list[int]
    options: Options
    identity: str
    priority: int = 0
    deadline: float | None = None
    client: str | None = None
    caller: str | None = None

    def again(self, generated: Sequence[int], deadline: float | None) -> Sent:
        """The same request, behind tokens that it has given, with `deadline` seconds left."""
        options = self.options if not generated else Options(**{**self.options, "generated": list(generated)})
        return replace(self, options=options, deadline=deadline)

    @property
    def path(self) -> list[int]:
        """All tokens that a replica computes, or finds, before the next one."""
        return [*self.token_ids, *self.options.get("generated", ())]
