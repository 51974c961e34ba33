"""Texts of files that users name, which may be pipes, or devices that never end."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import TextIO

_MOST = 2**26


def read_text_file(path: Path, *, most: int = _MOST) -> str:
    """The UTF-8 text of a file, without a mark of the byte order, as editors of Windows write it.

    Raises OSError, also for more than `most` characters, and UnicodeDecodeError.
    """
    with path.open(encoding="utf-8-sig") as file:
        return read_all(file, most=most)


def read_all(file: TextIO, *, most: int = _MOST) -> str:
    """The rest of an open file. Raises as `read_text_file`."""
    text = file.read(most + 1)
    if len(text) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} characters")
    return text
