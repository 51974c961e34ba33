"""Summaries of alternating generations of several engines: ratios of pairs, ours to theirs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import mean
from typing import Any

from outrider.tools.lab.peers.engine import OURS, PLAIN, Generated
from outrider.tools.measuring import middle, spread
from outrider.tools.parting import Parting, same_share

Ratio = Callable[["Generation", "Generation"], float | None]


@dataclass(frozen=True)
class Generation:
    """One generation after the prompt of this index."""

    prompt: int
    generated: Generated

    @property
    def tokens_per_second(self) -> float | None:
        """After the tokens that came first; None where there are none."""
        found = self.generated
        tokens, seconds = len(found.ids) - found.first, (found.total_ms - found.ttft_ms) / 1000
        return tokens / seconds if tokens and seconds > 0 else None


@dataclass(eq=False)
class Mode:
    """All generations of one engine's mode, in the order in which the other modes ran beside them.

    `differences` has each prompt, by its index, after which its tokens were not always those that our plain decoding
    gave first: where they first part.
    """

    engine: str
    name: str
    runs: list[Generation] = field(default_factory=list)
    differences: dict[int, Parting] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.engine}, {self.name}"


def first_tokens(plain: Mode) -> dict[int, list[int]]:
    """By index of prompt, what our plain decoding generated first: what all runs after it are compared with."""
    found: dict[int, list[int]] = {}
    for run in plain.runs:
        found.setdefault(run.prompt, run.generated.ids)
    return found


def report(modes: Sequence[Mode], tasks: Sequence[str | None]) -> dict[str, Any]:
    """`rows` of every mode, `ratios` of each of ours to each of theirs, and peer by peer `plain` decoding against plain
    and `best` against best.

    A ratio of 2 says that ours takes half the time, prompt included; `decode_ratio` begins after the tokens that come
    first, and is None where none come later; `ttft_ratio` ends there. They are medians over pairs of the same prompt
    and repetition. The best mode of an engine is the one that is fastest by the median of pairs with our plain
    decoding, the first of `modes`; `best_ratio` and `plain_ratio` are those of the peer which comes nearest. `tasks` by
    index of prompt.
    """
    plain = modes[0]
    rows = [_row(mode, plain) for mode in modes]
    fastest: dict[str, tuple[float, Mode]] = {}
    for row, mode in zip(rows, modes, strict=True):
        if mode.engine not in fastest or row["speedup"] > fastest[mode.engine][0]:
            fastest[mode.engine] = (row["speedup"], mode)
    ours = [mode for mode in modes if mode.engine == OURS]
    theirs = [mode for mode in modes if mode.engine != OURS]
    best = [_duel(fastest[OURS][1], mode, tasks) for engine, (_, mode) in fastest.items() if engine != OURS]
    plainly = [_duel(plain, mode, tasks) for mode in theirs if mode.name == PLAIN]
    return {
        "rows": rows,
        "ratios": [_ratios(our, their) for our in ours for their in theirs],
        "plain": plainly,
        "best": best,
        "plain_ratio": _nearest(plainly),
        "best_ratio": _nearest(best),
    }


def _row(mode: Mode, plain: Mode) -> dict[str, Any]:
    expected = first_tokens(plain)
    same = sum(run.generated.ids == expected[run.prompt] for run in mode.runs)
    return {
        "engine": mode.engine,
        "mode": mode.name,
        **spread("speedup", _pairs(mode, plain, _whole)),
        **spread("tokens_per_second", [run.tokens_per_second for run in mode.runs]),
        **spread("ttft_ms", [run.generated.ttft_ms for run in mode.runs]),
        **spread("e2e_ms", [run.generated.total_ms for run in mode.runs]),
        "same_runs": same,
        "runs": len(mode.runs),
        "agreement": mean(same_share(expected[run.prompt], run.generated.ids) for run in mode.runs),
        "differences": [asdict(difference) for _, difference in sorted(mode.differences.items())],
    }


def _ratios(ours: Mode, theirs: Mode) -> dict[str, Any]:
    return {
        "ours": ours.name,
        "engine": theirs.engine,
        "mode": theirs.name,
        **spread("ratio", _pairs(ours, theirs, _whole)),
        "decode_ratio": middle(_pairs(ours, theirs, _decoding)),
        "ttft_ratio": middle(_pairs(ours, theirs, lambda our, their: their.generated.ttft_ms / our.generated.ttft_ms)),
    }


def _nearest(duels: Sequence[dict[str, Any]]) -> float | None:
    return min((duel["ratio"] for duel in duels), default=None)


def _duel(ours: Mode, theirs: Mode, tasks: Sequence[str | None]) -> dict[str, Any]:
    by_task = {task: [i for i, other in enumerate(tasks) if other == task] for task in dict.fromkeys(tasks) if task}
    return {
        "engine": theirs.engine,
        "mode": theirs.name,
        "ours": ours.name,
        **spread("ratio", _pairs(ours, theirs, _whole)),
        "decode_ratio": middle(_pairs(ours, theirs, _decoding)),
        "by_task": {task: middle(_pairs(ours, theirs, _whole, prompts)) for task, prompts in by_task.items()},
    }


def _pairs(ours: Mode, theirs: Mode, ratio: Ratio, prompts: Sequence[int] | None = None) -> list[float | None]:
    pairs = zip(ours.runs, theirs.runs, strict=True)
    return [ratio(our, their) for our, their in pairs if prompts is None or our.prompt in prompts]


def _whole(ours: Generation, theirs: Generation) -> float:
    return theirs.generated.total_ms / ours.generated.total_ms


def _decoding(ours: Generation, theirs: Generation) -> float | None:
    our, their = ours.tokens_per_second, theirs.tokens_per_second
    return our / their if our and their else None
