"""Our own kernels on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from outrider.compiler.backends.base import GpuBackend, Report
from outrider.compiler.models.config import WeightType

if TYPE_CHECKING:
    from outrider.compiler.engines import EngineFolder
    from outrider.compiler.lowering.rule import Rule

KernelCapability = Literal[
    "sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121"
]
"""GPUs that have the tensor-core instructions of our kernels of engines."""


class CudaBackend(GpuBackend):
    """Our own kernels on an NVIDIA GPU: a step is one recorded launch, and a token the same in any company."""

    compute_capabilities: tuple[KernelCapability, ...] = Field(
        ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"),
        strict=False,
        description="GPUs that the kernels are compiled for",
    )

    widens: ClassVar[bool] = True
    kernels: ClassVar[tuple[str, str]] = ("engine.cu", "kernels/cuda")

    @classmethod
    def rules(cls) -> tuple[Rule, ...]:
        from outrider.compiler.lowering import OUR_ARITHMETIC

        return OUR_ARITHMETIC

    def open_folder(self, folder: Path, report: Report, cache: Path | None, dtype: WeightType) -> EngineFolder:
        from outrider.compiler.engines.cuda import CudaEngines

        return CudaEngines(folder, dtype)


BACKEND = CudaBackend
