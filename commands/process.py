"""Prepare the process of a command: standard streams that may be closed or cannot write every character, Ctrl-C.

Imports little, so that it can come before imports that take a second.
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
from typing import TYPE_CHECKING, TextIO

from plans.errors import OutputError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

INTERRUPTED = 130
"""The exit status of a command that Ctrl-C has ended."""


def begin() -> None:
    """To be called first, before what takes long to import.

    A closed standard stream becomes one that nothing can be read from, or written to: left closed, the next file that
    is opened would take its number. Standard output raises `OutputError` where it cannot be written, and has escapes in
    place of characters that the locale's encoding does not know. Ctrl-C ends the process at once until `guarded` runs
    the command, which may then tidy up.
    """
    sys.stdin = sys.stdin or _unusable(os.O_WRONLY, "r")
    sys.stdout = sys.stdout or _unusable(os.O_RDONLY, "w")
    sys.stderr = sys.stderr or _unusable(os.O_WRONLY, "w")  # nobody reads it: no reason to fail
    sys.stdout = _output(sys.stdout)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where it is ignored, as behind nohup
        signal.signal(signal.SIGINT, _leave)


@contextmanager
def interruptible() -> Iterator[None]:
    """In here Ctrl-C raises `KeyboardInterrupt`, as Python has it, and behind it ends the process at once again.

    Without `begin`, as in a program that calls a command, nothing of Ctrl-C is changed.
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
    """A stream of the null device. Opened the wrong way round, reading or writing it says "Bad file descriptor"."""
    return open(os.open(os.devnull, flags), mode, encoding="utf-8", errors="backslashreplace")  # type: ignore[return-value]


class _Output(io.FileIO):
    """Standard output, whose failures are told from those of other files."""

    def write(self, data: ReadableBuffer) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(f"standard output cannot be written: {error.strerror or error}") from None


def _output(given: TextIO) -> TextIO:
    """`given`, written through `_Output`."""
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
