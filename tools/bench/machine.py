"""What a figure was measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import onnxruntime


def describe_machine() -> dict[str, str | int]:
    """Processor, cores this process may use, and the versions that matter."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0,
        "python": platform.python_version(),
        "onnxruntime": onnxruntime.__version__,
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
