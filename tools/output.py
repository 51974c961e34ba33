"""How tools that measure end: what they print, and what they say of a package that is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from plans.console import print_json, stdout
from plans.errors import OutriderError


def figure(value: float | None, form: str, unit: str = "") -> str:
    """A number by its format and with its unit; "-" where there is no such figure."""
    return "-" if value is None else f"{value:{form}}{unit}"


def print_report(report: dict[str, Any], as_json: bool, print_table: Callable[[dict[str, Any], Console], None]) -> int:
    """One JSON object, or a table. The command's exit status."""
    if as_json:
        print_json(report)
    else:
        print_table(report, stdout)
    return 0


@contextmanager
def optional_packages(what: str) -> Iterator[None]:
    """In here a package that is not installed is an `OutriderError` that says what to install for `what`."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise OutriderError(
            f"This {what} needs {error.name}, which is not installed; run `pip install -e '.[compiler,dev]'`."
        ) from None
