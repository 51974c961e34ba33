"""The plot of `tools.bench context`: verify times and tokens/s by length of context."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from outrider.plans.errors import OutriderError

_MARKERS, _DASHES = "osD^vPX*", ("-", "--", "-.", ":")


def write_plot(report: dict[str, Any], path: Path) -> None:
    """Draw the rows into `path`, as its ending says. Raises `OutriderError` where it cannot be written."""
    rows = report["rows"]
    with matplotlib.rc_context({"font.size": 9, "axes.grid": True, "grid.color": "#d0d0d0"}):
        figure = Figure(figsize=(9, 4), layout="constrained")
        verify, speed = figure.subplots(1, 2)
        curves = [("verify_full_ms", "full KV cache", rows)]
        for budget in dict.fromkeys(row["budget"] for row in rows):
            name = "partial KV cache" + ("" if budget is None else f", {budget} blocks")
            curves.append(("verify_partial_ms", name, [row for row in rows if row["budget"] == budget]))
        for place, (key, name, mine) in enumerate(curves):
            points = sorted({(row["context"], row[key]) for row in mine if row[key] is not None})
            if points:
                verify.plot([x for x, _ in points], [y for _, y in points], marker=_MARKERS[place % 8], label=name)
        verify.set_ylabel("a verify pass, ms")
        lines = list(dict.fromkeys((row["drafter"], row["mode"], row["budget"]) for row in rows))
        for place, line in enumerate(lines):
            mine = [row for row in rows if (row["drafter"], row["mode"], row["budget"]) == line]
            budget = f", {line[2]} blocks" if line[2] is not None else ""
            speed.plot(
                [row["context"] for row in mine],
                [row["tokens_per_second"] for row in mine],
                label=f"{line[0]}, {line[1]}{budget}",
                marker=_MARKERS[place % len(_MARKERS)],
                linestyle=_DASHES[place % len(_DASHES)],
            )
        speed.set_ylabel("tokens/s behind the prompt")
        for axes in (verify, speed):
            axes.set_xscale("log", base=2)
            axes.set_xlabel("tokens of context")
            axes.set_ylim(bottom=0)
            axes.legend(fontsize=7)
    try:
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    except (OSError, ValueError) as error:
        raise OutriderError(f"{path} cannot be written ({error}); choose another --plot.") from None
