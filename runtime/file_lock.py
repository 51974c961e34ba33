"""A file that one process at a time holds, or several share; the system lets go of it with the process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # not on Windows, where nothing is locked
    fcntl = None  # type: ignore[assignment]


@contextmanager
def locked(path: Path, *, wait: bool = True, shared: bool = False) -> Iterator[None]:
    """Hold the file at `path`, which is made if need be. Without `wait`, raises BlockingIOError where it is held.

    Several processes may hold it `shared`, while none holds it alone. What the file holds stays.
    Raises OSError where the file cannot be made, or is a link.
    """
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    with open(os.open(path, flags, 0o666), "r+b", buffering=0) as file:
        if fcntl is not None:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
        yield
