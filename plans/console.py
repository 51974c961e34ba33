"""What every command does alike: JSON or text on stdout, progress on stderr, one sentence and status 2 on mistakes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from plans.errors import OutriderError

stderr = Console(stderr=True, highlight=False)
stdout = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 120)


def print_json(value: object) -> None:
    """One object on stdout at once (a reader may wait for it), and nothing else."""
    print(json.dumps(value, ensure_ascii=False), flush=True)


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int, str], None]]:
    """Progress on stderr for long work: call what it yields with (done, total, what is being done).

    A bar on a terminal; elsewhere at most about ten lines. Both say how long the rest should take.
    """
    if not stderr.is_terminal:
        yield _progress_lines(title)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr, transient=True) as bar:
        task = bar.add_task(title, total=None)

        def update(done: int, total: int, doing: str = "") -> None:
            bar.update(task, completed=done, total=total, description=f"{title}: {doing}" if doing else title)

        yield update


def _progress_lines(title: str) -> Callable[[int, int, str], None]:
    tenth, started = -1, perf_counter()

    def update(done: int, total: int, doing: str = "") -> None:
        nonlocal tenth
        if done * 10 // max(total, 1) > tenth:
            tenth = done * 10 // max(total, 1)
            about = f", about {_duration((perf_counter() - started) * (total - done) / done)} left" if done else ""
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
