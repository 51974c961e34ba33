"""Texts that grow at once, side by side on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

_LINES = 12  # of a panel: the last ones of its text, while it grows


class SideBySide:
    """A panel for each text, drawn again as they grow. At the end all texts are there in full."""

    def __init__(self, console: Console, titles: Sequence[str]) -> None:
        self._titles = [" ".join(title.split())[:40] for title in titles]
        self._texts = [""] * len(titles)
        self._ends = [""] * len(titles)
        self._width = max(20, console.width // max(1, min(len(titles), 3)) - 1)
        self._lines: int | None = _LINES
        self._live = Live(console=console, refresh_per_second=12, get_renderable=self._draw)

    def __enter__(self) -> SideBySide:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lines = None
        self._live.stop()

    def add(self, place: int, text: str) -> None:
        """A text continues."""
        self._texts[place] += text

    def end(self, place: int, how: str) -> None:
        """A text has ended."""
        self._ends[place] = how

    def _draw(self) -> Columns:
        panels, lines = [], self._lines
        for number, (title, text, end) in enumerate(zip(self._titles, self._texts, self._ends, strict=True)):
            shown = text if lines is None else "\n".join(text.splitlines()[-lines:])
            style = "dim" if end else "bold"
            head = Text(f"{number}: {title}", style=style)
            panels.append(Panel(Text(shown), title=head, subtitle=end or None, width=self._width))
        return Columns(panels)
