"""TensorRT for RTX."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from outrider.compiler.backends.base import GpuBackend
from outrider.compiler.backends.tensorrt import BuilderBackend, import_library

RtxCapability = Literal["sm_75", "sm_80", "sm_86", "sm_89", "sm_120", "sm_121"]


class TensorRtRtxBackend(BuilderBackend):
    """TensorRT for RTX: engines are built without a GPU, and finished on the user's GPU at the first run."""

    compute_capabilities: tuple[RtxCapability, ...] = Field(
        ("sm_80", "sm_86", "sm_89", "sm_120"),
        strict=False,
        description="GPUs that the engines are for; each adds to their size",
    )

    library: ClassVar[str] = "tensorrt_rtx"
    packages: ClassVar[tuple[str, ...]] = (library, *GpuBackend.packages)

    def facts_of_machine(self) -> dict[str, str]:
        self.load()
        return super().facts_of_machine()

    def load(self) -> Any:
        return import_library(self.library, "TensorRT for RTX", self.kind)

    def configure(self, trt: Any, config: Any, cache: Path | None) -> None:
        capabilities = self.compute_capabilities
        config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)  # otherwise a step cannot be captured in a CUDA graph
        config.num_compute_capabilities = len(capabilities)
        for index, capability in enumerate(capabilities):
            config.set_compute_capability(trt.ComputeCapability.__members__[capability.replace("_", "").upper()], index)

    def provenance(self, trt: Any) -> dict[str, Any]:
        return {"builder": f"tensorrt_rtx {trt.__version__}", "devices": self.compute_capabilities}


BACKEND = TensorRtRtxBackend
