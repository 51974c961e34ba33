"""Output of all commands: JSON or text on stdout, progress on stderr, one sentence and an exit status on mistakes."""

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

from outrider.commands.process import INTERRUPTED, interruptible
from outrider.plans.errors import OutputError, OutriderError


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave the exception to `guarded`, which handles it for every other way of printing, too."""
        raise  # the exception that rich is handling


stderr = Console(stderr=True, highlight=False, soft_wrap=not (sys.stderr and sys.stderr.isatty()))
stdout = _Console(highlight=False, soft_wrap=True, width=None if sys.stdout and sys.stdout.isatty() else 120)


def print_json(value: object) -> None:
    """Print one object to stdout, flushed because a reader may wait; ASCII where stdout's encoding is not UTF-8."""
    unicode = codecs.lookup(getattr(sys.stdout, "encoding", None) or "utf-8").name == "utf-8"
    print(json.dumps(value, ensure_ascii=not unicode), flush=True)


class Update(Protocol):
    """Report `done` of `total` steps, and the current work in `doing`. `left` is the estimate of the seconds left, for
    callers whose steps do not all take the same time."""

    def __call__(self, done: int, total: int, doing: str = "", left: float | None = None) -> None: ...


@contextmanager
def progress_bar(title: str) -> Iterator[Update]:
    """Show progress of long work on stderr: yields an `Update` to call as each step begins.

    It is a bar on a terminal, and elsewhere at most about ten lines. Both estimate the time left.
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
    """Shows the caller's estimate of the time left, where there is one, else rich's."""

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
    """Print a user's mistake to stderr; the exit status reports it too, in case stderr cannot be written."""
    with suppress(OSError):
        stderr.print(f"[red]error:[/red] {escape(str(error))}", soft_wrap=True)


def guarded(command: Callable[[], int]) -> int:
    """Run a command, its reading of arguments included, and return the exit status.

    A user's mistake becomes one sentence and status 2, output that cannot be written one sentence and status 1, an
    interrupt status 130.
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
    """Discard the rest of stdout's buffer, which Python would try to write again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
