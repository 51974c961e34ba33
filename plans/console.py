"""What every command does alike: JSON or text on stdout, progress on stderr, one sentence and status 2 on mistakes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from plans.errors import OutriderError

stderr = Console(stderr=True, highlight=False)
stdout = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 120)


def print_json(value: object) -> None:
    """One object on stdout at once (a reader may wait for it), and nothing else."""
    print(json.dumps(value, ensure_ascii=False), flush=True)


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
    """A user's mistake, on stderr."""
    stderr.print(f"[red]error:[/red] {escape(str(error))}", soft_wrap=True)


def guarded(command: Callable[[], int]) -> int:
    """Run a command; a user's mistake becomes one sentence and status 2, an interrupt status 130."""
    try:
        return command()
    except OutriderError as error:
        report_error(error)
        return 2
    except KeyboardInterrupt:
        stderr.print("interrupted")
        return 130
    except BrokenPipeError:  # the reader of our output left, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
