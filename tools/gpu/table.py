"""The report as one table, short enough for the end of a log."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

Rows = list[dict[str, Any]]
MOST_LINES = 60
_PARTS = ("q+k+v", "o", "gate+up", "down", "lm_head", "attention")
_MOST_FAILURES, _MOST_VARIANTS = 6, 8


def table(report: dict[str, Any]) -> list[str]:
    stages = report["stages"]
    lines = [f"# {report['card']}, kernels {report['cubin'][:12]}"]
    ended = [f"{name} {each['status']} ({each['seconds']} s)" for name, each in stages.items()]
    lines.append(f"stages: {'; '.join(ended)}")
    for name, each in stages.items():
        if each["last"]:
            lines.append(f"{name}: {each['status']}: {each['last'][-1][:300]}")
    rows: defaultdict[str, Rows] = defaultdict(list, {name: each["rows"] for name, each in stages.items()})
    for part in (
        _env(rows["env"]), _smoke(rows["smoke"]), _steps(rows["steps"], rows["kernels"]), _plan(rows["plan"]),
        _variants(rows["variants"]), _tools([*rows["ncu"], *rows["sanitizer"]]),
    ):  # fmt: skip
        lines += part
    if len(lines) > MOST_LINES:
        lines[MOST_LINES - 1 :] = [f"... {len(lines) - MOST_LINES + 1} lines more in report.json"]
    return lines


def _env(rows: Rows) -> Iterator[str]:
    for row in rows:
        yield ", ".join(f"{_shown(value)}" if key == "what" else f"{key} {_shown(value)}" for key, value in row.items())


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _smoke(rows: Rows) -> Iterator[str]:
    if not rows:
        return
    kernels = dict.fromkeys(row["kernel"].removeprefix("outrider_") for row in rows)
    told = []
    for kernel in kernels:
        own = [row for row in rows if row["kernel"].removeprefix("outrider_") == kernel]
        passed, near = sum(row["passed"] for row in own), max(row["error"] for row in own)
        told.append(f"{kernel} {passed}/{len(own)}" + (f" (error {near:.1e})" if near else ""))
    yield f"smoke: {sum(row['passed'] for row in rows)} of {len(rows)} OK: {', '.join(told)}"
    failed = [row for row in rows if not row["passed"]]
    for row in failed[:_MOST_FAILURES]:
        yield f"FAIL {row['kernel']}, {row['name']}: {row['differ']} numbers differ, by {row['error']:.3g} at most"
    if len(failed) > _MOST_FAILURES:
        yield f"FAIL: {len(failed) - _MOST_FAILURES} more"


def _steps(steps: Rows, kernels: Rows) -> Iterator[str]:
    """A line for each model and number of rows: the step, the sum of its kernels, us (and share of copies) of a launch
    of the main ones."""
    keys = dict.fromkeys((row["model"], row["rows"]) for row in (*steps, *kernels))
    if not keys:
        return
    yield f"| model | rows | step ms | launches | GB | GB/s | of copies | kernels ms | {' | '.join(_PARTS)} |"
    yield "|" + " --- |" * (8 + len(_PARTS))
    for model, count in keys:
        cells = [model, str(count)]
        step = next((row for row in steps if (row["model"], row["rows"]) == (model, count)), None)
        if step is None:
            cells += [""] * 5
        else:
            cells += [f"{step['ms']:.3f}", str(step["launches"]), f"{step['moved'] / 1e9:.2f}"]
            cells += [f"{step['gb_s']:.0f}", _share(step)]
        own = [row for row in kernels if (row["model"], row["rows"]) == (model, count)]
        cells.append(f"{sum(row['us'] * row['launches'] for row in own) / 1000:.3f}" if own else "")
        for part in _PARTS:
            found = [row for row in own if row["part"].removeprefix("layers.") == part]
            cells.append("" if not found else f"{found[0]['us']:.1f} ({_share(found[0])})")
        yield f"| {' | '.join(cells)} |"


def _share(row: dict[str, Any]) -> str:
    return "" if row["share"] is None else f"{row['share']:.0%}"


def _plan(rows: Rows) -> Iterator[str]:
    for row in rows:
        graphs = "graphs" if row["graphs"] else "no graphs"
        if row["what"] == "session":
            yield (
                f"plan, {graphs}: loaded in {row['load_s']:.2f} s, warm-up {row['warm_up_s']:.2f} s, {row['recorded']} "
                f"graphs, {row['device_mb']:.0f} MB"
            )
        else:
            yield (
                f"  {row['drafter']}: tokens {row['tokens_equal']}, bits {row['bits_equal']} of {row['runs']} equal; "
                f"{row['tokens_per_second']:.0f} tokens/s, {row['tokens_per_verify']:.2f} a round of "
                f"{row['round_ms']:.3f} ms: device {row['device_ms']:.3f}, host {row['host_ms']:.3f}, "
                f"launches {row.get('launches', '')}{row['first_difference'] and '; ' + row['first_difference']}"
            )


def _variants(rows: Rows) -> Iterator[str]:
    """A line for each variant: whether its bits are the base's, and its time against the base's, by rows."""
    for bits in [row for row in rows if row["what"] == "bits"][:_MOST_VARIANTS]:
        name, told = bits["variant"], []
        for model, count in dict.fromkeys((row["model"], row["rows"]) for row in rows if row["what"] == "times"):
            us = [row["us"] for row in rows if row["what"] == "times" and (row["model"], row["rows"]) == (model, count)]
            told.append(f"{model} x{count} {sum(each[name] for each in us) / sum(each['base'] for each in us):.2f}")
        yield f"variant {name}: bits of {bits['equal']}/{bits['cases']}; time of the base's: {', '.join(told)}"


def _tools(rows: Rows) -> Iterator[str]:
    for row in rows:
        if row["what"] == "kernel":
            shown = [key for key in row if key not in ("what", "kernel", "model", "rows", "part")]
            told = [f"{key} {row[key]}" for key in shown]
            yield f"  {row['model']} x{row['rows']} {row['part']}: {', '.join(told)}"
        else:
            yield f"{row['what']}: {row['text'][:300]}"
