"""Summaries of alternating generations of several engines: ratios of pairs, ours to theirs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import mean
from typing import Any

from rich.console import Console
from rich.table import Table

from outrider.tools.lab.peers.engine import OURS, PLAIN, Generated
from outrider.tools.measuring import Column, figure, make_table, middle, spread
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


def print_table(report: dict[str, Any], console: Console) -> None:
    machine = report["machine"]
    for section in report["precisions"]:
        versions = ", ".join(f"{engine} ({version})" for engine, version in section["versions"].items())
        console.print(f"{machine['processor']}, {machine['cores']} cores, {report['threads']} threads each: {versions}")
        console.print(
            f"{report['checkpoint']}, {section['precision']}, greedy; {section['prompts']} prompts "
            f"({section['prompt_tokens']:.0f} tokens) x {report['reps']} runs, {report['new_tokens']} new tokens; "
            f"medians, processes alternating, idle ones at most {section['idle_share']:.1%} of a core"
        )
        _print_section(section, console)
        console.print()


def _print_section(section: dict[str, Any], console: Console) -> None:
    console.print(make_table(_MODES, section["rows"]))
    for row in section["rows"]:
        plain = "its first repetition" if row is section["rows"][0] else "our plain decoding"
        for found in row["differences"]:
            console.print(
                f"{row['engine']} {row['mode']}: parts from {plain} at generated token {found['index']} of "
                f"prompt {found['prompt']} ({found['prompt_tokens']} tokens), counted from 0, where that was ahead by "
                f"{found['margin']:.1e} logits"
            )
    if section["ratios"]:
        console.print("\nhow many times as fast ours is, whole generations (p10-p90)")
        console.print(_matrix(section["ratios"]))
        console.print()
    for what in ("plain", "best"):
        for duel in section[what]:
            _print_duel(what, duel, console)
    for absent in section["missing"]:
        mode = f" {absent['mode']}" if absent["mode"] else ""
        console.print(f"missing: {absent['engine']}{mode}: {absent['reason']}", markup=False)


def _print_duel(what: str, duel: dict[str, Any], console: Console) -> None:
    tasks = ", ".join(f"{task} {ratio:.2f}x" for task, ratio in duel["by_task"].items())
    console.print(
        f"{what} against {what}: "
        + "{ours} is {ratio:.2f}x ({ratio_p10:.2f}-{ratio_p90:.2f}) as fast as {engine} {mode}, ".format_map(duel)
        + f"{figure(duel['decode_ratio'], '.2f', 'x')} after the first tokens"
        + (f"; {tasks}" if tasks else "")
    )


def _spread(key: str, form: str, unit: str = "") -> Callable[[dict[str, Any]], str | None]:
    """A median with its 10th and 90th percentile."""

    def cell(row: dict[str, Any]) -> str | None:
        if row[key] is None:
            return None
        return f"{row[key]:{form}}{unit} ({row[f'{key}_p10']:{form}}-{row[f'{key}_p90']:{form}})"

    return cell


_NAMED = (Column("engine", "engine", text=True), Column("mode", "mode", text=True))
_MODES = (
    *_NAMED,
    Column("against ours, plain (p10-p90)", _spread("speedup", ".2f", "x")),
    Column("tokens/s (p10-p90)", _spread("tokens_per_second", ".0f")),
    Column("ttft ms", "ttft_ms", ".1f"),
    Column("e2e ms", "e2e_ms", ".0f"),
    Column("same runs (tokens)", lambda row: f"{row['same_runs']} of {row['runs']} ({row['agreement']:.0%})"),
)


def _matrix(ratios: list[dict[str, Any]]) -> Table:
    """A row for each of their modes, a column for each of ours."""
    show, rows = _spread("ratio", ".2f", "x"), dict[tuple[str, str], dict[str, Any]]()
    for ratio in ratios:
        row = rows.setdefault((ratio["engine"], ratio["mode"]), {key: ratio[key] for key in ("engine", "mode")})
        row[f"our {ratio['ours']}"] = show(ratio)
    ours = dict.fromkeys(ratio["ours"] for ratio in ratios)
    return make_table([*_NAMED, *(Column(name, f"our {name}") for name in ours)], rows.values())
