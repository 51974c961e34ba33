"""Arithmetic of layers that backends have kernels of: functions of PyTorch's ops, each one op of ours in an export.

Each is composite: PyTorch runs and differentiates the function, and `torch.export` keeps one node of the op's name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

_Function = TypeVar("_Function", bound=Callable[..., Any])
LIBRARY = torch.library.Library("outrider", "FRAGMENT")  # type: ignore[no-untyped-call]
COMPOSITES: dict[Any, Callable[..., Any]] = {}
"""What each op computes, for `ExportedProgram.run_decompositions`."""


def composite(function: _Function) -> _Function:
    """Return the op `outrider::name` that computes `function`, whose annotations are its schema."""
    name = function.__name__
    LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()))  # type: ignore[no-untyped-call]
    LIBRARY.impl(name, function, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]
    op: _Function = getattr(torch.ops.outrider, name).default
    COMPOSITES[op] = function
    return op


@composite
def add_norm(residual: Tensor, weight: Tensor, added: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    total = residual + added
    return F.rms_norm(total, weight.shape, weight, epsilon), total


@composite
def run_after(x: Tensor, earlier: Tensor) -> Tensor:
    """Return `x`, once `earlier` is computed."""
    one = 1.0 + 0.0 * earlier.float().sum()
    return x * one.to(x.dtype)


@composite
def silu_unit(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


@composite
def gelu_unit(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh") * up


UNITS = {"silu": silu_unit, "gelu_tanh": gelu_unit}  # by their activation


@composite
def softcap(x: Tensor, cap: float) -> Tensor:
    return torch.tanh(x / cap) * cap
