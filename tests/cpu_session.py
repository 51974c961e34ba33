"""An engine of onnxruntime-cpu in a bare session."""

from __future__ import annotations

from pathlib import Path

import onnxruntime as ort

from outrider.runtime.backends.onnxruntime_cpu import session_options


def cpu_session(model: Path | bytes, threads: int = 1) -> ort.InferenceSession:
    """A session of a model, or of its file, whose threads sleep while there is nothing to do; 0: as many as cores."""
    options = session_options(threads)
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    given = str(model) if isinstance(model, Path) else model
    return ort.InferenceSession(given, options, providers=["CPUExecutionProvider"])
