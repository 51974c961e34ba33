"""How many threads the target's engine computes with on the CPU."""

from __future__ import annotations

import os
from pathlib import Path

import onnxruntime as ort

from outrider.plans.machine import available_cores
from outrider.tools.bench.machine import CPU

_TASKS = Path("/proc/self/task")
# `y = x`, float32 `[1]`: an ONNX model of one Identity, opset 13, in its bytes, so that no onnx is imported to measure.
_IDENTITY = bytes.fromhex(
    "080812003a370a100a017812017922084964656e746974791201675a0f0a0178120a0a08080112040a02"
    "0801620f0a0179120a0a08080112040a02080142040a00100d"
)


def threads_used(backend: str, asked: int) -> int | None:
    """`asked`, or, where that is 0, what ONNX Runtime chooses here: one thread per physical core. None on a GPU.

    It tells nobody how many it started, and it counts cores that this process may not run on, so the threads of a
    session are counted; where the system does not list them, the cores that this process may use.
    """
    if backend != CPU:
        return None
    if asked:
        return asked
    before = _running()
    if before is None:
        return available_cores()
    session = ort.InferenceSession(_IDENTITY, providers=["CPUExecutionProvider"])
    after = _running()
    del session
    return 1 if after is None else 1 + max(after - before, 0)  # the caller's thread computes too


def _running() -> int | None:
    """Threads of this process; None where the system does not list them."""
    return len(os.listdir(_TASKS)) if _TASKS.is_dir() else None
