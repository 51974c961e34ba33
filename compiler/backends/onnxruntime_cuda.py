"""ONNX Runtime on a GPU."""

from __future__ import annotations

from pydantic import Field

from outrider.compiler.backends.base import CudaCapability, GpuBackend


class OnnxRuntimeCudaBackend(GpuBackend):
    """ONNX Runtime on an NVIDIA GPU. The engines are the same for every GPU; our own ops are compiled for each."""

    compute_capabilities: tuple[CudaCapability, ...] = Field(
        ("sm_80", "sm_90", "sm_120"), strict=False, description="GPUs that our own ops are compiled for"
    )


BACKEND = OnnxRuntimeCudaBackend
