"""The disk is full when the prefix cache is saved: the old file stays, the server says so and ends, the next begins.

Two ways: a process that may write files of a certain size only (RLIMIT_FSIZE), which needs no rights; and a small file
system that another file has filled, where this process may mount one.
"""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

from outrider.tools.lab.faults.crowd import ask_all
from outrider.tools.lab.faults.figures import Figures
from outrider.tools.lab.faults.server import Server
from outrider.tools.lab.faults.setting import Setting

_DISK_BYTES = 2**28  # room for two prefix caches of `setting.serve`, the old file and the new one


def run(setting: Setting, figures: Figures) -> None:
    folder = setting.file("limited")
    folder.mkdir()
    setting.show("files of limited size")
    _fill(setting, figures, folder, _limit)
    if setting.short:
        return
    with _small_disk(setting.file("disk")) as disk:
        figures.notes["full file system"] = "yes" if disk else "not tried: this process may mount none"
        if disk is not None:
            setting.show("a full file system")
            _fill(setting, figures, disk, _fill_disk)


def _fill(setting: Setting, figures: Figures, folder: Path, fill: Callable[[Server, Path, int], None]) -> None:
    """Save a prefix cache, fail to save the next, with and without an old one, and continue with the first."""
    kept, half = folder / "kept", len(setting.questions) // 2
    none = folder / "none"
    with setting.serve("--cache-file", str(kept)) as server:
        ask_all(server.port, setting.questions[:half], figures)
        figures.check(server.end() == 0 and kept.exists(), f"No prefix cache was saved: {server.said}")
    size, digest = kept.stat().st_size, sha256(kept.read_bytes()).digest()
    for file in (kept, none):
        with setting.serve("--cache-file", str(file)) as server:
            ask_all(server.port, setting.questions, figures)
            fill(server, folder, size // 2)
            status = server.end()
            figures.count("faults")
            figures.check(status == 0, f"The server ended with status {status}: {server.said}")
            figures.check("the prefix cache cannot be saved" in server.said, f"It does not say so: {server.said}")
            figures.check("Traceback" not in server.said, f"The server has printed: {server.said}")
        (folder / "filler").unlink(missing_ok=True)
        figures.check(sha256(kept.read_bytes()).digest() == digest, "The old file is not what it was.")
        figures.check(sorted(folder.iterdir()) == [kept], f"Files are left: {sorted(folder.iterdir())}")
    with setting.serve("--cache-file", str(kept)) as server:
        ask_all(server.port, setting.questions, figures)
        figures.check("are warm" in server.said, f"The next server is not warm: {server.said}")
        figures.check(server.end() == 0, "The next server does not end with status 0.")
    figures.check(sha256(kept.read_bytes()).digest() != digest, "The next server saved nothing.")


def _limit(server: Server, _: Path, room: int) -> None:
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (room, room))


def _fill_disk(_: Server, folder: Path, room: int) -> None:
    """Write a file until `room` bytes are left."""
    with (folder / "filler").open("wb") as file:
        file.write(bytes(_DISK_BYTES - room - sum(each.stat().st_size for each in folder.iterdir())))


@contextmanager
def _small_disk(place: Path) -> Iterator[Path | None]:
    """A file system of `_DISK_BYTES` in memory; None where none may be mounted."""
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "faults", str(place)]
    try:
        mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except OSError:
        mounted = False
    try:
        yield place if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", str(place)], check=False)
