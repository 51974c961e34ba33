"""Optional packages: a command that lacks a package names the extra to install."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from outrider.plans.errors import OutriderError
from outrider.plans.extras import install


@contextmanager
def optional_packages(who: str, extra: str) -> Iterator[None]:
    """Turn a missing package inside into an `OutriderError`: `who` needs the package, and `extra` installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "outrider":
            raise
        raise OutriderError(f"{who} needs {error.name}, which is not installed; {install(extra)}.") from None
