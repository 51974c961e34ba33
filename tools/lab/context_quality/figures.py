"""From what was read to figures by length, and to the length from which on a model is out of its depth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import sqrt
from statistics import stdev
from typing import Any

import torch
from torch import Tensor

from outrider.tools.lab.context_quality.questions import Context

MOST_NATS, LEAST_SHARE = 0.1, 0.5
RULES = {
    "by loss": f"the difference to short windows is more than {MOST_NATS} nats above that scaling's smallest one",
    "by needles": f"the share of questions answered with any needle is below {LEAST_SHARE} of the best one up to the "
    "trained length, with the checkpoint's scaling",
    "by answers": "the same of right answers, where the best share is more than guessing among the needles gives",
}
"""Out of its depth is a model from the first length on at which, as at all longer ones, one of these is so."""
_STRETCH = 256  # tokens whose mean is one draw for the standard error

Row = dict[str, Any]


@dataclass(frozen=True)
class Answers:
    """A context, and for each of its questions the index of the one whose answer it got."""

    context: Context
    given: list[int | None]


def loss_row(length: int, losses: Sequence[Tensor], short: Sequence[Tensor]) -> Row:
    """Nats of the tokens from position `length / 2` up to `length`, in short windows as well, and the difference.

    `losses` and `short` hold a document each, nats of every token but the first.
    """
    bucket = slice(max(0, length // 2 - 1), length - 1)
    nats = torch.cat([each[bucket] for each in losses]).double()
    known = torch.cat([each[bucket] for each in short]).double()
    return {
        "length": length,
        "tokens": len(nats),
        "nats": float(nats.mean()),
        "short_nats": float(known.mean()),
        "difference": float((nats - known).mean()),
        "standard_error": _standard_error(nats - known),
    }


def retrieval_row(length: int, answers: Sequence[Answers]) -> Row:
    """How many questions got their answer, how many that of any needle, and the former by depth."""
    by_depth: dict[float, list[bool]] = {}
    any_needle = 0
    for each in answers:
        for place, (question, given) in enumerate(zip(each.context.questions, each.given, strict=True)):
            by_depth.setdefault(question.depth, []).append(given == place)
            any_needle += given is not None
    questions, right = (sum(map(count, by_depth.values())) for count in (len, sum))
    return {
        "length": length,
        "questions": questions,
        "right": right,
        "accuracy": right / questions,
        "any_needle": any_needle,
        "any_share": any_needle / questions,
        "by_depth": [{"depth": depth, "questions": len(each), "right": sum(each)} for depth, each in by_depth.items()],
    }


def best_shares(known: Sequence[Row]) -> dict[str, float] | None:
    """The best shares in the rows of questions within the trained length, with the checkpoint's own scaling."""
    return {name: max(row[name] for row in known) for name in ("any_share", "accuracy")} if known else None


def guessed(best: dict[str, float], needles: int) -> bool:
    """Whether as many right answers come from naming any one of the needles."""
    return best["accuracy"] <= 1 / needles


def judge(loss: Sequence[Row], retrieval: Sequence[Row], best: dict[str, float] | None, needles: int) -> Row:
    """The lengths from which on each rule says that a model is out of its depth, and the first of them."""
    smallest = min(row["difference"] for row in loss)
    found = dict.fromkeys(RULES)
    found["by loss"] = _from(loss, lambda row: row["difference"] > smallest + MOST_NATS)
    if best is not None:
        found["by needles"] = _from(retrieval, lambda row: row["any_share"] < LEAST_SHARE * best["any_share"])
    if best is not None and not guessed(best, needles):
        found["by answers"] = _from(retrieval, lambda row: row["accuracy"] < LEAST_SHARE * best["accuracy"])
    return {"from": min((length for length in found.values() if length is not None), default=None), **found}


def _from(rows: Sequence[Row], lost: Callable[[Row], bool]) -> int | None:
    """The first length that is lost together with all longer ones; `rows` are in their order."""
    return min((row["length"] for row in takewhile(lost, reversed(rows))), default=None)


def _standard_error(differences: Tensor) -> float | None:
    means = [float(part.mean()) for part in torch.split(differences, _STRETCH) if len(part) == _STRETCH]
    return None if len(means) < 2 else stdev(means) / sqrt(len(means))
