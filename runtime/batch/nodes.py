"""What every node of a cluster must see."""

from __future__ import annotations

import socket
from pathlib import Path

from outrider.plans.errors import RequestError


def check_visible(folder: Path, file: str) -> None:
    """Raise RequestError where this machine does not see a file that others have written, or read."""
    if not (folder / file).is_file():
        raise RequestError(
            f"{socket.gethostname()} does not see {folder / file}; put it where every node of the cluster sees it "
            "under the same path, such as a shared file system, and pass that path."
        )
