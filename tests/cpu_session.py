"""An engine of onnxruntime-cpu in a bare session."""

from __future__ import annotations

from pathlib import Path

import onnxruntime as ort

from plugins.onnxruntime_ops import cpu_library


def cpu_session(path: Path, threads: int = 1) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.register_custom_ops_library(str(cpu_library()))
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
