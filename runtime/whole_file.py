"""Files that a reader finds whole, or as they were before."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def written_whole(path: Path, *, mode: int = 0o600) -> Iterator[IO[bytes]]:
    """A new file beside `path`, which gets its name once the block has ended well. Raises `OSError`.

    It is its owner's alone, unless `mode` is another one, of which the process's umask is taken away.
    """
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with open(unfinished, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            unfinished.replace(path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
