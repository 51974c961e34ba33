"""TensorRT, and what TensorRT for RTX has in common with it."""

from __future__ import annotations

import importlib
import os
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from outrider.compiler.backends.base import CudaCapability, GpuBackend, Report
from outrider.compiler.models.config import WeightType
from outrider.compiler.recipe_sections import WrittenPath
from outrider.plans.errors import PlanError
from outrider.plans.extras import install

if TYPE_CHECKING:
    from outrider.compiler.engines import EngineFolder
    from outrider.compiler.lowering.rule import Rule

OLDEST = (10, 15)  # the first version of TensorRT with cache updates in place


class BuilderBackend(GpuBackend):
    """A backend whose engines TensorRT builds, with differences in configuration; `trt` is the library's package."""

    workspace_mb: int = Field(1024, ge=1, le=2**20, description="MB that an engine may use beside weights and KV")
    frontend: Literal["onnx", "torch-tensorrt"] = Field(
        "onnx",
        description="what reads graphs: TensorRT's parser, or Torch-TensorRT, which leaves those of drafts to the "
        "parser",
    )

    bounded: ClassVar[bool] = True
    library: ClassVar[str]
    """The name of the package."""

    @classmethod
    def rules(cls) -> tuple[Rule, ...]:
        from outrider.compiler.lowering.attention import AroundAttention
        from outrider.compiler.lowering.functions import FunctionBody
        from outrider.compiler.lowering.plugin_nodes import BodyOfDeclined, PluginNodes
        from outrider.compiler.lowering.quantized import FloatDraftExperts, FloatDrafts
        from outrider.compiler.lowering.scatter_attention import UpdateOnceAttention

        ops = (PluginNodes(), BodyOfDeclined()) if cls.holds_ops else (FunctionBody(),)
        return (FloatDrafts(), FloatDraftExperts(), AroundAttention(), UpdateOnceAttention(), *ops)

    @abstractmethod
    def load(self) -> Any:
        """Return the package. Raises `PlanError` where it is missing."""

    @abstractmethod
    def configure(self, trt: Any, config: Any, cache: Path | None) -> None:
        """Complete the configuration of a build, which starts with the file `cache`. Raises `PlanError`."""

    def keep(self, config: Any, cache: Path) -> None:
        """Write to `cache` what a build has measured. Raises `PlanError`."""

    @abstractmethod
    def provenance(self, trt: Any) -> dict[str, Any]:
        """Return the fields of `plans.manifest.Engine` about the builder of an engine and its devices."""

    def open_folder(self, folder: Path, report: Report, cache: Path | None, dtype: WeightType) -> EngineFolder:
        from outrider.compiler.engines.tensorrt import TensorRtEngines
        from outrider.compiler.engines.torch_front import TorchFront

        return TensorRtEngines(folder, self, report, None if self.frontend == "onnx" else TorchFront, cache)

    def facts_of_machine(self) -> dict[str, str]:
        if self.frontend == "onnx":
            return {}
        from outrider.compiler.engines.torch_tensorrt import installed_version

        return {f"{self.kind} frontend": installed_version(self.library)}


