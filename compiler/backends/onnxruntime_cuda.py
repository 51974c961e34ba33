"""ONNX Runtime on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from outrider.compiler.backends.base import CudaCapability, GpuBackend

if TYPE_CHECKING:
    from outrider.compiler.lowering.rule import Rule


class OnnxRuntimeCudaBackend(GpuBackend):
    """ONNX Runtime on an NVIDIA GPU. The engines are the same for every GPU; our own ops are compiled for each."""

    compute_capabilities: tuple[CudaCapability, ...] = Field(
        ("sm_80", "sm_90", "sm_120"), strict=False, description="GPUs that our own ops are compiled for"
    )

    @classmethod
    def rules(cls) -> tuple[Rule, ...]:
        from outrider.compiler.lowering.attention import AroundAttention
        from outrider.compiler.lowering.functions import CopiedSizes, UnbranchedBody
        from outrider.compiler.lowering.group_query_attention import GroupQueryAttention
        from outrider.compiler.lowering.own_ops import SkipNorm
        from outrider.compiler.lowering.products import FuseProjections
        from outrider.compiler.lowering.quantized import BlockQuantized
        from outrider.compiler.lowering.scatter_attention import ScatterAttention

        return (
            FuseProjections(),
            BlockQuantized(),
            SkipNorm(),
            GroupQueryAttention(),
            AroundAttention(),
            ScatterAttention(),
            UnbranchedBody(),
            CopiedSizes(),
        )


BACKEND = OnnxRuntimeCudaBackend
