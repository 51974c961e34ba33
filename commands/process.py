"""A command's process: standard streams that may be closed or cannot write every character, and Ctrl-C.

The module imports little, so that it can run before imports that take a second.
"""

from __future__ import annotations

import codecs
import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TextIO

from outrider.plans.errors import OutputError

INTERRUPTED = 130
"""The exit status of a command that Ctrl-C has ended."""


def begin() -> None:
    """Prepare streams and Ctrl-C; to be called first, before imports that take long.

    A closed standard stream is replaced by one that can be neither read nor written: otherwise the next opened file
    would take its number. Standard output raises `OutputError` where it cannot be written, and writes escapes for
    characters that the locale's encoding lacks. Ctrl-C ends the process at once until `guarded` runs the command, which
    may then tidy up.
    """
    sys.stdin = sys.stdin or _unusable(os.O_WRONLY, "r")
    sys.stdout = sys.stdout or _unusable(os.O_RDONLY, "w")
    sys.stderr = sys.stderr or _unusable(os.O_WRONLY, "w")  # nobody reads it, so writing need not fail
    sys.stdout = _output(sys.stdout)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where SIGINT is ignored, as under nohup
        signal.signal(signal.SIGINT, _leave)


@contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C raise `KeyboardInterrupt` inside, as Python does; afterwards Ctrl-C ends the process at once again.

    Without `begin`, as in a program that calls a command, the handling of Ctrl-C does not change.
    """
    begun = signal.getsignal(signal.SIGINT) is _leave
    if begun:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if begun:
            signal.signal(signal.SIGINT, _leave)


def _unusable(flags: int, mode: str) -> io.TextIOWrapper:
    """Open the null device; `flags` contradict `mode`, so that reading or writing fails: "Bad file descriptor"."""
    return open(os.open(os.devnull, flags), mode, encoding="utf-8", errors="backslashreplace")  # type: ignore[return-value]


class _Output(io.FileIO):
    """Standard output whose write errors are `OutputError`s, unlike errors of other files."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(f"standard output cannot be written: {error.strerror or error}") from None


def _output(given: TextIO) -> TextIO:
    """Return `given` as a stream that writes through `_Output`."""
    if not isinstance(given, io.TextIOWrapper):
        return given
    unicode = codecs.lookup(given.encoding).name == "utf-8"
    lossy = given.errors == "strict" or (given.errors == "surrogateescape" and not unicode)
    return io.TextIOWrapper(
        io.BufferedWriter(_Output(given.fileno(), "w", closefd=False)),
        encoding=given.encoding,
        errors="backslashreplace" if lossy else given.errors,
        line_buffering=given.line_buffering,
        write_through=given.write_through,
    )


def _leave(number: int, frame: FrameType | None) -> None:
    with suppress(OSError):
        os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)
