"""Weights that a checkpoint stores as one tensor, each under a name of its own: projections one below the other, and
the experts of a layer, in floating point or in MXFP4.

MXFP4 (OCP Microscaling Formats 1.0, sections 5.2 to 5.4; transformers' `integrations/mxfp4.py` for the layout): 32
numbers in a row of a matrix `[out, in]` share a power of two. It stands in `_scales`, `[experts, out, in / 32]`, as a
byte, 127 more than the exponent. `_blocks`, `[experts, out, in / 32, 16]`, has 4 bits a number, the even ones in the
low half of a byte: a sign, two bits of exponent, one of mantissa.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.compiler.models.experts_config import ExpertsConfig
from outrider.compiler.models.families import stacked_part
from outrider.compiler.quantization.form import WeightSource
from outrider.compiler.tensor_source import Stored, TensorSource
from outrider.compiler.weights import Weights
from outrider.plans.errors import CheckpointError

_BLOCK = 32
_BLOCKS, _SCALES, _BIAS = "_blocks", "_scales", "_bias"
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS = torch.tensor([*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES)])
_POWERS = torch.tensor([*(math.ldexp(1.0, scale - 127) for scale in range(255)), math.nan])


class FusedTensors:
    """The `TensorSource` of such a checkpoint, made from that of the tensors as they are stored."""

    def __init__(self, stored: TensorSource, fused: Mapping[str, tuple[str, ...]], outputs: Mapping[str, int]) -> None:
        """`fused` maps a fused projection to those in it, all by the last part of their names; `outputs` are how many
        rows each of these has."""
        self._stored = stored
        self._parts: dict[str, tuple[str, slice]] = {}
        self.found: dict[str, Stored] = {}
        for name, header in stored.found.items():
            names = fused_parts(name, fused)
            if names == (name,):
                self.found[name] = header
                continue
            parts = fused[name.split(".")[-2]]
            rows = sum(outputs[part] for part in parts)
            if header.packed:
                raise CheckpointError(
                    f"{header.file}: tensor {name!r} holds {', '.join(parts)} and is quantised, and such ones are not "
                    "taken apart; give the checkpoint that it was made from, in floating point"
                )
            if not header.shape or header.shape[0] != rows:
                raise CheckpointError(
                    f"{header.file}: tensor {name!r} has shape {list(header.shape)}; it holds {', '.join(parts)}, of "
                    f"{rows} rows together, as config.json describes them; give files that belong together"
                )
            first = 0
            for part, own in zip(parts, names, strict=True):
                if own in stored.found:
                    raise CheckpointError(
                        f"{stored.found[own].file}: tensor {own!r} stands beside {name!r}, which holds it; remove the "
                        "wrong one"
                    )
                self._parts[own] = name, slice(first, first + outputs[part])
                self.found[own] = replace(header, shape=(outputs[part], *header.shape[1:]))
                first += outputs[part]

    def read(self, name: str) -> Tensor:
        """Read a tensor; of a fused one its own rows."""
        if name not in self._parts:
            return self._stored.read(name)
        fused, rows = self._parts[name]
        return self._stored.read(fused)[rows].clone()

    def quantized(self, name: str) -> WeightSource | None:
        """Return packed weights; None for floats, which all fused ones are."""
        return None if name in self._parts else self._stored.quantized(name)


def fused_parts(name: str, fused: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return the names of the projections in tensor `name`: those of a fused one, or its own."""
    module, _, kind = name.rpartition(".")
    folder, _, last = module.rpartition(".")
    return tuple(f"{folder}.{part}.{kind}" for part in fused[last]) if last in fused else (name,)


@dataclass(frozen=True)
class _Part:
    """One product of one expert, or its bias: of tensor `stored` each `step`-th output from `first` on, at `expert`."""

    stored: str
    expert: int
    first: int
    step: int


