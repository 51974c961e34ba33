"""Tables in Markdown, without dependencies: measurements on a machine with a GPU print them too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """The lines of a table in Markdown; a cell stands on one line, and no bar in it ends it."""
    cells = ([" ".join(str(cell).splitlines()).replace("|", r"\|") for cell in row] for row in rows)
    return [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *cells)]
