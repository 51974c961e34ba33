"""`outrider options`: what a request may ask for, by which interface."""

from __future__ import annotations

import argparse
from typing import Any

from outrider.commands.console import print_json, stdout
from outrider.plans.errors import RequestError
from outrider.runtime.cli.arguments import flag_of
from outrider.runtime.options.options import OPTIONS, Doors


def add_options(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "options",
        help="the options of a generation",
        description="Print the options of a generation, by their names in Python, with what to pass, their defaults, "
        "and which of the command line, the server and the C library have them.",
        epilog="examples: %(prog)s; %(prog)s top_p seed; %(prog)s --json",
    )
    parser.add_argument("name", nargs="*", help="these alone")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(command=_print)


def _print(arguments: argparse.Namespace) -> int:
    names = arguments.name or list(OPTIONS)
    if unknown := next((name for name in names if name not in OPTIONS), None):
        raise RequestError(f"There is no option {unknown!r}; the options are {', '.join(OPTIONS)}.")
    if arguments.json:
        print_json({name: _as_json(name) for name in names})
        return 0
    for name in names:
        doors = [flag_of(name)] if Doors.COMMAND in OPTIONS[name].doors else []
        doors += [door.name.lower() for door in (Doors.SERVER, Doors.C) if door in OPTIONS[name].doors and door.name]
        stdout.print(f"[bold]{name}[/bold]  {', '.join(['python', *doors])}", highlight=False)
        stdout.print(f"  {OPTIONS[name].text}", highlight=False, markup=False)
    return 0


def _as_json(name: str) -> dict[str, object]:
    option = OPTIONS[name]
    doors = {door.name.lower(): door in option.doors for door in Doors if door.name}
    flag = flag_of(name) if Doors.COMMAND in option.doors else None
    return {"pass": option.kind.what, "default": option.default, "help": option.help, "flag": flag, **doors}
