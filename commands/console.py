"""Behaviour of every command: JSON or text on stdout, progress on stderr, one sentence and a status on mistakes."""

from __future__ import annotations

import codecs
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from commands.process import INTERRUPTED, interruptible
from plans.errors import OutputError, OutriderError


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to `guarded`, which knows it of every other way to print too."""
        raise  # what is being handled


stderr = Console(stderr=True, highlight=False)
stdout = _Console(highlight=False, soft_wrap=True, width=None if sys.stdout and sys.stdout.isatty() else 120)


def print_json(value: object) -> None:
    """One object on stdout at once (a reader may wait for it), and nothing else; where that is not UTF-8, in ASCII."""
    unicode = codecs.lookup(getattr(sys.stdout, "encoding", None) or "utf-8").name == "utf-8"
    print(json.dumps(value, ensure_ascii=not unicode), flush=True)


class Update(Protocol):
    """`done` of `total` steps, and what is being done. `left` are the seconds that the rest should take, for a caller
    who knows better than that all steps take alike."""

    def __call__(self, done: int, total: int, doing: str = "", left: float | None = None) -> None: ...


@contextmanager
def progress_bar(title: str) -> Iterator[Update]:
    """Progress on stderr for long work: call what it yields as each step begins.

    A bar on a terminal; elsewhere at most about ten lines. Both say how long the rest should take.
    """
    if not stderr.is_terminal:
        yield _progress_lines(title)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _LeftColumn())
    with Progress(*columns, console=stderr, transient=True) as bar:
        task = bar.add_task(title, total=None, left=None)

        def update(done: int, total: int, doing: str = "", left: float | None = None) -> None:
            said = f"{title}: {doing}" if doing else title
            bar.update(task, completed=done, total=total, description=said, left=left)

        yield update


class _LeftColumn(TimeRemainingColumn):
    """The caller's word on how long the rest takes, where there is one."""

    def render(self, task: Task) -> Text:
        left: float | None = task.fields["left"]
        return super().render(task) if left is None else Text(_duration(left), style="progress.remaining")


def _progress_lines(title: str) -> Update:
    tenth, started = -1, perf_counter()

    def update(done: int, total: int, doing: str = "", left: float | None = None) -> None:
        nonlocal tenth
        if done * 10 // max(total, 1) > tenth:
            tenth = done * 10 // max(total, 1)
            if left is None and done:
                left = (perf_counter() - started) * (total - done) / done
            about = "" if left is None else f", about {_duration(left)} left"
            stderr.print(f"{title}: {done} of {total}{about}{', ' + doing if doing else ''}", soft_wrap=True)

    return update


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def report_error(error: OutriderError) -> None:
    """A user's mistake, on stderr; the exit status tells of it as well, should that not be written."""
    with suppress(OSError):
        stderr.print(f"[red]error:[/red] {escape(str(error))}", soft_wrap=True)


def guarded(command: Callable[[], int]) -> int:
    """Run a command, from reading its arguments on; the exit status.

    A user's mistake becomes one sentence and status 2, output that cannot be written one and status 1, an interrupt
    status 130.
    """
    try:
        with interruptible():
            try:
                return command()
            finally:
                if sys.stdout is not None:
                    sys.stdout.flush()
    except OutputError as error:
        report_error(error)
        _discard_output()
        return 1
    except OutriderError as error:
        report_error(error)
        return 2
    except KeyboardInterrupt:
        stderr.print("interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output left, as `| head` does
        _discard_output()
        return 0


def _discard_output() -> None:
    """Drop what is left in the buffer, which Python would try to write once more at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
