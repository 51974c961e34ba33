"""What a figure was measured on."""

from __future__ import annotations

import os
import platform

import onnxruntime

from plans.machine import processor


def describe_machine() -> dict[str, str | int]:
    """Processor, cores this process may use, and the versions that matter."""
    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0,
        "python": platform.python_version(),
        "onnxruntime": onnxruntime.__version__,
    }
