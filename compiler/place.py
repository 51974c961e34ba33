"""The folder of a plan, the workplace beside it, and the renames that put a finished plan into its folder.

The workplace is `.NAME.building-HOST-PID`; an old plan is moved to `.NAME.previous-HOST-PID` for a moment. A killed
process leaves these folders after: the next build restores a plan that was moved away and never replaced, and removes
folders of dead processes of this host. A build replaces only a plan, and only one that holds no foreign files.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from outrider.plans.build_record import BUILD_RECORD
from outrider.plans.errors import OutriderError, PlanError
from outrider.plans.pass_prices import PASS_PRICES
from outrider.plans.plan import MANIFEST, Plan, open_plan

_HOST = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:64] or "localhost"
_RUNNING: set[Path] = set()  # workplaces of this process


class Place:
    """The folder `folder` (absolute, links resolved) of an existing or future plan."""

    def __init__(self, out: Path) -> None:
        """Raise `PlanError` where `out` leads nowhere, as a link to itself does."""
        try:
            self.folder = out.resolve()
        except (OSError, RuntimeError) as error:
            raise PlanError(f"{out} leads nowhere ({error}); choose another --out") from None

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Turn an `OSError` inside into a `PlanError` that names the folder."""
        try:
            yield
        except OSError as error:
            reason = error.strerror or str(error)
            at = f", at {error.filename}" if error.filename else ""
            raise PlanError(
                f"{self.folder} cannot be written ({reason}{at}); choose another --out, or give it room and permission"
            ) from error

    def plan(self) -> Plan | None:
        """Return the existing plan; None for no folder, an empty one, and a plan that is damaged or of another version.

        Raises `PlanError` for anything else, because a build does not replace files that no build has made.
        """
        with self.writing():
            self._restore()
            self._check_ours()
        try:
            return open_plan(self.folder) if self.folder.exists() else None
        except OutriderError:
            return None

    @contextmanager
    def workplace(self) -> Iterator[Path]:
        """Yield an empty folder on the same file system, removed at the end. Raises `PlanError` as `writing` does."""
        with self.writing():
            temporary = self._beside("building")
            if temporary in _RUNNING:
                raise PlanError(f"{self.folder} is being built by this process already; wait for that build")
            _RUNNING.add(temporary)
            try:
                self._remove_abandoned()
                temporary.mkdir(parents=True)
                yield temporary
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
                _RUNNING.discard(temporary)

    def put(self, new: Path) -> None:
        """Rename the folder `new` to this place; where the rename fails, the old plan stays."""
        self._check_ours()  # again, because somebody may have written there during the build
        previous = self._beside("previous")
        if self.folder.exists():
            self.folder.rename(previous)
        try:
            new.rename(self.folder)
        except BaseException:
            if previous.exists():
                previous.rename(self.folder)
            raise
        shutil.rmtree(previous, ignore_errors=True)

    def _check_ours(self) -> None:
        """Raise `PlanError` for a folder that is not a plan's, or that holds a file which is not the plan's."""
        if not self.folder.exists():
            return
        if not self.folder.is_dir():
            raise PlanError(f"{self.folder} exists and is not a folder; choose another --out, or remove it")
        if self.folder.is_mount():
            raise PlanError(f"{self.folder} is a mount point, which cannot be renamed; choose a folder inside it")
        if not any(self.folder.iterdir()):
            return
        listed = _listed_files(self.folder / MANIFEST)
        if listed is None:
            raise PlanError(f"{self.folder} exists and is not a plan; choose another --out, or remove it")
        for folder, folders, files in os.walk(self.folder):
            here = Path(folder)
            for name in (*files, *(f for f in folders if (here / f).is_symlink())):
                if (here / name).relative_to(self.folder).as_posix() not in listed:
                    raise PlanError(
                        f"{here / name} is no file of the plan that --out would replace; move it away, or choose "
                        "another --out"
                    )

    def _restore(self) -> None:
        """Put back the plan that a killed build of this host moved away and did not replace."""
        if not self.folder.exists():
            waiting = [path for path, host, pid in self._left("previous") if host == _HOST and not _alive(pid)]
            if waiting:
                max(waiting, key=lambda path: path.stat().st_mtime).rename(self.folder)

    def _remove_abandoned(self) -> None:
        for kind in ("building", "previous"):
            for path, host, pid in self._left(kind):
                if host == _HOST and not _alive(pid):
                    shutil.rmtree(path, ignore_errors=True)

    def _beside(self, kind: str) -> Path:
        return self.folder.parent / f".{self.folder.name}.{kind}-{_HOST}-{os.getpid()}"

    def _left(self, kind: str) -> list[tuple[Path, str, int]]:
        """Return the folders that builds of this place left beside it, each with its host and process id."""
        name = re.compile(re.escape(f".{self.folder.name}.{kind}-") + r"([A-Za-z0-9.-]+)-([0-9]{1,9})")
        if not self.folder.parent.is_dir():
            return []
        found = ((path, name.fullmatch(path.name)) for path in self.folder.parent.iterdir())
        return [(path, m[1], int(m[2])) for path, m in found if m and path.is_dir() and not path.is_symlink()]


def _listed_files(manifest: Path) -> set[str] | None:
    """Return the files that a plan of any version may hold, `plan.json` among them; None if `manifest` is no plan's."""
    try:
        if not manifest.is_file():  # reading a pipe would never end
            return None
        raw = json.loads(manifest.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(raw, dict) or not {"format_version", "identity"} <= raw.keys():
        return None
    files = raw.get("files")
    entries = files if isinstance(files, list) else []
    return {
        MANIFEST,
        BUILD_RECORD,
        PASS_PRICES,
        *(str(entry.get("path")) for entry in entries if isinstance(entry, dict)),
    }


def _alive(pid: int) -> bool:
    """Return whether another process has this id; a folder with our own id was left by an earlier process."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # the process lives and is another user's
        return True
    return True
