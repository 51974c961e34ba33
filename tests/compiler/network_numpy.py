"""What a TensorRT network computes, layer by layer in NumPy: it cannot run here, but it can be read.

An oracle of its own, by TensorRT's documentation of each layer, of the kinds of layers that target models have. Every
layer's result is rounded to its type; inside, products and sums are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_ELEMENTWISE = {
    "SUM": np.add, "SUB": np.subtract, "PROD": np.multiply, "DIV": np.divide, "MAX": np.maximum, "MIN": np.minimum,
    "POW": np.power, "FLOOR_DIV": np.floor_divide, "EQUAL": np.equal, "LESS": np.less, "GREATER": np.greater,
    "AND": np.logical_and, "OR": np.logical_or,
}  # fmt: skip
_UNARY = {"SQRT": np.sqrt, "RECIP": np.reciprocal, "EXP": np.exp, "NEG": np.negative, "ABS": np.abs}
_CAST = {
    "FLOAT": np.float32, "HALF": np.float16, "INT32": np.int32, "INT64": np.int64, "BOOL": np.bool_,
}  # fmt: skip
_LAYERS = {
    "ELEMENTWISE": "IElementWiseLayer", "UNARY": "IUnaryLayer", "CAST": "ICastLayer", "SHUFFLE": "IShuffleLayer",
    "CONSTANT": "IConstantLayer", "MATRIX_MULTIPLY": "IMatrixMultiplyLayer", "CONCATENATION": "IConcatenationLayer",
    "REDUCE": "IReduceLayer", "SLICE": "ISliceLayer", "SOFTMAX": "ISoftMaxLayer", "ACTIVATION": "IActivationLayer",
    "GATHER": "IGatherLayer", "SELECT": "ISelectLayer", "ROTARY_EMBEDDING": "IRotaryEmbeddingLayer",
    "ATTENTION_INPUT": "IAttentionInputLayer",
}  # fmt: skip


_SIMPLE: dict[str, Callable[..., Array]] = {
    "CONSTANT": lambda layer: np.array(layer.weights).reshape(tuple(layer.shape)),
    "UNARY": lambda layer, x: np.asarray(_UNARY[layer.op.name](x), x.dtype),
    "CAST": lambda layer, x: x.astype(_CAST[layer.to_type.name]),
    "IDENTITY": lambda _, x: x,
    "SHAPE": lambda _, x: np.array(x.shape, np.int64),
    "UNSQUEEZE": lambda _, x, axes: np.expand_dims(x, tuple(map(int, axes))),
    "SQUEEZE": lambda _, x, axes: np.squeeze(x, tuple(map(int, axes))),
    "CONCATENATION": lambda layer, *parts: np.concatenate(parts, layer.axis),
    "SELECT": lambda _, condition, then, other: np.where(condition, then, other),
    "ATTENTION_OUTPUT": lambda _, x: x,
}


class Reading:
    """`network` on `inputs`; tensors by name."""

    def __init__(self, trt: Any, network: Any, inputs: Mapping[str, Array]) -> None:
        self._trt, self._known = trt, dict(inputs)
        self._maker = {}
        for index in range(network.num_layers):
            layer = network.get_layer(index)
            kind = str(layer.type).rpartition(".")[2]
            if kind in _LAYERS:
                layer.__class__ = getattr(trt, _LAYERS[kind])
            for output in range(layer.num_outputs):
                assert layer.get_output(output).name not in self._maker
                self._maker[layer.get_output(output).name] = (kind, layer)

    def __getitem__(self, name: str) -> Array:
        if name not in self._known:
            kind, layer = self._maker[name]
            given = [layer.get_input(i) for i in range(layer.num_inputs)]
            arrays = [None if tensor is None else self[tensor.name] for tensor in given]
            compute = _SIMPLE.get(kind) or getattr(self, f"_{kind.lower()}")
            self._known[name] = compute(layer, *arrays)
        return self._known[name]

    def _elementwise(self, layer: Any, a: Array, b: Array) -> Array:
        assert a.dtype == b.dtype, layer.name
        assert a.ndim == b.ndim, layer.name
        result: Array = _ELEMENTWISE[layer.op.name](a, b)
        return result if result.dtype == np.bool_ else result.astype(a.dtype)

    def _activation(self, layer: Any, x: Array) -> Array:
        assert layer.type.name == "SIGMOID"
        return 1 / (1 + np.exp(-x))

    def _shuffle(self, layer: Any, x: Array, wanted: Array | None = None) -> Array:
        x = np.transpose(x, tuple(layer.first_transpose)[: x.ndim])
        asked = layer.reshape_dims if wanted is None else wanted
        if asked is not None:
            zero_copies = layer.zero_is_placeholder
            shape = [x.shape[i] if d == 0 and zero_copies else int(d) for i, d in enumerate(asked)]
            x = x.reshape(shape)
        return np.transpose(x, tuple(layer.second_transpose)[: x.ndim])

    def _slice(
        self, layer: Any, x: Array, start: Array | None = None, size: Array | None = None, stride: Array | None = None
    ) -> Array:
        assert layer.mode.name in ("STRICT_BOUNDS", "DEFAULT"), layer.mode
        starts, sizes, strides = (
            tuple(map(int, own if given is None else given))
            for own, given in ((layer.start, start), (layer.shape, size), (layer.stride, stride))
        )
        axes = range(x.ndim) if layer.axes is None else tuple(layer.axes)
        for axis, begin, count, step in zip(axes, starts, sizes, strides, strict=True):
            assert begin + (count - 1) * step < x.shape[axis], layer.name
            x = np.take(x, begin + step * np.arange(count), axis)
        return x

    def _gather(self, layer: Any, x: Array, index: Array) -> Array:
        assert (index >= 0).all()
        assert layer.mode.name == "DEFAULT"
        return np.take(x, index, layer.axis)

    def _reduce(self, layer: Any, x: Array) -> Array:
        axes = tuple(axis for axis in range(x.ndim) if layer.axes >> axis & 1)
        return {"AVG": np.mean, "SUM": np.sum, "MAX": np.max}[layer.op.name](x, axes, keepdims=layer.keep_dims)

    def _softmax(self, layer: Any, x: Array) -> Array:
        (axis,) = (axis for axis in range(x.ndim) if layer.axes >> axis & 1)
        weights = np.exp(x - x.max(axis, keepdims=True))
        return weights / weights.sum(axis, keepdims=True)

    def _matrix_multiply(self, layer: Any, a: Array, b: Array) -> Array:
        assert a.ndim == b.ndim, layer.name
        a, b = (np.swapaxes(x, -1, -2) if op.name == "TRANSPOSE" else x for x, op in ((a, layer.op0), (b, layer.op1)))
        assert a.dtype == b.dtype, layer.name
        return (a.astype(np.float32) @ b.astype(np.float32)).astype(a.dtype)

    def _attention_input(self, layer: Any, q: Array, k: Array, v: Array, mask: Array) -> Array:
        """Scaled queries; keys and values of fewer heads serve groups of them."""
        assert layer.attention.norm_op.name == "SOFTMAX"
        assert not layer.attention.causal
        assert q.dtype == k.dtype == v.dtype == mask.dtype
        keys, values = (np.repeat(x.astype(np.float32), q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = q.astype(np.float32) @ np.swapaxes(keys, -1, -2) + mask.astype(np.float32)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return (weights / weights.sum(-1, keepdims=True) @ values).astype(q.dtype)

    def _rotary_embedding(self, layer: Any, x: Array, cos: Array, sin: Array, positions: Array) -> Array:
        assert not layer.interleaved
        assert layer.rotary_embedding_dim in (0, x.shape[-1])
        cos, sin = (table[positions][:, None] for table in (cos, sin))  # [1, 1, S, head_dim / 2]
        first, second = np.split(x, 2, -1)
        return np.concatenate((first * cos - second * sin, second * cos + first * sin), -1)

    def _kv_cache_update(self, layer: Any, cache: Array, new: Array, first: Array) -> Array:
        present = cache.copy()
        for row, slot in enumerate(first):
            present[row, :, slot : slot + new.shape[2]] = new[row]
        return present
