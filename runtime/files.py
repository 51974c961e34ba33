"""Files of a running program: the cache folder, locks, files that are written whole, and weights that are mapped.

A plan that is moved, removed, or replaced as the compiler does it (built beside, then renamed) is still served as it
was loaded, as its files live while a process has them open. One that a program writes over in place changes while it
is served: nothing can prevent that, so it is noticed, and no answer is given of such a plan. A file that is cut short
ends the process (SIGBUS) once a pass reads what is no longer there.
"""

from __future__ import annotations

import os
import secrets
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from outrider.plans.errors import PlanError
from outrider.plans.plan import MANIFEST, Plan

try:
    import fcntl
except ImportError:  # not on Windows, where nothing is locked
    fcntl = None  # type: ignore[assignment]


def cache_folder() -> Path:
    """Return our part of `XDG_CACHE_HOME`, or of `~/.cache`. Raises `RuntimeError` where there is no home."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (cache if cache.is_absolute() else Path.home() / ".cache") / "outrider"


@contextmanager
def locked(path: Path, *, wait: bool = True, shared: bool = False) -> Iterator[None]:
    """Hold the file at `path`, which is made if need be. Without `wait`, raises BlockingIOError where it is held.

    Several processes may hold it `shared`, while none holds it alone. The system releases it with the process. Its
    content stays. Raises OSError where the file cannot be made, or is a link.
    """
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    with open(os.open(path, flags, 0o666), "r+b", buffering=0) as file:
        if fcntl is not None:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
        yield


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


class MappedFiles:
    """Holds the weights of a plan, which engines map, open until it is no longer referenced."""

    def __init__(self, paths: Iterable[Path] = ()) -> None:
        """Raises PlanError for a file that cannot be opened."""
        self._held: list[tuple[Path, int, tuple[int, int]]] = []
        self._close = weakref.finalize(self, _close, self._held)
        self._close.atexit = False  # a pass may run until the process has ended, which closes them
        for path in paths:
            try:
                self.hold(path)
            except OSError as error:
                raise PlanError(f"{path} cannot be read ({error}); build the plan again") from None

    @classmethod
    def from_plan(cls, plan: Plan, backend: str) -> MappedFiles:
        """Those of a backend: graphs are read when they are loaded, and what lies beside them is mapped."""
        paths = [file.path for file in plan.manifest.files if file.path.startswith(f"engines/{backend}/")]
        return cls(plan.root / path for path in paths if path.endswith(".bin"))

    def hold(self, path: Path) -> Callable[[], None]:
        """Hold a further file; returns what lets go of it. Raises OSError."""
        number = os.open(path, os.O_RDONLY)
        entry = path, number, _written(number)
        self._held.append(entry)

        def release() -> None:
            self._held.remove(entry)
            os.close(number)

        return release

    def check(self) -> None:
        """Raise PlanError where a file has been written to since it was opened; a microsecond."""
        for path, number, written in self._held:
            if _written(number) != written:
                raise PlanError(
                    f"{path} was written to while the plan is in use, so that its weights may be of neither plan. "
                    "Load the plan again; and to replace one, build or copy it beside, and rename the folder."
                )


def check_not_replaced(plan: Plan) -> None:
    """Raise PlanError where another plan has come to the folder since `plan` was opened: what was loaded meanwhile may
    be of either."""
    with suppress(OSError):  # moved or removed, and none in its place
        if plan.manifest.identity not in (plan.root / MANIFEST).read_text(encoding="utf-8"):
            raise PlanError(f"{plan.root} was replaced while it was loaded; load it again")


def _written(number: int) -> tuple[int, int]:
    """When a file was last written to, and its size."""
    found = os.fstat(number)
    return found.st_mtime_ns, found.st_size


def _close(held: list[tuple[Path, int, tuple[int, int]]]) -> None:
    for _, number, _ in held:
        with suppress(OSError):
            os.close(number)
