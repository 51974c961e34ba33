"""`--report DIR`: one page of HTML with everything in it, figures and plots, to be read on a screen or printed."""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from outrider.plans.errors import OutriderError
from outrider.tools.bench.columns import COLUMNS, flat_rows
from outrider.tools.bench.plots import draw
from outrider.tools.bench.tables import CATEGORY_COLUMNS, MAIN_COLUMNS, category_cells, main_cells, title

PAGE = "report.html"
_TEMPLATE = "page.html.jinja"
_ABREAST = 6  # rows whose figures stand beside each other: as many as a sheet of paper holds


def prepare(folder: Path, option: str = "--report") -> None:
    """Make an option's folder before hours are measured for it. Raises `OutriderError` where it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutriderError(
            f"{folder} cannot be written ({error.strerror or error}); choose another folder for {option}."
        ) from None
    if not os.access(folder, os.W_OK):
        raise OutriderError(f"{folder} cannot be written (no permission); choose another folder for {option}.")


def write_page(report: dict[str, Any], command: str, folder: Path) -> Path:
    """Write the page; no other file goes with it. Raises `OutriderError` where it cannot be written."""
    path = folder / PAGE
    page = render(report, command)
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise OutriderError(f"{path} cannot be written ({error.strerror or error}); choose another --report.") from None
    return path


def render(report: dict[str, Any], command: str) -> str:
    rows, flat, machine = report["rows"], flat_rows(report), report["machine"]
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters["base64"] = lambda text: base64.b64encode(text.encode("utf-8")).decode("ascii")
    return environment.get_template(_TEMPLATE).render(
        heading=f"What {Path(report['plan']).name} costs",
        head={
            "machine": f"{rows[0]['device']}, {machine['cores']} cores",
            "date": report["time"],
            "command": command,
            "plan": f"{report['plan']} ({rows[0]['identity'][:12]})",
        },
        about=title(report),
        synthetic=any(row["synthetic_accept"] is not None for row in rows),
        columns=_heads(MAIN_COLUMNS),
        main=[main_cells(row) for row in rows],
        category_columns=_heads(CATEGORY_COLUMNS),
        categories=category_cells(rows) if "suite" in report else [],
        plots=draw(rows),
        every=[
            {name: [_cell(row[name]) for row in flat[start : start + _ABREAST]] for name in COLUMNS}
            for start in range(0, len(flat), _ABREAST)
        ],
    )


def _heads(columns: Sequence[str]) -> list[str]:
    return [column.replace(" /", "/") for column in columns]


def _cell(value: object) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
