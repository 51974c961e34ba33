"""There is no room when the prefix cache is saved: the old file stays, the server says so and ends, the next begins.

The server may write files of a certain size only (RLIMIT_FSIZE), which needs no rights.
"""

from __future__ import annotations

import resource
from hashlib import sha256

from outrider.tools.lab.faults.crowd import ask_all
from outrider.tools.lab.faults.figures import Figures
from outrider.tools.lab.faults.setting import Setting


def run(setting: Setting, figures: Figures) -> None:
    """Save a prefix cache, fail to save the next, with and without an old one, and continue with the first."""
    folder = setting.file("limited")
    folder.mkdir()
    kept, none = folder / "kept", folder / "none"
    with setting.serve("--cache-file", str(kept)) as server:
        ask_all(server.port, setting.questions[: len(setting.questions) // 2], figures)
        figures.check(server.end() == 0 and kept.exists(), f"No prefix cache was saved: {server.said}")
    size, digest = kept.stat().st_size, sha256(kept.read_bytes()).digest()
    for file in (kept, none):
        with setting.serve("--cache-file", str(file)) as server:
            ask_all(server.port, setting.questions, figures)
            resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (size // 2, size // 2))
            status = server.end()
            figures.count("faults")
            figures.check(status == 0, f"The server ended with status {status}: {server.said}")
            figures.check("the prefix cache cannot be saved" in server.said, f"It does not say so: {server.said}")
            figures.check("Traceback" not in server.said, f"The server has printed: {server.said}")
        figures.check(sha256(kept.read_bytes()).digest() == digest, "The old file is not what it was.")
        figures.check(sorted(folder.iterdir()) == [kept], f"Files are left: {sorted(folder.iterdir())}")
    with setting.serve("--cache-file", str(kept)) as server:
        ask_all(server.port, setting.questions, figures)
        figures.check("are warm" in server.said, f"The next server is not warm: {server.said}")
        figures.check(server.end() == 0, "The next server does not end with status 0.")
    figures.check(sha256(kept.read_bytes()).digest() != digest, "The next server saved nothing.")
