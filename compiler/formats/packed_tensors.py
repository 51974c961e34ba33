"""The tensors of a checkpoint folder whose projections are packed, each projection under one name."""

from __future__ import annotations

import re
from collections.abc import Set

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.compiler.formats.packed_layouts import AwqModule, CompressedModule, FirstGptqModule, GptqModule
from outrider.compiler.formats.packed_module import PackedModule
from outrider.compiler.models.quantization import Packing
from outrider.compiler.quantization.form import WeightSource
from outrider.compiler.tensor_source import Stored, TensorSource
from outrider.plans.errors import CheckpointError

_INTO_DOWN = re.compile(r"(.*\.mlp\.)(?:gate|up)_proj\.(?:weight|bias)")
_DOWN = re.compile(r".*\.mlp\.down_proj\.weight")


def unpacked(stored: TensorSource, packing: Packing | None, unbiased: Set[str] = frozenset()) -> TensorSource:
    """Return the tensors of a folder whose weights are packed so, those `stored` where they are floats.

    `unbiased` goes to `PackedTensors`.
    """
    return stored if packing is None else PackedTensors(stored, packing, unbiased)


class PackedTensors:
    """The `TensorSource` of such a folder, made from that of the tensors as they are stored.

    GPTQ with `desc_act` puts inputs that are far apart into one group. Blocks need them side by side, so that the
    product must read its inputs in another order. For the last projection of an MLP this is free: the outputs of the
    two before it are reordered, here, and the MLP computes the same. Others name the order in `WeightSource.order`.
    """

    def __init__(self, stored: TensorSource, packing: Packing, unbiased: Set[str] = frozenset()) -> None:
        """Check all headers.

        `unbiased` are the projections, by the last part of their names, that have no bias in the model: AutoGPTQ once
        wrote a bias of zeros for each projection, and such ones are left out.
        """
        self._stored, self._unbiased = stored, unbiased
        self._modules = _modules(stored, packing)
        plain = {name: header for name, header in stored.found.items() if self._is_plain(name)}
        packed = {
            f"{name}.weight": Stored(module.file, module.shape, f"{module.format} int{module.bits}", packed=True)
            for name, module in self._modules.items()
        }
        twice = next((name for name in packed if name in plain), None)
        if twice is not None:
            raise CheckpointError(
                f"{plain[twice].file}: tensor {twice!r} stands beside packed tensors of the same projection, in "
                f"{packed[twice].file}; remove the wrong ones"
            )
        self.found = plain | packed

    def read(self, name: str) -> Tensor:
        """Read a tensor: floats in their type, packed weights as float32."""
        module, outputs = self._modules.get(name.removesuffix(".weight")), self._outputs(name)
        if module is None:
            tensor = self._stored.read(name)
            return tensor if outputs is None else tensor[torch.from_numpy(outputs)]
        numbers = module.numbers()
        if self._folds(name) and module.order is not None:
            numbers = numbers[:, module.order]
        return torch.from_numpy(np.ascontiguousarray(numbers if outputs is None else numbers[outputs]))

    def quantized(self, name: str) -> WeightSource | None:
        """Return packed weights with their integers kept; None for floats, and where 32 inputs in a row share no
        scale."""
        module = self._modules.get(name.removesuffix(".weight"))
        return None if module is None else module.weight_source(self._outputs(name), self._folds(name))

    def _is_plain(self, name: str) -> bool:
        """Return whether `name` is no part of a packed projection, and no bias of zeros that the model has not."""
        module, _, last = name.rpartition(".")
        if module not in self._modules:
            return True
        spare = last == "bias" and module.rpartition(".")[2] in self._unbiased and not self._stored.read(name).any()
        return not spare and last not in self._modules[module].parts

    def _folds(self, name: str) -> bool:
        """Return whether the order of the inputs of `name` is that of the outputs of the projections before it."""
        module = self._modules.get(name.removesuffix(".weight")) if _DOWN.fullmatch(name) else None
        return module is not None and module.has_form

    def _outputs(self, name: str) -> NDArray[np.int64] | None:
        """Return the order in which the outputs of `name` are wanted; None for the order that they have."""
        matched = _INTO_DOWN.fullmatch(name)
        down = f"{matched[1]}down_proj" if matched is not None else ""
        return self._modules[down].order if self._folds(f"{down}.weight") else None


def _modules(stored: TensorSource, packing: Packing) -> dict[str, PackedModule]:
    """Return the packed projections by name."""
    kinds: dict[str, type[PackedModule]] = {
        "awq": AwqModule,
        "gptq": FirstGptqModule if packing.zeros_less_one else GptqModule,
        "compressed-tensors": CompressedModule,
    }
    kind = kinds[packing.method]
    parts: dict[str, dict[str, Stored]] = {}
    for name, header in stored.found.items():
        module, _, last = name.rpartition(".")
        if last in kind.parts:
            parts.setdefault(module, {})[last] = header
    modules = {module: kind(module, found, stored) for module, found in parts.items()}
    for made in modules.values():
        if isinstance(made, CompressedModule):
            made.check(packing.groups)
        else:
            made.check_declared(packing.declared)
    return modules