class TensorRtBackend(BuilderBackend):
    """TensorRT: engines with our ops inside, built and timed on the GPU that is to run them."""

    compute_capabilities: tuple[CudaCapability, ...] = Field(
        ("sm_80", "sm_90", "sm_100", "sm_120"),
        strict=False,
        description="GPUs that the ops beside engines are compiled for; engines are for the GPU that builds them",
    )
    timing_cache: WrittenPath | None = Field(
        None,
        exclude=True,  # it holds kernel times, which do not change results
        description="file, relative to the recipe, of how long kernels took: read before a build, written after it",
    )
    version_compatible: bool = Field(
        False, description="later versions of TensorRT with the same first number may load the engines; may cost speed"
    )
    hardware_compatibility: Literal["none", "same_compute_capability", "ampere_plus"] = Field(
        "none",
        description="GPUs that may run the engines beside the kind that built them: none, those of the same compute "
        "capability, or all from sm_80 on; may cost speed",
    )

    library: ClassVar[str] = "tensorrt"
    packages: ClassVar[tuple[str, ...]] = (library, *GpuBackend.packages)
    holds_ops: ClassVar[bool] = True

    @property
    def cache(self) -> str | None:
        return self.timing_cache

    @property
    def architectures(self) -> tuple[str, ...]:
        """Those of the recipe, and this machine's GPU."""
        return tuple(dict.fromkeys((*self.compute_capabilities, gpu_here().architecture)))

    def facts_of_machine(self) -> dict[str, str]:
        load_tensorrt()
        gpu = gpu_here()
        return super().facts_of_machine() | {"gpu": f"{gpu.name}, {gpu.architecture}"}

    def load(self) -> Any:
        from outrider.plugins.tensorrt.registration import register_plugins

        trt = load_tensorrt()
        try:
            register_plugins()
        except ImportError as error:
            raise PlanError(f"the backend tensorrt cannot be built: {error}") from None
        return trt

    def configure(self, trt: Any, config: Any, cache: Path | None) -> None:
        """Plans hold no host code, so the lean runtime that TensorRT would put into a version-compatible engine is
        excluded."""
        if self.version_compatible:
            config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
            config.set_flag(trt.BuilderFlag.EXCLUDE_LEAN_RUNTIME)
        levels = trt.HardwareCompatibilityLevel.__members__
        config.hardware_compatibility_level = levels[self.hardware_compatibility.upper()]
        if cache is not None:
            try:
                known = cache.read_bytes() if cache.exists() else b""
            except OSError as error:
                raise PlanError(f"the timing cache {cache} cannot be read: {error.strerror}") from None
            times = config.create_timing_cache(known)
            if times is None or not config.set_timing_cache(times, False):
                raise PlanError(
                    f"the timing cache {cache} is none of tensorrt {trt.__version__} on this GPU, {gpu_here().name}; "
                    "remove it, or name another"
                )

    def keep(self, config: Any, cache: Path) -> None:
        written = cache.with_name(f".{cache.name}.writing-{os.getpid()}")
        try:
            written.write_bytes(config.get_timing_cache().serialize())
            written.replace(cache)
        except OSError as error:
            raise PlanError(f"the timing cache {cache} cannot be written: {error.strerror}") from None
        finally:
            written.unlink(missing_ok=True)

    def provenance(self, trt: Any) -> dict[str, Any]:
        gpu, level = gpu_here(), self.hardware_compatibility
        return {
            "builder": f"tensorrt {trt.__version__}",
            "version_compatible": self.version_compatible,
            "devices": ("sm_80+",) if level == "ampere_plus" else (gpu.architecture,),
            "gpu": gpu.name if level == "none" else None,
        }


@dataclass(frozen=True)
class Gpu:
    """The GPU of this machine: its name, and its compute capability, such as sm_90."""

    name: str
    architecture: str


def import_library(package: str, title: str, extra: str) -> Any:
    """Import the library's package. Raises `PlanError` where the package is missing."""
    try:
        return importlib.import_module(package)
    except (ImportError, OSError) as error:  # the second where a library of its own is missing
        raise PlanError(
            f"the backend {extra} needs {title}, which cannot be loaded ({error}); "
            f"{install(extra)}, or leave the backend out"
        ) from None


def load_tensorrt() -> Any:
    """Import the package `tensorrt`. Raises `PlanError` where the package is missing or too old."""
    trt = import_library("tensorrt", "TensorRT", "tensorrt")
    if tuple(int(part) for part in trt.__version__.split(".")[:2]) < OLDEST:
        raise PlanError(
            f"the backend tensorrt needs TensorRT {'.'.join(map(str, OLDEST))} or later, and {trt.__version__} is "
            f"here; {install('tensorrt', upgrade=True)}, or leave the backend out"
        )
    return trt


def gpu_here() -> Gpu:
    """Return the GPU that engines would be built for. Raises `PlanError` where there is no usable GPU."""
    try:
        from cuda.core import Device

        device = Device()
        major, minor = device.compute_capability
        return Gpu(str(device.name), f"sm_{major}{minor}")
    except Exception as error:  # the package may be missing, its loader may find no driver, and the driver may fail
        raise PlanError(
            "the backend tensorrt is built on the GPU that is to run it, and here is none that can be used "
            f"({' '.join(str(error).split())}); build there, or leave the backend out"
        ) from None


BACKEND = TensorRtBackend
