"""The type of an op."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from outrider.plugins.cuda.launches import Launch
from outrider.plugins.schema import OpSchema
from outrider.plugins.tensorrt.plugin import Declined, Plugin

Tensors = Mapping[str, NDArray[Any]]
"""Tensors by their names in an op's schema: what the rules of ops with many take, as `native.create` does."""


@dataclass(frozen=True)
class Op:
    """An op, and how backends run it: on CUDA devices by its `launch`, if it has one; in TensorRT's engines as its
    `plugins`, one after another, or not, for a reason."""

    schema: OpSchema
    plugins: tuple[Plugin, ...] | Declined
    launch: Launch | None = None
