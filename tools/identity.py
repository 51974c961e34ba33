"""What identifies a measurement: the machine, the time, the commit, the plan, the settings."""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
from datetime import datetime
from pathlib import Path
from typing import Any

import onnxruntime as ort

from outrider import Runtime
from outrider.plans import names
from outrider.plans.backends import BACKENDS
from outrider.plans.build_record import read_build_record
from outrider.plans.machine import available_cores, processor
from outrider.plans.manifest import Manifest
from outrider.runtime.backends import device_of
from outrider.tools.bench.sampling import name_sampling


def describe_run() -> dict[str, Any]:
    """Head of every report: `machine`, and the `time` (ISO 8601, local, with its offset) at which it began."""
    return {"machine": describe_machine(), "time": datetime.now().astimezone().isoformat(timespec="seconds")}


def describe_machine() -> dict[str, str | int]:
    """Processor, cores this process may use, and the versions that matter."""
    return {
        "processor": processor(),
        "cores": available_cores(),
        "python": platform.python_version(),
        "onnxruntime": ort.__version__,
    }


class OtherPrograms:
    """What other programs take of the processor, from the making of this object on."""

    def __init__(self) -> None:
        self._began = _spent()

    @property
    def share(self) -> float | None:
        """Of all cores' time so far; None where the system does not say."""
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


_ROOT = Path(__file__).resolve().parents[1]


def identity_columns(runtime: Runtime, options: argparse.Namespace) -> dict[str, Any]:
    """Columns of the commit, the plan and the settings that all rows of a run share."""
    manifest = runtime.manifest
    engine = manifest.backends[runtime.backend].engines[names.TARGET]
    return {
        "git_sha": git_sha(),
        "identity": manifest.identity,
        "backend": runtime.backend,
        "backend_version": _version(manifest, runtime.backend),
        "device": device_of(runtime.backend),
        "threads": threads_used(runtime.backend, options.threads),
        "weights": _weights(manifest, runtime.backend),
        "dtype": str(next(t.dtype for t in engine.inputs if t.name == names.k_cache(0))),
        "sampling": name_sampling(options.sampling),
        "reps": options.reps,
        "task": options.task,
    }


def plan_columns(plan: Path, manifest: Manifest) -> dict[str, Any]:
    """Bytes of the plan, and the seconds and memory of its build, where these were recorded."""
    record = read_build_record(plan)
    return {
        "build_seconds": None if record is None else record.seconds,
        "build_peak_rss_bytes": None if record is None else record.peak_rss_bytes,
        "plan_bytes": sum(file.size for file in manifest.files),
    }


def _weights(manifest: Manifest, backend: str) -> str:
    """Return what the target's weights are: the recipe's type, or that they are the checkpoint's integers."""
    asked = manifest.recipe["target"].get("weights")
    if asked is not None:
        return str(asked["type"]) if asked["method"] == "rtn" else f"{asked['type']} ({asked['method']})"
    reports = manifest.backends[backend].lowering
    if any(report.engine == names.TARGET and report.rule == "Quantize" and report.applied for report in reports):
        return "quantised as in the checkpoint"
    own = next(entry for entry in manifest.recipe["backends"] if entry["kind"] == backend)
    return str(own.get("dtype") or manifest.recipe["target"]["dtype"])


def _version(manifest: Manifest, backend: str) -> str:
    """Name of the builder of the target's engines, or, where anything may load them, of what runs them here."""
    builders = {engine.builder for engine in manifest.backends[backend].engines.values() if engine.builder}
    return ", ".join(sorted(builders)) or f"onnxruntime {ort.__version__}"


def git_sha(root: Path = _ROOT) -> str | None:
    """Commit of a checkout, with -dirty where its files are others; None outside of one. Default: the one that
    measures."""
    if not (root / ".git").exists():  # installed, perhaps below somebody else's repository
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None
    except OSError:  # without git
        return None


_TASKS = Path("/proc/self/task")
# `y = x`, float32 `[1]`: an ONNX model of one Identity, opset 13, in its bytes, so that no onnx is imported to measure.
_IDENTITY = bytes.fromhex(
    "080812003a370a100a017812017922084964656e746974791201675a0f0a0178120a0a08080112040a02"
    "0801620f0a0179120a0a08080112040a02080142040a00100d"
)


def threads_used(backend: str, asked: int) -> int | None:
    """`asked`, or, where that is 0, what ONNX Runtime chooses here: one thread per physical core. None on a GPU.

    It does not say how many it started, and it counts cores that this process may not run on, so the threads of a
    session are counted; where the system does not list them, the cores that this process may use.
    """
    if not BACKENDS[backend].on_processor:
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
