"""Quantised weights, and where they come from: read only when a graph is written, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from outrider.plans.errors import CheckpointError
from outrider.plugins.onnx_ops import DOMAIN
from outrider.plugins.quant_layout import BLOCK, QuantLayout
from outrider.plugins.schema import QUANT_OPS


@dataclass(frozen=True)
class QuantizedWeight:
    """Weights `[N, K]`: `scale * integer`, or `scale * integer + minimum`, with a scale for each 32 of K.

    `integers` are int8 in the range of `bits` signed bits; with minimums uint8 in that of `bits` unsigned ones.
    `scales` and `minimums` are float32 `[N, K / 32]`.
    """

    bits: int
    integers: NDArray[Any]
    scales: NDArray[np.float32]
    minimums: NDArray[np.float32] | None = None


@dataclass(frozen=True)
class WeightSource:
    """A quantised weight of `shape` `[N, K]` that `read` makes anew at each call; what it will be is known before.

    `wide` weights have scales or minimums that float16 does not hold exactly. With an `order` `[K]`, column k is that
    of input `order[k]`. A checkpoint's own integers have an `origin`, for messages; their scales are not rounded.
    """

    bits: int
    shape: tuple[int, int]
    minimums: bool
    read: Callable[[], QuantizedWeight]
    wide: bool = False
    order: NDArray[np.int64] | None = None
    origin: str = ""

    @property
    def layout(self) -> QuantLayout:
        """The layout of the weight when it is packed."""
        return QuantLayout(*self.shape, self.bits, self.wide, self.minimums)

    def tensors(self, dtype: ir.DataType) -> list[QuantTensor]:
        """Return the integers, scales and minimums as tensors of a graph, the latter two of `dtype`."""
        kind = ir.DataType[f"{'U' if self.minimums else ''}INT{4 if self.bits <= 4 else 8}"]
        n, k = self.shape
        tensors = [QuantTensor(self, "integers", kind, (n, k)), QuantTensor(self, "scales", dtype, (n, k // BLOCK))]
        return tensors + ([QuantTensor(self, "minimums", dtype, (n, k // BLOCK))] if self.minimums else [])


class QuantTensor(ir.LazyTensor):
    """A part of a quantised weight, computed when a graph is written."""

    def __init__(self, source: WeightSource, part: str, dtype: ir.DataType, shape: tuple[int, int]) -> None:
        self.source, self.part = source, part
        super().__init__(self._compute, dtype=dtype, shape=ir.Shape(shape))

    def _compute(self) -> ir.TensorProtocol:
        value = getattr(self.source.read(), self.part)
        stored = value.astype(self.dtype.numpy())
        if self.source.origin and not np.array_equal(stored.astype(value.dtype), value):
            raise CheckpointError(
                f"{self.source.origin} has {self.part} that {self.dtype.name.lower()} does not hold exactly; build for "
                "this backend with another dtype, such as float32"
            )
        return ir.Tensor(stored, dtype=self.dtype)


def stack(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Return weights of one input, of the same bits, as one: their outputs one after another."""
    minimums = [part.minimums for part in parts if part.minimums is not None]
    return QuantizedWeight(
        parts[0].bits,
        np.concatenate([part.integers for part in parts]),
        np.concatenate([part.scales for part in parts]),
        np.concatenate(minimums) if minimums else None,
    )


def side_by_side(sources: Sequence[WeightSource]) -> WeightSource:
    """Return sources of weights of one input, of the same bits, as one, which reads them when it is read."""
    first = sources[0]
    assert all((s.bits, s.minimums, s.shape[1]) == (first.bits, first.minimums, first.shape[1]) for s in sources)
    return WeightSource(
        first.bits,
        (sum(source.shape[0] for source in sources), first.shape[1]),
        first.minimums,
        lambda: stack([source.read() for source in sources]),
        any(source.wide for source in sources),
        origin=first.origin,
    )


def product_source(node: ir.Node) -> WeightSource | None:
    """Return the weights of a node that reads quantised ones; None for any other node."""
    if node.domain != DOMAIN or node.op_type not in QUANT_OPS or node.inputs[1] is None:
        return None
    tensor = node.inputs[1].const_value
    assert isinstance(tensor, QuantTensor)
    return tensor.source
