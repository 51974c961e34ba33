"""Calibration of a block head's confidence: the chance that it predicts for a chain's next token, and the outcome."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.tools.lab.reference.acceptance import (
    GREEDY,
    SAMPLED,
    Acceptance,
    Continuation,
    Drafts,
    counts_of,
    joined,
    mean_by_depth,
    shares,
    table,
)
from outrider.tools.lab.reference.teacher import Reading, Teacher

Confidences = Callable[[Tensor, Reading, int], Tensor]
"""As `Drafts`, to the chances `[depths, length - 1 - depths]` that the target accepts the token at each depth."""


@dataclass(frozen=True)
class Calibration:
    """Means by depth over the chains that got there: predicted chances, and the error of one at temperature 1."""

    greedy: list[float]
    sampled: list[float]
    error: list[float]

    def text(self, acceptance: Acceptance) -> str:
        """The part of a model card: predicted beside observed, where `acceptance` counts the same chains."""
        rows = {
            "temperature 1, predicted": self.sampled,
            "temperature 1, observed": acceptance.overlap,
            "temperature 1, mean distance of the two": self.error,
            "greedy, predicted": self.greedy,
            "greedy, observed": acceptance.greedy,
        }
        return f"""The confidence, which predicts the sum of min(p, q) at temperature 1, over the same chains:

{table("confidence at depth", rows)}"""

    def __str__(self) -> str:
        return f"greedy {shares(self.greedy)}, temperature 1 {shares(self.sampled)}, error {shares(self.error)}"


@torch.no_grad()
def calibrate(
    teacher: Teacher,
    continuations: Sequence[Continuation],
    drafts: Drafts,
    confidences: Confidences,
    taps: tuple[int, ...],
    depths: int,
) -> Calibration:
    """Compare the confidence with what `measure` counts, over the same chains."""
    greedy, sampled = ([c for c in continuations if c.temperature == t] for t in (GREEDY, SAMPLED))
    of_greedy, of_sampled = (
        joined([counts_of(teacher, c, drafts, taps, depths) for c in each]) for each in (greedy, sampled)
    )
    predicted = {
        name: np.concatenate([_predicted(teacher, c, confidences, taps, depths) for c in each])
        for name, each in (("greedy", greedy), ("sampled", sampled))
    }
    return Calibration(
        greedy=mean_by_depth(predicted["greedy"], of_greedy.first.astype(float)),
        sampled=mean_by_depth(predicted["sampled"], of_sampled.kept),
        error=mean_by_depth(abs(predicted["sampled"] - of_sampled.overlap), of_sampled.kept),
    )


def _predicted(
    teacher: Teacher, c: Continuation, confidences: Confidences, taps: tuple[int, ...], depths: int
) -> NDArray[np.float64]:
    """`[chains, depths]` of the chains that `counts_of` counts."""
    found = confidences(c.ids, teacher.read(c.ids[None], taps, exact=True), depths)[:, c.first_chain :]
    return found.T.double().cpu().numpy()
