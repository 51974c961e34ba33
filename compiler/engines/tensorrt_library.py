"""TensorRT and TensorRT for RTX after one interface; both build engines, with differences in configuration."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from outrider.compiler.recipe_backends import TensorRtRtxSection, TensorRtSection
from outrider.plans.errors import PlanError
from outrider.plans.extras import install
from outrider.plugins.tensorrt.registration import register_plugins

OLDEST = (10, 15)  # the first version of TensorRT with cache updates in place


class Library(Protocol):
    """One of the two libraries, configured as the recipe says."""

    trt: Any
    """The library's Python package."""

    plugins: bool
    """Whether engines of this library can hold our ops."""

    @property
    def workspace_mb(self) -> int: ...

    def configure(self, config: Any) -> None:
        """Complete the configuration of a build. Raises `PlanError`."""

    def keep(self, config: Any) -> None:
        """Keep the kernel times that the build measured. Raises `PlanError`."""

    def provenance(self) -> dict[str, Any]:
        """Return the fields of `plans.manifest.Engine` about the builder of an engine and its devices."""


class RtxLibrary:
    """TensorRT for RTX: builds engines for every GPU of the recipe on a machine without a GPU."""

    plugins = False

    def __init__(self, backend: TensorRtRtxSection) -> None:
        self._backend, self.workspace_mb = backend, backend.workspace_mb
        self.trt = load("tensorrt_rtx", "TensorRT for RTX", "tensorrt-rtx")

    def configure(self, config: Any) -> None:
        trt, capabilities = self.trt, self._backend.compute_capabilities
        config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)  # otherwise a step cannot be captured in a CUDA graph
        config.num_compute_capabilities = len(capabilities)
        for index, capability in enumerate(capabilities):
            config.set_compute_capability(trt.ComputeCapability.__members__[capability.replace("_", "").upper()], index)

    def keep(self, config: Any) -> None:
        """Nothing to keep: the library times no kernels, because engines are finished where they run."""

    def provenance(self) -> dict[str, Any]:
        return {"builder": f"tensorrt_rtx {self.trt.__version__}", "devices": self._backend.compute_capabilities}


@dataclass(frozen=True)
class Gpu:
    """The GPU of this machine: its name, and its compute capability, such as sm_90."""

    name: str
    architecture: str


class TensorRtLibrary:
    """TensorRT: engines with our ops inside as plugins, timed on the GPU of this machine, for GPUs like it.

    `timing_cache` is a file of kernel times. Plans hold no host code, so the lean runtime that TensorRT would put into
    a version-compatible engine is excluded.
    """

    plugins = True

    def __init__(self, backend: TensorRtSection, timing_cache: Path | None) -> None:
        self._backend, self._path, self.workspace_mb = backend, timing_cache, backend.workspace_mb
        self.trt = load_tensorrt()
        self._gpu = gpu_here()
        try:
            register_plugins()
        except ImportError as error:
            raise PlanError(f"the backend tensorrt cannot be built: {error}") from None

    def configure(self, config: Any) -> None:
        trt, backend = self.trt, self._backend
        if backend.version_compatible:
            config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
            config.set_flag(trt.BuilderFlag.EXCLUDE_LEAN_RUNTIME)
        levels = trt.HardwareCompatibilityLevel.__members__
        config.hardware_compatibility_level = levels[backend.hardware_compatibility.upper()]
        if self._path is not None:
            try:
                known = self._path.read_bytes() if self._path.exists() else b""
            except OSError as error:
                raise PlanError(f"the timing cache {self._path} cannot be read: {error.strerror}") from None
            cache = config.create_timing_cache(known)
            if cache is None or not config.set_timing_cache(cache, False):
                raise PlanError(
                    f"the timing cache {self._path} is none of tensorrt {trt.__version__} on this GPU, "
                    f"{self._gpu.name}; remove it, or name another"
                )

    def keep(self, config: Any) -> None:
        if self._path is None:
            return
        written = self._path.with_name(f".{self._path.name}.writing-{os.getpid()}")
        try:
            written.write_bytes(config.get_timing_cache().serialize())
            written.replace(self._path)
        except OSError as error:
            raise PlanError(f"the timing cache {self._path} cannot be written: {error.strerror}") from None
        finally:
            written.unlink(missing_ok=True)

    def provenance(self) -> dict[str, Any]:
        level = self._backend.hardware_compatibility
        return {
            "builder": f"tensorrt {self.trt.__version__}",
            "version_compatible": self._backend.version_compatible,
            "devices": ("sm_80+",) if level == "ampere_plus" else (self._gpu.architecture,),
            "gpu": self._gpu.name if level == "none" else None,
        }


def load(package: str, title: str, extra: str) -> Any:
    """Import the library's package. Raises `PlanError` where the package is missing."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise PlanError(
            f"the backend {extra} needs {title}, which cannot be loaded ({error}); "
            f"{install(extra)}, or leave the backend out"
        ) from None


def load_tensorrt() -> Any:
    """Import the package `tensorrt`. Raises `PlanError` where the package is missing or too old."""
    trt = load("tensorrt", "TensorRT", "tensorrt")
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
