"""What the tests of graphs share: steps of several rows, and engines of ONNX Runtime on the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from outrider.compiler.engines.onnxruntime import OnnxRuntimeEngines
from outrider.plans.manifest import Engine
from tests.cpu_session import cpu_session

Arrays = dict[str, NDArray[Any]]


def flat(parents: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Parents within each row as parents in the step."""
    starts = np.cumsum([0, *(len(parent) for parent in parents[:-1])])
    return np.concatenate([np.where(p < 0, -1, p + start) for p, start in zip(parents, starts, strict=True)])


def depths(parents: Sequence[int] | NDArray[np.int64], first: int) -> list[int]:
    """Positions of the new tokens of a row whose roots are at `first`."""
    found: list[int] = []
    for parent in parents:
        found.append(first if parent < 0 else found[parent] + 1)
    return found


def write_engine(graph: ir.Model, folder: Path, name: str = "target") -> Engine:
    folder.mkdir(parents=True, exist_ok=True)
    engines = OnnxRuntimeEngines(folder)
    engine = engines.write(name, graph, {})
    engines.close()
    return engine


def run_engine(file: Path, feeds: Mapping[str, NDArray[Any]]) -> Arrays:
    """Outputs by name; `feeds` may have more than the graph's inputs."""
    session = cpu_session(file)
    known = {each.name for each in session.get_inputs()}
    outputs = [each.name for each in session.get_outputs()]
    return dict(zip(outputs, session.run(None, {n: v for n, v in feeds.items() if n in known}), strict=True))
