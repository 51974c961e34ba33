"""A stand-in for TensorRT, for machines without it.

It asks plugins what TensorRT's builder asks, in the same order, checks of their functions what TensorRT checks (names
and annotations of parameters and results), and launches as engines do: inputs, 32-bit integers, outputs. Kernels run as
blocks of fibers on the CPU.
"""

from __future__ import annotations

import ctypes
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.plugins.cuda.launches import STATUS
from outrider.plugins.ops import OPS
from outrider.plugins.schema import Purpose, TensorSpec
from outrider.plugins.tensorrt.plugin import Plugin
from outrider.plugins.tensorrt.registration import register
from outrider.plugins.tensorrt.source import shells
from outrider.plugins.tensorrt.table import DISTINCT, PLUGINS
from tests.plugins.emulator import Emulator, compile_emulator

SIZES = {
    "capacity": 90, "R": 2, "E": 3, "N": 7, "S": 5, "T": 40, "M": 4, "V": 11, "B": 3, "trees": 3, "depths": 6,
    "planes": 4, "heads": 2, "slot_size": 24, "frontier": 2, "top_k": 4, "candidates": 8, "nodes": 6, "nodes - 1": 5,
    "shares": 1,
}  # fmt: skip
_POISON = 0xA5
_MARGIN = 64  # poisoned bytes before and after an output

_KERNELS = """\
#include "kernels.cu"
#include "parts.cu.h"
#define OUTRIDER_PLUGIN extern "C" void
#pragma GCC diagnostic ignored "-Wunused-parameter"
"""


@dataclass(frozen=True)
class DataType:
    name: str
    itemsize: int


class Dimension:
    """Of a shape; its number is None while types alone are asked for. It can be multiplied, and nothing else."""

    def __init__(self, number: int | Dimension | None = None) -> None:
        self.number: int | None = number.number if isinstance(number, Dimension) else number

    def __mul__(self, other: int | Dimension) -> Dimension:
        ours, theirs = self.number, Dimension(other).number
        return Dimension(None if ours is None or theirs is None else ours * theirs)


class Int32(Dimension):
    """An argument of a kernel."""


