"""Engines for our own kernels: a list of launches each, `plans.kernel_engine`; all share one file of weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from outrider.compiler.engines.onnx_file import WeightFile, describe_engine
from outrider.compiler.kernels import HANDLERS
from outrider.compiler.kernels.emitter import Emitter
from outrider.compiler.models.config import WeightType
from outrider.plans.errors import PlanError
from outrider.plans.kernel_engine import KernelEngine, problems
from outrider.plans.manifest import Engine
from outrider.plugins.cuda.engine_kernels import ENGINE_KERNELS, PARAMETERS

_LOG = logging.getLogger("outrider")
_FLOATS = ENGINE_KERNELS["outrider_product"]
MOST_FLOATS = 500 * 10**6
"""Bytes of weights of products in float32 from which on a build warns of them."""


class _Weights:
    """The file of weights, as an emitter fills it."""

    def __init__(self, file: WeightFile) -> None:
        self._file, self.name = file, file.path.name

    def place(self, size: int, read: Callable[[], NDArray[np.generic]]) -> int:
        data = np.ascontiguousarray(read()).reshape(-1).view(np.uint8)
        assert data.nbytes == size
        return self._file.add(data.data)


class CudaEngines:
    """Writes the engines of the backend into `folder`; the weights of products and look-ups are of type `dtype`."""

    def __init__(self, folder: Path, dtype: WeightType) -> None:
        self._folder, self._dtype = folder, dtype
        self._weights = WeightFile(folder)

    def takes_ops(self, model: ir.Model) -> bool:
        return False

    def write(self, name: str, model: ir.Model, limits: Mapping[str, int]) -> Engine:
        """Write the engine. Raises `PlanError` for an operator that has no kernel."""
        content = Emitter(name, model.graph, limits, _Weights(self._weights), HANDLERS, self._dtype).emit()
        path = self._folder / f"{name}.json"
        engine = describe_engine(model, f"engines/{self._folder.name}/{path.name}")
        bound = {tensor.name for tensor in (*engine.inputs, *engine.outputs)}
        for problem in problems(content, bound, limits, self._weights.size, PARAMETERS):
            raise PlanError(f"the engine {name!r} for the backend cuda: {problem}")
        if (size := _float_bytes(content)) > MOST_FLOATS:
            _LOG.warning(
                "the engine %r for the backend cuda multiplies by %d MB of weights in float32, which is for tests and "
                "small models: set dtype of the backend to bfloat16, or quantise the weights",
                name,
                size // 10**6,
            )
        path.write_text(content.model_dump_json(indent=1, exclude_defaults=True), encoding="utf-8")
        return engine

    def close(self) -> None:
        self._weights.close()


def _float_bytes(content: KernelEngine) -> int:
    """Return the bytes of the weights that stay in float32 and are multiplied by."""
    place = _FLOATS.tensors.index("weight")
    weights = {launch.tensors[place] for launch, _ in content.launches() if launch.kernel == _FLOATS.name}
    return sum(content.constants[name].size for name in weights if name in content.constants)
