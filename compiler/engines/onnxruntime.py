"""Engines for ONNX Runtime: one `.onnx` file each; all engines of a backend share one file of large weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import onnx_ir as ir

from outrider.compiler.engines.onnx_file import WeightFile, describe_engine, write_graph
from outrider.plans.manifest import Engine
from outrider.plans.onnx_operators import check_operators


class OnnxRuntimeEngines:
    """Writes the engines of one backend into `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._weights = WeightFile(folder)

    def takes_ops(self, model: ir.Model) -> bool:
        return False

    def write(self, name: str, model: ir.Model, limits: Mapping[str, int]) -> Engine:
        """Write the engine. Its shapes may be of any size, so that the `limits` of symbols matter to sessions only."""
        path = self._folder / f"{name}.onnx"
        engine = describe_engine(model, f"engines/{self._folder.name}/{path.name}")
        write_graph(model, path, self._weights)
        check_operators(path)
        return engine

    def close(self) -> None:
        self._weights.close()
