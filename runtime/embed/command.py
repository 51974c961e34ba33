"""`python -m runtime embed --bundle`: makes a bundle, and prints what it has."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from commands.console import print_json, stderr, stdout
from runtime.embed.bundle.bundle import Bundle, bundle


def make(folder: Path, *, as_json: bool) -> int:
    """Make a bundle at `folder`; returns the exit status. Raises `EmbedError`."""
    with stderr.status("making the bundle") as status:
        made = bundle(folder, lambda part: status.update(f"making the bundle: {part}"))
    if as_json:
        print_json(made.to_json())
    else:
        _print_table(made)
    for warning in made.warnings:
        stderr.print(f"warning: {warning}", soft_wrap=True)
    return 0


def _print_table(made: Bundle) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in ("component", "version", "licence"):
        table.add_column(heading, overflow="fold")
    table.add_column("MB", justify="right")
    for each in made.components:
        table.add_row(each.name, each.version, each.licence, f"{each.bytes / 1e6:.1f}")
    stdout.print(table)
    stdout.print(
        f"{made.folder}: {made.bytes / 1e6:.1f} MB, for {made.machine} machines with glibc {made.glibc} or newer"
    )
