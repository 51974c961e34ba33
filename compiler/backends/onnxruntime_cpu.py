"""ONNX Runtime on the CPU."""

from __future__ import annotations

from outrider.compiler.backends.base import Backend


class OnnxRuntimeCpuBackend(Backend):
    """ONNX Runtime on the CPU: the embedded default, which runs everywhere. Computes in float32."""


BACKEND = OnnxRuntimeCpuBackend
