"""What the tools that measure share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from rich.console import Console

from outrider.commands.console import guarded
from outrider.tools.bench.machine import describe_run
from outrider.tools.output import print_report


def run_tool(
    parse: Callable[[], argparse.Namespace],
    measure: Callable[[argparse.Namespace], dict[str, Any]],
    print_table: Callable[[dict[str, Any], Console], None],
) -> int:
    """Parse the command line, measure, and print a table or JSON; return the exit status."""

    def run() -> int:
        options = parse()
        return print_report({**describe_run(), **measure(options)}, options.json, print_table)

    return guarded(run)
