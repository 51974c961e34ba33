"""Modules without weights, for graphs that read them from the checkpoint as they are written, one at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import TorchTensor
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from outrider.compiler.models.config import WeightType
from outrider.compiler.slots import TORCH_TYPES, Slot, read_finite, read_parameter
from outrider.compiler.tensor_source import TensorSource

_TYPES: dict[WeightType, ir.DataType] = {
    "float32": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
}
_MODE = FakeTensorMode()  # one for all: a head's graph has parameters of the target
_MARK = "outrider_stored"


class StoredTensor(ir.LazyTensor):
    """A parameter as a tensor of a graph, read anew each time that its values are asked for."""

    def __init__(self, tensors: TensorSource, stored_name: str, slot: Slot, dtype: WeightType) -> None:
        self.tensors, self.stored_name = tensors, stored_name
        self._slot, self._weight_type = slot, dtype
        super().__init__(lambda: TorchTensor(self.read()), _TYPES[dtype], ir.Shape(slot.filled))

    @property
    def origin(self) -> str:
        """The tensor's file and name, for messages."""
        return f"{self.tensors.found[self.stored_name].file}: tensor {self.stored_name!r}"

    def read(self) -> Tensor:
        """Read the parameter in its type and layout. Raises `CheckpointError` unless all values are finite."""
        return read_parameter(self.tensors, self.stored_name, self._slot, self._weight_type)

    def as_stored(self, values: Tensor) -> Tensor:
        """Return `values` of the parameter as the checkpoint would store them: `read` would give them back."""
        return (values.T if self._slot.transposed else values) - self._slot.offset

    def read_stored(self) -> Tensor:
        """Read the tensor in the checkpoint's type and layout. Raises `CheckpointError` unless all are finite."""
        return read_finite(self.tensors, self.stored_name)


class StackedTensor(ir.LazyTensor):
    """A stacked parameter, each part of which the checkpoint stores by itself."""

    def __init__(self, parts: Sequence[StoredTensor]) -> None:
        self.parts = tuple(parts)
        first = self.parts[0]
        shape = ir.Shape([len(self.parts), *first.shape.numpy()])
        super().__init__(lambda: TorchTensor(self.read()), first.dtype, shape)

    def read(self) -> Tensor:
        """Read all parts, one at a time. Raises `CheckpointError` unless all values are finite."""
        stacked: Tensor | None = None
        for index, part in enumerate(self.parts):
            values = part.read()
            if stacked is None:
                stacked = values.new_empty((len(self.parts), *values.shape))
            stacked[index] = values
        assert stacked is not None
        return stacked


Deferred = StoredTensor | StackedTensor
"""A parameter that is read when a graph is written."""


def defer(module: nn.Module, tensors: TensorSource, wanted: Mapping[str, Slot], dtype: WeightType) -> None:
    """Give `module` parameters of `dtype` that have shapes and no values, each bound to its stored tensor."""
    parts: dict[str, list[StoredTensor]] = {}
    stacked: set[str] = set()
    for name, slot in wanted.items():
        parts.setdefault(slot.parameter, []).append(StoredTensor(tensors, name, slot, dtype))
        if slot.place is not None:
            assert slot.place == len(parts[slot.parameter]) - 1, "parts come in ascending order"
            stacked.add(slot.parameter)
    parameters = {}
    for parameter, own in parts.items():
        stored = StackedTensor(own) if parameter in stacked else own[0]
        with _MODE:
            values = torch.empty(stored.shape.numpy(), dtype=TORCH_TYPES[dtype])
        parameters[parameter] = nn.Parameter(values, requires_grad=False)
        setattr(parameters[parameter], _MARK, stored)
    module.load_state_dict(parameters, strict=False, assign=True)


def rebind(module: nn.Module, tensors: TensorSource) -> None:
    """Let the deferred parameters of `module` be read from `tensors`, under the same names."""
    for stored in deferred(module).values():
        for part in parts_of(stored):
            part.tensors = tensors


def deferred(module: nn.Module) -> dict[str, Deferred]:
    """Return the stored tensors of all parameters of `module` that have no values, by every name of each."""
    named = module.named_parameters(remove_duplicate=False)
    return {name: stored for name, parameter in named if (stored := stored_of(parameter)) is not None}


def stored_of(parameter: Tensor) -> Deferred | None:
    """Return the stored tensor of a parameter that `defer` gave; None for any other."""
    return getattr(parameter, _MARK, None)


def parts_of(stored: Deferred) -> tuple[StoredTensor, ...]:
    """Return the tensors of the checkpoint that make a parameter: itself, or those of a stacked one in order."""
    return stored.parts if isinstance(stored, StackedTensor) else (stored,)