def _ceil_quotient(dividend: Dimension, divisor: int) -> Dimension:
    return Dimension(None if dividend.number is None else -(-dividend.number // divisor))


@dataclass
class TensorDesc:
    shape_expr: list[Dimension]
    dtype: DataType
    shape: tuple[int, ...] = ()
    alias: TensorDesc | None = None

    def aliased(self) -> TensorDesc:
        return TensorDesc(self.shape_expr, self.dtype, self.shape, self)


def _from_shape_expr(shape: tuple[int | Dimension, ...], dtype: DataType) -> TensorDesc:
    assert isinstance(shape, tuple)
    return TensorDesc([Dimension(dim) for dim in shape], dtype)


@dataclass
class KernelLaunchParams:
    grid_x: int | Dimension
    block_x: int | Dimension


class SymIntExprs(list[Any]):
    def __init__(self, length: int) -> None:
        super().__init__([None] * length)


@dataclass(frozen=True)
class Layer:
    """A plugin as an engine keeps it, for inputs of these shapes."""

    kernel: str
    blocks: int
    threads: int
    arguments: tuple[int, ...]
    inputs: list[TensorDesc]
    outputs: list[TensorDesc]


def compile_shells(library: Path) -> None:
    """Compile the plugins' kernels for the CPU, into the shared library `library`."""
    compile_emulator(library, _KERNELS + shells(DISTINCT))


@dataclass
class StandIn:
    """Every plugin, registered; `run` builds and runs an engine of one."""

    kernels: Emulator | None = None
    described: dict[str, Callable[..., Any]] = field(default_factory=dict)
    implemented: dict[str, Callable[..., Any]] = field(default_factory=dict)

    @classmethod
    def load(cls, library: Path) -> StandIn:
        """With the plugins' kernels that `compile_shells` has compiled."""
        return cls(Emulator(library))

    def __post_init__(self) -> None:
        sizes = {"int32": 4, "int64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
        self.trt = SimpleNamespace(**{name: DataType(name, size) for name, size in sizes.items()})
        self.trtp = SimpleNamespace(
            TensorDesc=TensorDesc, ShapeExpr=Dimension, SymInt32=Int32, SymIntExprs=SymIntExprs,
            KernelLaunchParams=KernelLaunchParams, cdiv=_ceil_quotient, from_shape_expr=_from_shape_expr,
            register=self._register, aot_impl=self._aot_impl,
        )  # fmt: skip
        for plugin in DISTINCT:
            register(plugin, self.trt, self.trtp)

    def _register(self, plugin_id: str) -> Callable[[Callable[..., Any]], None]:
        def keep(function: Callable[..., Any]) -> None:
            signature = inspect.signature(function)
            kinds = [parameter.annotation for parameter in signature.parameters.values()]
            assert set(kinds) <= {TensorDesc, int, float}
            assert kinds == sorted(kinds, key=lambda kind: kind is not TensorDesc), "tensors come first"
            assert typing.get_origin(signature.return_annotation) is tuple
            assert set(typing.get_args(signature.return_annotation)) == {TensorDesc}
            self.described[plugin_id] = function

        return keep

    def _aot_impl(self, plugin_id: str) -> Callable[[Callable[..., Any]], None]:
        def keep(function: Callable[..., Any]) -> None:
            signature = inspect.signature(function)
            registered = inspect.signature(self.described[plugin_id])
            assert [*signature.parameters] == [*registered.parameters, "outputs", "tactic"]
            assert signature.parameters["outputs"].annotation == registered.return_annotation
            assert typing.get_args(signature.return_annotation) == (str, str, KernelLaunchParams, SymIntExprs)
            self.implemented[plugin_id] = function

        return keep

    def describe(self, plugin: Plugin, inputs: Sequence[NDArray[Any]], attributes: Mapping[str, int | float]) -> Any:
        """Descriptors of the inputs and of the outputs: types are asked for first, then shapes."""
        dtypes = [getattr(self.trt, carried(array).dtype.name) for array in inputs]
        unknown = [TensorDesc([Dimension() for _ in a.shape], t) for a, t in zip(inputs, dtypes, strict=True)]
        known = [TensorDesc([Dimension(n) for n in a.shape], t, a.shape) for a, t in zip(inputs, dtypes, strict=True)]
        typed = self.described[plugin.id](*unknown, **attributes)
        outputs = self.described[plugin.id](*known, **attributes)
        assert [output.dtype for output in typed] == [output.dtype for output in outputs]
        return known, outputs

    def build(self, plugin: Plugin, inputs: Sequence[NDArray[Any]], attributes: Mapping[str, int | float]) -> Layer:
        known, outputs = self.describe(plugin, inputs, attributes)
        kernel, _, launch, arguments = self.implemented[plugin.id](*known, *attributes.values(), outputs, 0)
        assert all(type(argument) is Int32 for argument in arguments)
        blocks, threads = Dimension(launch.grid_x).number, Dimension(launch.block_x).number
        assert blocks is not None
        assert threads is not None
        return Layer(kernel, blocks, threads, tuple(argument.number for argument in arguments), known, outputs)

    def run(
        self, plugin: Plugin, tensors: Mapping[str, NDArray[Any]], attributes: Mapping[str, int | float]
    ) -> dict[str, NDArray[Any]]:
        """Runs `plugin` on the tensors by name and gives its outputs by name, of the dtypes that the op knows."""
        inputs = [tensors[spec.name] for spec in plugin.inputs]
        layer = self.build(plugin, inputs, attributes)
        outputs, margins = {}, []
        for spec, output in zip(plugin.outputs, layer.outputs, strict=True):
            if output.alias is not None:
                outputs[spec.name] = inputs[next(i for i, known in enumerate(layer.inputs) if known is output.alias)]
                continue
            shape = tuple(dim.number for dim in output.shape_expr)
            size = int(np.prod(shape)) * output.dtype.itemsize
            memory = np.full(size + 2 * _MARGIN, _POISON, np.uint8)
            margins += [memory[:_MARGIN], memory[_MARGIN + size :]]
            outputs[spec.name] = memory[_MARGIN : _MARGIN + size].view(spec.dtype).reshape(shape)
        values: list[Any] = [ctypes.c_uint64(array.ctypes.data) for array in inputs]
        values += [ctypes.c_int32(number) for number in layer.arguments]
        values += [ctypes.c_uint64(array.ctypes.data) for array in outputs.values()]
        assert self.kernels is not None
        self.kernels.launch(layer.kernel, layer.blocks, min(layer.threads, 64), values)
        assert all((margin == _POISON).all() for margin in margins), f"{layer.kernel} writes beside its outputs"
        return outputs

    def create(
        self, op_name: str, tensors: Mapping[str, NDArray[Any]], attributes: Mapping[str, int | float] | None = None
    ) -> Callable[..., int]:
        """The op as its plugins, one after another, bound as by the emulator; it returns a fault's number or 0."""
        schema, plugins = OPS[op_name].schema, PLUGINS[op_name]
        assert isinstance(plugins, tuple)
        given = {spec.name: spec.default for spec in schema.attributes} | dict(attributes or {})
        lengths = {}
        if op_name == "BimMask":
            lengths = dict(zip(("places", "view"), tensors["attn_bias"].shape[2:], strict=True))
        elif "accepted_count" in tensors:
            lengths = {"slots": len(tensors["seed"])}
        elif op_name == "RaceNoise":
            given |= dict(zip(("depths", "V"), tensors["noise"].shape[1:], strict=True))

        def call(*_: int) -> int:
            pool = {**tensors, **{name: np.zeros(length, np.int64) for name, length in lengths.items()}}
            for plugin in plugins:
                pool |= self.run(plugin, pool, {name: given[name] for name in plugin.attributes})
            for spec in schema.outputs:
                to, found = tensors[spec.name], pool[spec.name]
                if spec.name == "accepted_count":  # one for each branch
                    to, to[len(found) :] = to[: len(found)], 0
                written = (np.ascontiguousarray(found)[..., None].view(np.uint8) != _POISON).any(-1)
                to[written] = found[written]
            return int(max(pool.get(STATUS, np.zeros(1))))

        return call


def carried(array: NDArray[Any]) -> NDArray[Any]:
    """The array as an engine knows it: of the same memory."""
    return array.view(np.int64) if array.dtype in (np.float64, np.uint64) else array


def poisoned(array: NDArray[Any]) -> bool:
    """Whether nothing was ever written to an output."""
    return bool((np.ascontiguousarray(array).view(np.uint8) == _POISON).all())


def tensors_of(
    specs: Iterable[TensorSpec], make: Callable[[tuple[int, ...], str], NDArray[Any]] = np.zeros
) -> dict[str, NDArray[Any]]:
    """A tensor for each spec, by name: of the sizes above and of the first dtype that it may have."""
    made = {}
    for spec in specs:
        shape = tuple(SIZES[dim] if isinstance(dim, str) else dim for dim in spec.shape)
        made[spec.name] = make(shape, spec.dtype.split(" | ")[0])
    return made


def attributes_of(plugin: Plugin) -> dict[str, int | float]:
    given = {"purpose": int(Purpose.DRAFT), "doubt": 0.3}
    given |= {name: SIZES[name] for name in ("depths", "V", "top_k", "nodes")}
    return {name: given[name] for name in plugin.attributes}
