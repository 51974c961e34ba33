"""Identity of a row: the columns that tell one run from another."""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path
from typing import Any

import onnxruntime

from outrider import Runtime
from outrider.plans import names
from outrider.plans.build_record import read_build_record
from outrider.plans.manifest import Manifest
from outrider.runtime.backends import device_of
from outrider.tools.bench.sampling import name_sampling
from outrider.tools.bench.threads import threads_used

_ROOT = Path(__file__).resolve().parent.parent.parent


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
    return ", ".join(sorted(builders)) or f"onnxruntime {onnxruntime.__version__}"


def git_sha() -> str | None:
    """Commit of the checkout that measures, with -dirty where its files are others; None outside of one."""
    if not (_ROOT / ".git").exists():  # installed, perhaps below somebody else's repository
        return None
    command = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:  # without git
        return None
    return done.stdout.strip() or None
