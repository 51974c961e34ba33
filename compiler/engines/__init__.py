"""Write the engine files that a backend loads: one class per builder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import onnx_ir as ir

from outrider.compiler.engines.onnxruntime import OnnxRuntimeEngines
from outrider.compiler.models.config import WeightType
from outrider.compiler.recipe_backends import (
    BackendBuild,
    CudaSection,
    OnnxRuntimeCpuSection,
    TensorRtRtxSection,
    TensorRtSection,
)
from outrider.plans.manifest import Engine


class EngineFolder(Protocol):
    """A writer of one backend's engines into a folder of the plan."""

    def takes_ops(self, model: ir.Model) -> bool:
        """Return whether the engine of an exported graph may hold the ops around it."""

    def write(self, name: str, model: ir.Model, limits: Mapping[str, int]) -> Engine:
        """Write the engine `name` of a lowered graph whose symbols go up to `limits`.

        Raises `PlanError`, with the library's own words, where the engine cannot be built.
        """

    def close(self) -> None:
        """Finish the folder; called once, after the last engine or the first that failed."""


def open_folder(
    backend: BackendBuild,
    folder: Path,
    report: Callable[[str], None],
    timing_cache: Path | None = None,
    dtype: WeightType = "float32",
) -> EngineFolder:
    """Return the writer for a backend, which may `report` phases of long work. Raises `PlanError` where the backend's
    library is missing.

    `timing_cache` is a file of kernel times, for builders that time kernels; `dtype` is the type of the weights, which
    other graphs than those of our own kernels are of already.
    """
    # Imported here because builders' libraries are large and optional.
    if isinstance(backend, TensorRtSection):
        from outrider.compiler.engines.tensorrt import TensorRtEngines
        from outrider.compiler.engines.tensorrt_library import TensorRtLibrary

        return TensorRtEngines(folder, TensorRtLibrary(backend, timing_cache), report, _front_end(backend))
    if isinstance(backend, TensorRtRtxSection):
        from outrider.compiler.engines.tensorrt import TensorRtEngines
        from outrider.compiler.engines.tensorrt_library import RtxLibrary

        return TensorRtEngines(folder, RtxLibrary(backend), report, _front_end(backend))
    if isinstance(backend, CudaSection):
        from outrider.compiler.engines.cuda import CudaEngines

        return CudaEngines(folder, dtype)
    return OnnxRuntimeEngines(folder)


def _front_end(backend: TensorRtSection | TensorRtRtxSection) -> Callable[[Any, Any], Any] | None:
    if backend.frontend == "onnx":
        return None
    from outrider.compiler.engines.torch_front import TorchFront

    return TorchFront


def facts_of_machine(backend: BackendBuild) -> dict[str, str]:
    """Return facts of this machine that shape a backend's engines. Raises `PlanError` where it cannot build them."""
    facts = {}
    if isinstance(backend, TensorRtSection | TensorRtRtxSection) and backend.frontend == "torch-tensorrt":
        from outrider.compiler.engines.torch_tensorrt import installed_version

        library = "tensorrt" if isinstance(backend, TensorRtSection) else "tensorrt_rtx"
        facts[f"{backend.kind} frontend"] = installed_version(library)
    if isinstance(backend, TensorRtSection):
        from outrider.compiler.engines.tensorrt_library import gpu_here, load_tensorrt

        load_tensorrt()
        gpu = gpu_here()
        facts["gpu"] = f"{gpu.name}, {gpu.architecture}"
    return facts


def kernel_architectures(backend: BackendBuild) -> tuple[str, ...]:
    """Return the GPUs that ops beside a backend's engines are compiled for; TensorRT adds this machine's GPU."""
    if isinstance(backend, OnnxRuntimeCpuSection):
        return ()
    if isinstance(backend, TensorRtSection):
        from outrider.compiler.engines.tensorrt_library import gpu_here

        return tuple(dict.fromkeys((*backend.compute_capabilities, gpu_here().architecture)))
    return backend.compute_capabilities
