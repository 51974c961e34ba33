"""The machine and the time of a measurement."""

from __future__ import annotations

import platform
from datetime import datetime
from typing import Any

import onnxruntime

from plans.machine import available_cores, processor

CPU = "onnxruntime-cpu"
"""The backend whose logits are on the host, and whose threads are ours to choose."""


def describe_run() -> dict[str, Any]:
    """Head of every report: `machine`, and the `time` (ISO 8601, local, with its offset) at which it began."""
    return {"machine": describe_machine(), "time": datetime.now().astimezone().isoformat(timespec="seconds")}


def describe_machine() -> dict[str, str | int]:
    """Processor, cores this process may use, and the versions that matter."""
    return {
        "processor": processor(),
        "cores": available_cores(),
        "python": platform.python_version(),
        "onnxruntime": onnxruntime.__version__,
    }
