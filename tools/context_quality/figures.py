"""From what was read to figures by length, and to the length from which on a model is out of its depth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from tools.context_quality.questions import Context

MOST_NATS, LEAST_SHARE = 0.1, 0.5
RULE = (
    f"out of its depth: from the first length on at which, as at all longer ones, a token costs more than {MOST_NATS} "
    "nats above its price in short windows, counted from the length where that difference is smallest; or at which "
    f"fewer than {LEAST_SHARE:.0%} as many questions are answered as at the trained length with the checkpoint's own "
    "scaling (where those are more than by naming any needle)"
)
_STRETCH = 256  # tokens whose mean counts as one draw for the standard error


def loss_row(length: int, losses: Sequence[Tensor], short: Sequence[Tensor]) -> dict[str, Any]:
    """Of the tokens at positions from half of `length` up to it: nats, those in short windows, and the difference.

    `losses` and `short` hold a document each, nats of every token but the first.
    """
    bucket = slice(max(0, length // 2 - 1), length - 1)
    nats = torch.cat([each[bucket] for each in losses]).double()
    known = torch.cat([each[bucket] for each in short]).double()
    stretches = torch.stack([part.mean() for part in (nats - known).split(_STRETCH) if len(part) == _STRETCH] or [])
    return {}


@dataclass(frozen=True)
class Answers:
    """A context, and whose answer each of its questions got."""

    context: Context
    given: list[int | None]
