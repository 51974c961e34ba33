"""Projections that a checkpoint stores as one tensor, one below the other, each under a name of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from outrider.compiler.quantization.form import WeightSource
from outrider.compiler.tensor_source import Stored, TensorSource
from outrider.plans.errors import CheckpointError


class FusedTensors:
    """The `TensorSource` of such a checkpoint, made from that of the tensors as they are stored."""

    def __init__(self, stored: TensorSource, fused: Mapping[str, tuple[str, ...]], outputs: Mapping[str, int]) -> None:
        """`fused` maps a fused projection to those in it, all by the last part of their names; `outputs` are how many
        rows each of these has. Raises `CheckpointError` for one that has another number of rows, or is quantised."""
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
