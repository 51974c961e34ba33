"""What a module asks of its checkpoint: every tensor is expected, found, and of the right shape and type.

All headers are checked before any weight is read, so that a bad checkpoint fails at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from outrider.compiler.models.config import WeightType
from outrider.compiler.models.quantization import refuse_quantized_tensors
from outrider.compiler.tensor_source import TensorSource
from outrider.plans.errors import CheckpointError

FLOATS = ("F64", "F32", "F16", "BF16")
"""The types in which weights may be stored, in safetensors' spelling."""

TORCH_TYPES: dict[WeightType, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
_DAMAGED = "the file is damaged"


EXPERT = "{e}"
"""Stands in the names of tensors that the checkpoint has for each expert, and that fill one parameter together."""


@dataclass(frozen=True)
class Slot:
    """The parameter that a tensor of the checkpoint fills; `shape` and `dtypes` are as the checkpoint may store it.

    `offset` is added to the stored numbers, in float32. Of a stacked parameter it fills `parameter[place]`, of
    `places`; None: all of it.
    """

    parameter: str
    shape: tuple[int, ...]
    transposed: bool = False
    dtypes: tuple[str, ...] = FLOATS
    offset: float = 0.0
    place: int | None = None
    places: int = 1

    @property
    def filled(self) -> tuple[int, ...]:
        """The shape of the parameter, or of its part."""
        return (self.shape[-1], self.shape[0]) if self.transposed else self.shape


def slots(module: nn.Module, stored_name: Callable[[str], str], norm_offset: float = 0.0) -> dict[str, Slot]:
    """Return every parameter's slot by its name in the checkpoint, which stores projections transposed, and the taps of
    a depthwise convolution with its one input channel between.

    Matrices are projections, except those called `embedding`, whose rows are looked up. Weights of norms are stored
    without `norm_offset`. A parameter whose name in the checkpoint has `EXPERT` in it is stacked: each part of it is a
    tensor of its own, named for its index.
    """
    wanted = {}
    for parameter, tensor in module.named_parameters():
        name = stored_name(parameter)
        part = tensor[0] if EXPERT in name else tensor
        transposed = part.ndim == 2 and parameter.rpartition(".")[2] != "embedding"
        is_norm = part.ndim == 1 and parameter.endswith("norm.weight")
        shape = tuple(part.T.shape) if transposed else tuple(part.shape)
        if parameter.endswith("taps.weight"):
            shape = shape[0], 1, shape[1]
        slot = Slot(parameter, shape, transposed, offset=norm_offset if is_norm else 0.0)
        if part is tensor:
            wanted[name] = slot
            continue
        for place in range(len(tensor)):
            wanted[name.replace(EXPERT, str(place))] = replace(slot, place=place, places=len(tensor))
    return wanted


def check_tensors(
    tensors: TensorSource,
    listing: Path,
    config: Path,
    kind: str,
    wanted: Mapping[str, Slot],
    optional: Mapping[str, Slot] | None = None,
    hints: Mapping[str, str] | None = None,
) -> None:
    """Raise `CheckpointError` unless the checkpoint has all `wanted` tensors, and no others but `optional` ones.

    Shapes and types must be the slots'. `kind` names the model that the tensors make, `config` the file that describes
    it, `listing` the file that lists the tensors; `hints` say, by tensor name, what to do if only that tensor is
    missing.
    """
    found, allowed = tensors.found, {**wanted, **(optional or {})}
    refuse_quantized_tensors(((name, stored.dtype) for name, stored in found.items()), listing)
    missing = [name for name in wanted if name not in found]
    unexpected = [name for name in found if name not in allowed]
    if missing:
        instead = f"; found instead {_some(unexpected)}" if unexpected else ""
        hint = (hints or {}).get(missing[0]) if len(missing) == 1 else None
        raise CheckpointError(
            f"{listing}: tensor {_some(missing)} is missing, expected of {kind} "
            f"with shape {list(wanted[missing[0]].shape)}{instead}; {hint or 'give a complete checkpoint'}"
        )
    if unexpected:
        raise CheckpointError(
            f"{found[unexpected[0]].file}: tensor {_some(unexpected)} is unexpected: {kind}, "
            f"as {config} describes it, has none of that name; give a checkpoint that is one"
        )
    for name, stored in found.items():
        slot = allowed[name]
        if stored.shape != slot.shape:
            raise CheckpointError(
                f"{stored.file}: tensor {name!r} has shape {list(stored.shape)}, "
                f"but {config} asks for {list(slot.shape)}; give files that belong together"
            )
        if stored.packed and slot.place is not None:
            raise CheckpointError(
                f"{stored.file}: tensor {name!r} is stored as {stored.dtype}, and experts are not read as integers; "
                "give the checkpoint that it was made from, in float32, float16 or bfloat16"
            )
        if stored.dtype not in slot.dtypes and not stored.packed:
            raise CheckpointError(
                f"{stored.file}: tensor {name!r} is stored as {stored.dtype}, expected {', '.join(slot.dtypes)}; "
                "it was quantised or converted in a way that is not read: give the original one"
            )


def read_parameter(tensors: TensorSource, name: str, slot: Slot, dtype: WeightType) -> Tensor:
    """Read one tensor in `dtype` and in the module's layout. Raises `CheckpointError` unless all values are finite."""
    stored = tensors.read(name)
    values = stored.float() + slot.offset if slot.offset else stored
    tensor = (values.flatten(1).T if slot.transposed else values).to(TORCH_TYPES[dtype]).contiguous()
    if not _is_finite(tensor):
        cause = "choose bfloat16 or float32" if _is_finite(stored) else _DAMAGED
        raise _not_finite(tensors, name, tensor.dtype, cause)
    return tensor


def read_finite(tensors: TensorSource, name: str) -> Tensor:
    """Read one tensor as the checkpoint has it. Raises `CheckpointError` unless all values are finite."""
    stored = tensors.read(name)
    if not _is_finite(stored):
        raise _not_finite(tensors, name, stored.dtype, _DAMAGED)
    return stored


def fill(tensors: TensorSource, wanted: Mapping[str, Slot], dtype: WeightType) -> dict[str, Tensor]:
    """Read the `wanted` tensors by parameter, in `dtype` and in the module's layout."""
    filled: dict[str, Tensor] = {}
    for name, slot in wanted.items():
        values = read_parameter(tensors, name, slot, dtype)
        if slot.place is None:
            filled[slot.parameter] = values
            continue
        if slot.parameter not in filled:
            filled[slot.parameter] = values.new_empty((slot.places, *slot.filled))
        filled[slot.parameter][slot.place] = values
    return filled


def _is_finite(tensor: Tensor) -> bool:
    """Return whether all values are finite; `isfinite` of all would take as much memory again."""
    return all(math.isfinite(extreme.item()) for extreme in tensor.aminmax())


def _not_finite(tensors: TensorSource, name: str, dtype: torch.dtype, cause: str) -> CheckpointError:
    kind = str(dtype).removeprefix("torch.")
    return CheckpointError(
        f"{tensors.found[name].file}: tensor {name!r} holds values that are not finite in {kind}; {cause}"
    )


def _some(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} (and {len(names) - 3} more)"
