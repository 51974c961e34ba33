"""The plots of a report, as SVG: markers, dashes and hatches tell lines apart, so that they survive a grey printer."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from outrider.tools.bench.columns import Row
from outrider.tools.bench.shapes import PLAIN
from outrider.tools.bench.tables import label, shape

_COLOURS = ("#0b2f5c", "#c2571a", "#5b9a3f", "#7030a0", "#806000", "#a5002d")  # of unlike lightness
_MARKERS, _DASHES = "osD^vPX*", ("-", "--", "-.", ":")
_FILLS = (
    ("#1f4e79", ""), ("#e08a4a", "//"), ("#9dc3e6", "\\\\"), ("#76a35a", "xx"), ("#ffd966", ".."), ("#b08cc9", "++"),
)  # fmt: skip
_REST_FILL = ("#f0f0f0", "")
_LEAST_SHARE = 0.03  # of the longest round: stages that never take more are drawn as one
_INCHES, _ABREAST = 9.0, 2


@dataclass(frozen=True)
class Plot:
    title: str
    reading: str
    svg: str


def draw(rows: Sequence[Row]) -> list[Plot]:
    """Everything that can be drawn of these rows."""
    with matplotlib.rc_context({"font.size": 9, "axes.grid": True, "grid.color": "#d0d0d0", "hatch.linewidth": 0.6}):
        plots = [_speed(rows), _acceptance(rows), _stages(rows), _along_context(rows)]
    return [plot for plot in plots if plot is not None]


def _speed(rows: Sequence[Row]) -> Plot | None:
    rows = [row for row in rows if row["decode_speedup"] is not None]
    if not _drafted(rows):
        return None
    figure, panels = _panels(rows)
    for axes, panel in panels:
        axes.axhline(1.0, color="black", linewidth=1.2, label="plain decoding")
        drafters = _by_drafter(_drafted(panel))
        for place, of in enumerate(drafters):
            of = sorted(of, key=lambda row: row["nodes"])
            aside = 0.16 * (place - (len(drafters) - 1) / 2)  # so that spreads do not lie on each other
            nodes, middle = [row["nodes"] + aside for row in of], [row["decode_speedup"] for row in of]
            lows, highs = (
                [abs(row[key] - row["decode_speedup"]) for row in of]
                for key in ("decode_speedup_p10", "decode_speedup_p90")
            )
            axes.errorbar(
                nodes, middle, yerr=[lows, highs], label=label(of[0]), capsize=2.5, linewidth=1.5, elinewidth=0.7,
                **_style(place),
            )  # fmt: skip
            for x, row in zip(nodes, of, strict=True):
                below = place % 2
                axes.annotate(
                    row["tree"] or "", (x, row["decode_speedup"]), xytext=(4, -5 if below else 5), fontsize=7,
                    textcoords="offset points", va="top" if below else "bottom", color="#333333",
                )  # fmt: skip
        axes.set_xlabel("nodes verified, the tip included")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.margins(x=0.16)
    _set_height(panels, "decoding, speedup over plain", None)
    _legend(figure, panels[0][0])
    return Plot(
        "Speed against tree size",
        "Behind the prompt, medians of pairs with the 10th and 90th percentile; labels are TOP_K/DEPTH/NODES.",
        _svg(figure),
    )


def _acceptance(rows: Sequence[Row]) -> Plot | None:
    if not any(row["acceptance_by_depth"] for row in rows):
        return None
    figure, panels = _panels(rows)
    for axes, panel in panels:
        for place, of in enumerate(_by_drafter(_drafted(panel))):
            for index, row in enumerate(of):
                shares = [100 * share for share in row["acceptance_by_depth"]]
                style = _style(place) | {"marker": _MARKERS[index % len(_MARKERS)]}
                axes.plot(range(1, 1 + len(shares)), shares, label=_name(row), linewidth=1.2, markersize=5, **style)
        axes.set_xlabel("depth, in drafted tokens")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _set_height(panels, "rounds that accepted it, %", 103)
    _legend(figure, panels[0][0])
    return Plot(
        "Acceptance by depth", "Of the rounds with a draft, how many accepted a token at that depth.", _svg(figure)
    )


def _stages(rows: Sequence[Row]) -> Plot | None:
    timed = [row for row in rows if row["round_ms"]]
    if not timed:
        return None
    least = _LEAST_SHARE * max(row["round_ms"] for row in timed)
    named = dict.fromkeys(name for row in timed for name, ms in row["stages"].items() if ms >= least)
    lengths = list(dict.fromkeys(row["prompt_tokens"] for row in timed))
    places: list[float] = [place + 0.8 * lengths.index(row["prompt_tokens"]) for place, row in enumerate(timed)]
    figure = Figure(figsize=(_INCHES, 1.2 + 0.27 * (1 + places[-1])), layout="constrained")
    axes = figure.subplots()
    axes.set_axisbelow(True)
    left = [0.0] * len(timed)

    def stack(name: str, widths: list[float], fill: tuple[str, str]) -> None:
        look: dict[str, Any] = {
            "color": fill[0],
            "hatch": fill[1],
            "edgecolor": "#333333",
            "linewidth": 0.5,
            "height": 0.75,
        }
        axes.barh(places, widths, left=left, label=name, **look)
        left[:] = [start + width for start, width in zip(left, widths, strict=True)]

    for place, name in enumerate(named):
        stack(name, [row["stages"].get(name, 0.0) for row in timed], _FILLS[place % len(_FILLS)])
    stack("everything else", [row["round_ms"] - spent for row, spent in zip(timed, left, strict=True)], _REST_FILL)
    for y, row, end in zip(places, timed, left, strict=True):
        if not row["tokens_per_second"]:  # most runs ended with their first span, which has no rate
            continue
        each = f"{1000 / row['tokens_per_second']:.2f} ms a token"
        axes.annotate(each, (end, y), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
    behind = (f", prompt {row['prompt_tokens']:g}" if len(lengths) > 1 else "" for row in timed)
    axes.set_yticks(places, [_name(row) + text for row, text in zip(timed, behind, strict=True)])
    axes.set(xlabel="ms a round", xlim=(0, 1.2 * max(left)), ylim=(places[-1] + 0.7, -0.7))
    axes.grid(axis="y", visible=False)
    _legend(figure, axes)
    return Plot(
        "Where a round's time goes",
        "Behind the prompt's rounds. Beside the bars: what a token takes, of which a round commits one or more. "
        f"Everything else: the host between stages, and stages of less than {_LEAST_SHARE:.0%} of the longest round.",
        _svg(figure),
    )


def _along_context(rows: Sequence[Row]) -> Plot | None:
    chosen = [row for row in _fastest(rows) if row["ms_along_context"]]
    if not chosen:
        return None
    figure, panels = _panels(chosen)
    drafters = list(dict.fromkeys(row["drafter"] for row in _drafted(chosen)))
    for axes, panel in panels:
        for row in panel:
            along = row["ms_along_context"]
            plain = row["drafter"] == PLAIN
            style = {"color": "black", "marker": "."} if plain else _style(drafters.index(row["drafter"]))
            tokens, ms = [at["tokens"] for at in along], [at["ms"] for at in along]
            axes.plot(tokens, ms, label=_name(row), linewidth=1.3, markersize=4, **style)
        axes.set_xlabel("tokens in the context")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _set_height(panels, "ms a token, median", None)
    _legend(figure, panels[0][0])
    return Plot(
        "Time per token along the context",
        "Of plain decoding, and of every drafter with the draft that is fastest on the whole; a round's time is shared "
        "by its tokens. A drafter's first tokens wait for its own reading of the prompt.",
        _svg(figure),
    )


def _fastest(rows: Sequence[Row]) -> list[Row]:
    """All lengths of the tree of each drafter whose speedups are best taken together."""
    speedups: dict[str, dict[str, float]] = {}
    for row in rows:
        of = speedups.setdefault(row["drafter"], {})
        of[shape(row)] = of.get(shape(row), 0.0) + row["speedup"]
    return [row for row in rows if shape(row) == max(of := speedups[row["drafter"]], key=lambda key: of[key])]


def _drafted(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["drafter"] != PLAIN]


def _by_drafter(rows: Sequence[Row]) -> list[list[Row]]:
    return [[row for row in rows if row["drafter"] == name] for name in dict.fromkeys(row["drafter"] for row in rows)]


def _name(row: Row) -> str:
    return "plain decoding" if row["drafter"] == PLAIN else f"{label(row)} {shape(row)}"


def _panels(rows: Sequence[Row]) -> tuple[Figure, list[tuple[Axes, list[Row]]]]:
    """Axes for every length of prompts, with the rows of it."""
    lengths = list(dict.fromkeys(row["prompt_tokens"] for row in rows))
    columns = min(len(lengths), _ABREAST)
    lines = -(-len(lengths) // columns)
    figure = Figure(figsize=(_INCHES, 0.6 + 2.8 * lines), layout="constrained")
    grid = figure.subplots(lines, columns, sharey=True, squeeze=False)
    for axes in grid.flat[len(lengths) :]:
        axes.set_axis_off()
    panels = []
    for axes, length in zip(grid.flat, lengths, strict=False):
        if len(lengths) > 1:
            axes.set_title(f"prompts of {length:g} tokens", fontsize=9)
        panels.append((axes, [row for row in rows if row["prompt_tokens"] == length]))
    return figure, panels


def _set_height(panels: Sequence[tuple[Axes, list[Row]]], label: str, top: float | None) -> None:
    """Of all panels, which share it, when everything is drawn; the left ones say what it is."""
    panels[0][0].set_ylim(0, top)
    for axes, _ in panels[::_ABREAST]:
        axes.set_ylabel(label)


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)


def _style(place: int) -> dict[str, Any]:
    """Colour, marker and line of the drafter at this place."""
    tables = {"color": _COLOURS, "marker": _MARKERS, "linestyle": _DASHES}
    return {key: values[place % len(values)] for key, values in tables.items()}


def _svg(figure: Figure) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()
