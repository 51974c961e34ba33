"""Writing what an execution target loads: a class for each builder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import onnx_ir as ir

from compiler.engines.onnxruntime import OnnxRuntimeEngines
from compiler.engines.report import Report
from compiler.recipe_targets import TargetBuild, TensorRtRtxSection
from plans.manifest import Engine


class EngineFolder(Protocol):
    """The engines of one execution target on their way into a folder of the plan."""

    def write(self, name: str, model: ir.Model, limits: Mapping[str, int]) -> Engine:
        """Write the engine `name` of a lowered graph, whose symbols go up to `limits`.

        Raises `PlanError`, with the library's own words, where it cannot be built.
        """

    def close(self) -> None:
        """Called once, behind the last engine."""


def open_folder(target: TargetBuild, folder: Path, report: Report) -> EngineFolder:
    """The writer for an execution target. Raises `PlanError` where its library is missing."""
    if not isinstance(target, TensorRtRtxSection):
        return OnnxRuntimeEngines(folder)
    from compiler.engines.tensorrt import TensorRtEngines  # its library is large, and an extra

    return TensorRtEngines(folder, target, report)
