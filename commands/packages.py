"""Optional packages: a command that lacks one says what to install."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from outrider_command import OURS
from plans.errors import OutriderError
from plans.extras import install


@contextmanager
def optional_packages(who: str, extra: str) -> Iterator[None]:
    """In here a package that is not installed is an `OutriderError`: that `who` needs it, which `extra` brings."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in OURS:
            raise
        raise OutriderError(f"{who} needs {error.name}, which is not installed; {install(extra)}.") from None
