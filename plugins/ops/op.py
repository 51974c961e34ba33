"""The type of an op."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.plugins.cuda.launches import Launch
from outrider.plugins.schema import OpSchema
from outrider.plugins.tensorrt.plugin import Declined, Plugin


@dataclass(frozen=True)
class Op:
    """An op, and how backends run it: on CUDA devices by its `launch`, if it has one; in TensorRT's engines as its
    `plugins`, one after another, or not, for a reason."""

    schema: OpSchema
    plugins: tuple[Plugin, ...] | Declined
    launch: Launch | None = None
