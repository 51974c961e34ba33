"""Writing what an execution target loads: a class for each builder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import onnx_ir as ir

from compiler.engines.front_end import FrontEnd
from compiler.engines.onnxruntime import OnnxRuntimeEngines
from compiler.engines.report import Report
from compiler.recipe_targets import OnnxRuntimeCpuSection, TargetBuild, TensorRtRtxSection, TensorRtSection
from plans.manifest import Engine


class EngineFolder(Protocol):
    """The engines of one execution target on their way into a folder of the plan."""

    def takes_ops(self, model: ir.Model) -> bool:
        """Whether the engine of an exported graph may have the ops around it inside."""

    def write(self, name: str, model: ir.Model, limits: Mapping[str, int]) -> Engine:
        """Write the engine `name` of a lowered graph, whose symbols go up to `limits`.

        Raises `PlanError`, with the library's own words, where it cannot be built.
        """

    def close(self) -> None:
        """Called once, behind the last engine."""


def open_folder(target: TargetBuild, folder: Path, report: Report, timing_cache: Path | None = None) -> EngineFolder:
    """The writer for an execution target. Raises `PlanError` where its library is missing.

    `timing_cache` is a file of how long kernels took, for those that time them.
    """
    # Libraries of builders are large, and extras.
    if isinstance(target, TensorRtSection):
        from compiler.engines.tensorrt import TensorRtEngines
        from compiler.engines.tensorrt_library import TensorRtLibrary

        return TensorRtEngines(folder, TensorRtLibrary(target, timing_cache), report, _front_end(target))
    if isinstance(target, TensorRtRtxSection):
        from compiler.engines.tensorrt import TensorRtEngines
        from compiler.engines.tensorrt_library import RtxLibrary

        return TensorRtEngines(folder, RtxLibrary(target), report, _front_end(target))
    return OnnxRuntimeEngines(folder)


def _front_end(target: TensorRtSection | TensorRtRtxSection) -> Callable[[Any, Any], FrontEnd] | None:
    if target.frontend == "onnx":
        return None
    from compiler.engines.torch_front import TorchFront

    return TorchFront


def facts_of_machine(target: TargetBuild) -> dict[str, str]:
    """What of this machine is in a target's engines. Raises `PlanError` where they cannot be built here."""
    facts = {}
    if isinstance(target, TensorRtSection | TensorRtRtxSection) and target.frontend == "torch-tensorrt":
        from compiler.engines.torch_tensorrt import installed_version

        library = "tensorrt" if isinstance(target, TensorRtSection) else "tensorrt_rtx"
        facts[f"{target.kind} frontend"] = installed_version(library)
    if isinstance(target, TensorRtSection):
        from compiler.engines.tensorrt_library import gpu_here, load_tensorrt

        load_tensorrt()
        gpu = gpu_here()
        facts["gpu"] = f"{gpu.name}, {gpu.architecture}"
    return facts


def kernel_architectures(target: TargetBuild) -> tuple[str, ...]:
    """The GPUs that ops beside a target's engines are compiled for: with TensorRT, this machine's is one."""
    if isinstance(target, OnnxRuntimeCpuSection):
        return ()
    if isinstance(target, TensorRtSection):
        from compiler.engines.tensorrt_library import gpu_here

        return tuple(dict.fromkeys((*target.compute_capabilities, gpu_here().architecture)))
    return target.compute_capabilities
