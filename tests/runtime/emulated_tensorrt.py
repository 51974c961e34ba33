"""Engines of the target `tensorrt` without TensorRT: their graphs, as its parser would get them, on the CPU.

Standard ops are ONNX's reference, plugins their own kernels, launched as an engine launches them (`StandIn`): float64
and uint64 as int64, sizes from shapes, attributes baked in.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from outrider.compiler.engines.onnx_file import WeightFile, describe_engine, write_graph
from outrider.compiler.engines.tensorrt_network import carry_bits
from outrider.plans.buffers import Tensor
from outrider.plans.manifest import Engine
from outrider.plugins.tensorrt.table import DISTINCT
from outrider.runtime.backends.base import BoundEngine, LoadedEngine
from outrider.runtime.backends.device import DeviceBuffers, OnDevice
from outrider.runtime.backends.tensorrt_context import shape_of
from outrider.runtime.execution.buffers import Buffers
from tests.plugins.tensorrt_stand_in import StandIn, carried
from tests.runtime.emulated_device import EmulatedDevice


class GraphsInPlaceOfEngines:
    """Writes what TensorRT would be given: lowered graphs with plugins, functions inlined, bits carried.

    Ops around engines are taken into all of them, or, as with a front end that reads targets, into drafters' alone.
    """

    def __init__(self, folder: Path, *, targets_alone: bool = False) -> None:
        self._folder, self._weights, self._targets_alone = folder, WeightFile(folder), targets_alone

    def takes_ops(self, model: ir.Model) -> bool:
        return not self._targets_alone or any(node.op_type == "TreeExpand" for node in model.graph)

    def write(self, name: str, model: ir.Model, limits: Mapping[str, int]) -> Engine:
        path = self._folder / f"{name}.engine"
        engine = describe_engine(model, f"engines/{self._folder.name}/{path.name}")
        carry_bits(name, model)
        write_graph(model, path, self._weights, inlined=True)
        return engine

    def close(self) -> None:
        self._weights.close()


class EmulatedTensorRt(OnDevice):
    """A backend; `ran` counts engines by file name."""

    def __init__(self, device: EmulatedDevice, plugins: StandIn, *, records: bool = False) -> None:
        super().__init__(device, records=records)
        self._ops = [_op(plugin, plugins) for plugin in DISTINCT]
        self.ran: dict[str, int] = {}

    def load(self, path: Path, engine: Engine) -> LoadedEngine:
        model = onnx.load_from_string(path.read_bytes())
        onnx.load_external_data_for_model(model, str(path.parent))
        return _Loaded(self, path.stem, ReferenceEvaluator(model, new_ops=self._ops), engine)

    def enqueue(self, name: str, work: Any) -> None:
        def run() -> None:
            self.ran[name] = self.ran.get(name, 0) + 1
            work()

        self.device.enqueue(run)


class _Loaded:
    def __init__(self, backend: EmulatedTensorRt, name: str, evaluator: ReferenceEvaluator, engine: Engine) -> None:
        self._backend, self._name, self._evaluator, self._engine = backend, name, evaluator, engine

    def bind(self, buffers: Buffers, bound: dict[str, str]) -> BoundEngine:
        assert isinstance(buffers, DeviceBuffers)
        addresses = {tensor: buffers.memory[buffer].address for tensor, buffer in bound.items()}
        evaluator, engine = self._evaluator, self._engine

        def at(tensor: Tensor, sizes: list[int]) -> NDArray[Any]:
            """The tensor's memory; bits that TensorRT carries as int64 are int64 here too."""
            dtype = np.dtype(tensor.dtype.numpy)
            dtype = np.dtype(np.int64) if dtype in (np.dtype(np.float64), np.dtype(np.uint64)) else dtype
            shape = shape_of(tensor.shape, sizes)
            memory = (ctypes.c_uint8 * (prod(shape) * dtype.itemsize)).from_address(addresses[tensor.name])
            return np.frombuffer(memory, dtype).reshape(shape)

        def run(sizes: list[int]) -> None:
            given = {tensor.name: at(tensor, sizes) for tensor in engine.inputs}
            made = evaluator.run(None, given)
            for tensor, value in zip(engine.outputs, made, strict=True):
                place = at(tensor, sizes)
                assert (value.shape, value.dtype.itemsize) == (place.shape, place.dtype.itemsize), tensor.name
                place[...] = value.view(place.dtype)

        def enqueue(sizes: list[int]) -> None:
            now = sizes.copy()
            self._backend.enqueue(self._name, lambda: run(now))

        return enqueue


def _op(plugin: Any, plugins: StandIn) -> type[OpRun]:
    class Run(OpRun):
        op_domain = "outrider"

        def _run(self, *inputs: NDArray[Any], **attributes: Any) -> tuple[NDArray[Any], ...]:
            assert (attributes["plugin_namespace"], attributes["plugin_version"]) == ("outrider", "1")
            tensors = {
                spec.name: np.ascontiguousarray(value) for spec, value in zip(plugin.inputs, inputs, strict=True)
            }
            made = plugins.run(plugin, tensors, {name: attributes[name] for name in plugin.attributes})
            return tuple(carried(made[spec.name]) for spec in plugin.outputs)

    Run.__name__ = plugin.name
    return Run
