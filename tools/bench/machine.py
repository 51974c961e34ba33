"""The machine and the time of a measurement."""

from __future__ import annotations

import os
import platform
from datetime import datetime
from pathlib import Path
from typing import Any

import onnxruntime

from outrider.plans.machine import available_cores, processor

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


class OtherPrograms:
    """What other programs take of the processor, from the making of this object on."""

    def __init__(self) -> None:
        self._began = _spent()

    @property
    def share(self) -> float | None:
        """Of all cores' time so far; None where the system does not tell."""
        began, now = self._began, _spent()
        if began is None or now is None or now[0] <= began[0]:
            return None
        whole, busy, own = (after - before for before, after in zip(began, now, strict=True))
        return max(0.0, busy - own) / whole


def _spent() -> tuple[float, float, float] | None:
    """Seconds of all cores: all of them, those that were not idle, and those that this process took."""
    try:
        line = Path("/proc/stat").read_text(encoding="ascii").partition("\n")[0]
    except OSError:
        return None
    user, nice, system, idle, waiting, *others = (int(ticks) / os.sysconf("SC_CLK_TCK") for ticks in line.split()[1:9])
    busy = user + nice + system + sum(others)
    return busy + idle + waiting, busy, sum(os.times()[:4])
