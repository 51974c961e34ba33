"""A child process that answers each line that it is given with a line, and whose last words are kept."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from contextlib import suppress
from tempfile import TemporaryFile
from typing import Any, Self


class ChildError(Exception):
    """The process has ended: the last line that it printed on stderr, or else its exit status."""


class Child:
    """A process that ends with the block that it is used in."""

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        """`options` are those of `Popen`, such as `cwd` and `env`."""
        self._said = TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  (closed by `close`)
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=self._said, text=True, encoding="utf-8", **options
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()

    def ask(self, line: str = "") -> str:
        """The line that answers this one. Raises `ChildError`."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # where it has ended, its output ends too
            print(line, file=self._process.stdin, flush=True)
        return self.answer()

    def answer(self) -> str:
        """The next line of its output. Raises `ChildError`."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ChildError(self.last_words(f"exit status {self._process.wait()}"))
        return str(line).strip()

    def end(self, seconds: float) -> int | None:
        """Close its input and wait: the exit status, or None where it does not end in that time."""
        with suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=seconds)
        return self._process.returncode

    def last_words(self, otherwise: str) -> str:
        """The last line on stderr; `otherwise` where there is none."""
        self._said.seek(0)
        said = self._said.read().strip().splitlines()
        return said[-1] if said else otherwise

    def close(self) -> None:
        """Kill the process where it still runs; again without effect."""
        if self._said.closed:
            return
        self._process.kill()
        with suppress(BrokenPipeError):  # what one that has failed did not read
            self._process.communicate()
        self._said.close()