class StackedExperts:
    """The `TensorSource` of such a checkpoint, made from the tensors as they are stored.

    An expert is read by itself, so that no more than its numbers are in memory. Numbers in MXFP4 become float32.
    """

    def __init__(
        self, stored: Weights, stacked: Mapping[str, tuple[str, ...]], experts: ExpertsConfig, hidden: int
    ) -> None:
        """`stacked` maps a tensor of all experts, by the last part of its name, to the products in it, whose outputs
        take turns; `hidden` is the width of the model."""
        inward = hidden, experts.size
        products = {"gate": inward, "up": inward, "down": inward[::-1]}
        self._stored = stored
        self._parts: dict[str, _Part] = {}
        self.found: dict[str, Stored] = {}
        for name, header in stored.found.items():
            whole, kind = _split(name)
            held = stacked.get(whole.rpartition(".")[2])
            if held is None:
                self.found[name] = header
                continue
            inputs, own = products[held[0]]
            self._check(name, kind, (experts.count, inputs, own * len(held)))
            if kind == _SCALES:
                continue
            listed = whole + kind if kind == _BIAS else whole
            shape = (own,) if kind == _BIAS else (own, inputs)
            for expert in range(experts.count):
                for first, product in enumerate(held):
                    part = stacked_part(listed, expert, product)
                    self._parts[part] = _Part(name, expert, first, len(held))
                    self.found[part] = Stored(header.file, shape, "F32" if kind == _BLOCKS else header.dtype)

    def read(self, name: str) -> Tensor:
        """Read a tensor; of an expert's products the matrix `[out, in]`."""
        part = self._parts.get(name)
        if part is None:
            return self._stored.read(name)
        stored = self._stored.read_part(part.stored, part.expert)
        kind = _split(part.stored)[1]
        if kind == _BIAS:
            return stored[part.first :: part.step].clone()
        if kind != _BLOCKS:
            return stored[:, part.first :: part.step].T.contiguous()
        scales = self._stored.read_part(part.stored.removesuffix(_BLOCKS) + _SCALES, part.expert)
        rows = slice(part.first, None, part.step)
        return from_mxfp4(stored[rows], scales[rows])

    def quantized(self, name: str) -> WeightSource | None:
        """Return packed weights; None, since those in MXFP4 have no whole steps."""
        return self._stored.quantized(name)

    def _check(self, name: str, kind: str, shape: tuple[int, int, int]) -> None:
        """Raise `CheckpointError` unless the tensor is one of experts with weights of that `shape`."""
        header, (count, inputs, outputs) = self._stored.found[name], shape
        wanted: dict[str, tuple[int, ...]] = {
            "": shape,
            _BIAS: (count, outputs),
            _BLOCKS: (count, outputs, inputs // _BLOCK, _BLOCK // 2),
            _SCALES: (count, outputs, inputs // _BLOCK),
        }
        if header.shape != wanted[kind]:
            raise CheckpointError(
                f"{header.file}: tensor {name!r} has shape {list(header.shape)}, but config.json asks for "
                f"{list(wanted[kind])}; give files that belong together"
            )
        if kind not in (_BLOCKS, _SCALES):
            return
        whole = name.removesuffix(kind)
        if header.dtype != "U8" or inputs % _BLOCK:
            found = f"is stored as {header.dtype}" if header.dtype != "U8" else f"is of {inputs} inputs"
            raise CheckpointError(
                f"{header.file}: tensor {name!r} {found}; MXFP4 has bytes (U8), each block of {_BLOCK} inputs"
            )
        other = whole + (_SCALES if kind == _BLOCKS else _BLOCKS)
        if other not in self._stored.found:
            raise CheckpointError(
                f"{header.file}: tensor {other!r} is missing beside {name!r}; give a complete checkpoint"
            )
        if whole in self._stored.found:
            raise CheckpointError(f"{header.file}: tensor {name!r} stands beside {whole!r}; remove the wrong one")


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers f32 `[out, in]` of `blocks` u8 `[out, in / 32, 16]` and `scales` u8 `[out, in / 32]`.

    The scale 255 stands for numbers that are none.
    """
    nibbles = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    return (_NUMBERS[nibbles.int()] * _POWERS[scales.int()][..., None]).flatten(-2)


def _split(name: str) -> tuple[str, str]:
    """Return a tensor's name without its ending, and the ending: "" for weights in floating point."""
    kind = next((ending for ending in (_BIAS, _BLOCKS, _SCALES) if name.endswith(ending)), "")
    return name.removesuffix(kind), kind
