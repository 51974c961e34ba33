"""`python -m outrider.runtime embed`: builds the C library, or makes a bundle, and prints what it has."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.table import Table

from outrider.commands.console import print_json, stderr, stdout
from outrider.runtime.embed.build import build
from outrider.runtime.embed.bundle.bundle import Bundle, bundle


def add_embed(commands: Any) -> None:
    """Add the command to those of `python -m outrider.runtime`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "embed",
        help="build the C library",
        description="Build liboutrider for C and C++ programs: include/outrider.h, the library with its bridge to "
        "Python, a pkg-config file and a CMake package, all under DIR, which may be moved. With --out, programs run in "
        "this environment, or in the one that OUTRIDER_HOME names. With --bundle, DIR has all that they need (a Python "
        "of its own, ONNX Runtime, our kernels, licences, and bundle.json, which lists them): it is copied with a "
        "program to machines that have glibc and nothing else.",
        epilog="examples: %(prog)s --out build/embed; %(prog)s --bundle build/bundle, then "
        "`cc app.c $(PKG_CONFIG_PATH=build/bundle/lib/pkgconfig pkg-config --cflags --libs outrider) "
        "'-Wl,-rpath,$ORIGIN/bundle/lib' -o build/app`",
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path, metavar="DIR", help="folder to build into, for this machine")
    where.add_argument("--bundle", type=Path, metavar="DIR", help="folder to make, or to make anew, for other machines")
    parser.add_argument(
        "--json", action="store_true", help="print the files as a JSON list; of a bundle, an object with what it has"
    )
    parser.set_defaults(command=_embed)


def _embed(arguments: argparse.Namespace) -> int:
    if arguments.bundle is not None:
        return _make(arguments.bundle, as_json=arguments.json)
    with stderr.status("building the C library") as status:
        files = build(arguments.out, lambda part: status.update(f"building the C library: {part}"))
    if arguments.json:
        print_json([str(file) for file in files])
    else:
        print("\n".join(map(str, files)))
    return 0


def _make(folder: Path, *, as_json: bool) -> int:
    """Make a bundle at `folder`. Raises `EmbedError`."""
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
