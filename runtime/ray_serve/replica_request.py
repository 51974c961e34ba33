"""What goes to a replica: a checked request as plain data; and what says that it is taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from outrider.runtime.options.options import Options


@dataclass(frozen=True, slots=True)
class ReplicaRequest:
    """Token ids of a prompt, and options that were checked where it came in.

    `deadline` is in seconds from the moment of sending. `identity` is that of the plan whose tokenizer and limits the
    request was checked with; a replica of another plan refuses it. `caller` is the actor that reads the answer.
    `kernels` are those that computed the tokens that it has given (`exactness.kernels_that_count`); a replica on a
    processor of another kind refuses it.
    """

    token_ids: list[int]
    options: Options
    identity: str
    priority: int = 0
    deadline: float | None = None
    client: str | None = None
    caller: str | None = None
    kernels: Mapping[str, str] = field(default_factory=dict)

    def again(self, generated: Sequence[int], deadline: float | None, kernels: Mapping[str, str]) -> ReplicaRequest:
        """The same request, after tokens that it has given by those `kernels`, with `deadline` seconds left."""
        if not generated:
            return replace(self, deadline=deadline)
        options = Options(**{**self.options, "generated": list(generated)})
        return replace(self, options=options, deadline=deadline, kernels=kernels)

    @property
    def owner(self) -> str:
        """Whose requests find what a replica keeps of it."""
        return self.options.get("cache_salt") or ""

    @property
    def path(self) -> list[int]:
        """All tokens that a replica computes, or finds, before the next one."""
        return [*self.token_ids, *(self.options.get("generated") or ())]


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """A replica's first message: it has taken the request, whose tokens come of these `kernels`."""

    kernels: Mapping[str, str] = field(default_factory=dict)
