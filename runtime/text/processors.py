"""The rule that a caller's own function changes the logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from outrider.plans.errors import RequestError
from outrider.runtime.text.rules import LogitsRule, RuleContext

LogitsProcessor = Callable[[list[int], NDArray[np.float32]], ArrayLike | None]
"""A function of the tokens generated so far and the logits f32 `[vocab]`: it returns logits, or None if it has changed
these in place."""


class Processor(LogitsRule):
    """Applies a caller's function; what it raises ends the request alone (`failing_alone`)."""

    def __init__(self, process: LogitsProcessor, place: int) -> None:
        """`place` is that of the function among the request's `logits_processors`."""
        self._process, self.name = process, f"logits_processors[{place}]"

    def apply(self, logits: NDArray[np.float32], path: Sequence[int]) -> None:
        made = self._process(list(path), logits)
        given = logits if made is None else np.asarray(made, np.float32)
        if given.shape != logits.shape:
            raise RequestError(
                f"{self.name} returned logits of shape {given.shape}; return a row of {len(logits)}, or None for a "
                "row that was changed in place."
            )
        if given is not logits:
            logits[:] = given


def processors(context: RuleContext) -> list[LogitsRule]:
    """Return the rules of `logits_processors`."""
    return [Processor(each, place) for place, each in enumerate(context.values["logits_processors"])]
