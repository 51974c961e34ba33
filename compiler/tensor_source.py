"""The tensors of a checkpoint of any format: all headers at once, values on request."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from outrider.compiler.quantization.form import WeightSource

_LOG = logging.getLogger("outrider")


@dataclass(frozen=True)
class Stored:
    """A tensor's entry in the header of `file`; `dtype` is in safetensors' spelling, or the format's own.

    `packed` numbers are stored as integers with scales.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str
    packed: bool = False


class TextTensors:
    """The `TensorSource` of the text model in a checkpoint that holds more, under the names that it has alone."""

    def __init__(self, stored: TensorSource, skipped: tuple[str, ...]) -> None:
        """Tensors whose names begin with one of `skipped` are left out."""
        self._stored = stored
        self._names = {
            name.replace("model.language_model.", "model.", 1): name
            for name in stored.found
            if not name.startswith(skipped)
        }
        self.found = {own: stored.found[name] for own, name in self._names.items()}
        if left := len(stored.found) - len(self.found):
            _LOG.info("%d tensors of other parts than the text model are not read (%s)", left, ", ".join(skipped))

    def read(self, name: str) -> Tensor:
        return self._stored.read(self._names[name])

    def quantized(self, name: str) -> WeightSource | None:
        return self._stored.quantized(self._names[name])


class TensorSource(Protocol):
    """The tensors of a checkpoint by their names in Hugging Face's layout, in which projections are `[out, in]`."""

    @property
    def found(self) -> Mapping[str, Stored]:
        """Every tensor's header. The shape is that of the numbers, however they are stored."""

    def read(self, name: str) -> Tensor:
        """Read a tensor into its own memory, in the type in which it is stored; a quantised one as floats, by its
        format's own rule."""

    def quantized(self, name: str) -> WeightSource | None:
        """Return the integers and scales of a tensor, kept exactly; None where it is stored as floats, or in a form
        that `WeightSource` has not."""
