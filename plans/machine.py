"""The machine that figures were measured on, and the memory that a process took."""

from __future__ import annotations

import platform
import sys
from pathlib import Path


def processor() -> str:
    """The model of the CPU."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def peak_rss_bytes() -> int | None:
    """The most memory that this process has held since it began; None where the system does not tell."""
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
