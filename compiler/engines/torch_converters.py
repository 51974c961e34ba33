"""Converters of the ops that target graphs have beside PyTorch's own, for networks of one row.

They make the layers that TensorRT's parser makes of the lowered graph (`lowering/scatter_attention.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir
import torch
import torch.onnx.ops  # registers ONNX's
from torch import Tensor

from outrider.compiler.export.ops import arguments_of, branch_attention
from outrider.compiler.lowering.builder import LOWEST

_LOWEST = {"HALF": LOWEST[ir.DataType.FLOAT16], "BF16": LOWEST[ir.DataType.BFLOAT16]}


def is_plain(attention: torch.fx.Node) -> bool:
    """Return whether a call of attention has no sinks, caps no scores and has no window."""
    given = arguments_of(branch_attention, attention.args)
    return given["sinks"] is None and (given["softcap"], given["window"]) == (0, 0)


def attend_alone(*given: Any) -> Any:
    """Norm and rotate before an attention that attends alone, which stays as it is: a decomposition for PyTorch."""
    own = arguments_of(branch_attention, given)
    norms, (cos, sin) = (own["q_norm"], own["k_norm"]), (own["cos"], own["sin"])
    if norms[0] is None and cos is None:
        return NotImplemented
    head_dim = own["k_cache"].shape[3]
    for x, weight, heads in zip("qk", norms, (own["num_heads"], own["kv_num_heads"]), strict=True):
        if weight is not None:
            # Not `rms_norm`, which adds in place: the program is functional by now.
            split = own[x].unflatten(-1, (-1, head_dim)).float()
            normed = split * torch.rsqrt(split.pow(2).mean(-1, keepdim=True) + own["epsilon"])
            own[x] = (normed.type_as(weight) * weight).flatten(-2)
        if cos is not None:
            part = 0 if 2 * cos.shape[1] == head_dim else 2 * cos.shape[1]
            own[x] = torch.onnx.ops.rotary_embedding(
                own[x], cos, sin, own["positions"], num_heads=heads, rotary_embedding_dim=part
            )
    return branch_attention(**own | dict.fromkeys(("positions", "cos", "sin", "q_norm", "k_norm")))


class OneRowConverters:
    """The converters for one network, whose constants they keep alive. Shapes are those of `plugins.ops`."""

    OPS: ClassVar[frozenset[Any]] = frozenset({branch_attention, torch.ops.onnx.RotaryEmbedding.opset23})

    def __init__(self, trt: Any, context: Any) -> None:
        self._trt, self._context, self._net = trt, context, context.net
        self._made: dict[Any, Any] = {}
        self._held: list[np.ndarray[Any, Any]] = []

    def converter(self, target: Any) -> Callable[..., Any] | None:
        if target is branch_attention:
            return self._attend
        return self._rotate if target is torch.ops.onnx.RotaryEmbedding.opset23 else None

    def _rotate(
        self, x: Any, cos: Tensor, sin: Tensor, positions: Any, *, interleaved: bool = False, num_heads: int = 0,
        rotary_embedding_dim: int = 0,
    ) -> Any:  # fmt: skip
        by_head = self._split_heads(x, num_heads)
        tables = [self._constant(table) for table in (cos, sin)]
        layer = self._net.add_rotary_embedding(by_head, *tables, interleaved, rotary_embedding_dim)
        layer.set_input(3, positions)
        return self._join_heads(layer.get_output(0))

    def _attend(self, *given: Any) -> tuple[Any, Any, Any]:
        """Attend over the caches' slots in view; also return the updated caches.

        `later` and `asks` make no difference: the mask alone says which tokens are seen. What a call that `is_plain`
        leaves out is not looked at.
        """
        own = arguments_of(branch_attention, given)
        q, bias, heads, kv_heads = own["q"], own["attn_bias"], own["num_heads"], own["kv_num_heads"]
        queries, keys, values = (
            self._split_heads(own[x], n) for x, n in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        present, seen = zip(
            *(
                self._append(own[cache], new, own["past_length"], bias)
                for cache, new in (("k_cache", keys), ("v_cache", values))
            ),
            strict=True,
        )
        factor = self._number(own["scale"], q.dtype, rank=4)
        scaled = self._elementwise(queries, factor, "PROD")
        if q.dtype == self._trt.DataType.FLOAT:
            attended = self._written_out(scaled, seen[0], seen[1], bias, heads // kv_heads)
        else:
            attention = self._net.add_attention(scaled, *seen, self._trt.AttentionNormalizationOp.SOFTMAX, False)
            attention.mask = self._once(("bias", bias.name), lambda: self._bounded(bias, q.dtype))
            attended = attention.get_output(0)
        return self._join_heads(attended), *present

    def _append(self, cache: Any, new: Any, past: Any, bias: Any) -> tuple[Any, Any]:
        trt, net = self._trt, self._net
        first = self._once(("first", past.name), lambda: net.add_cast(past, trt.DataType.INT32).get_output(0))
        present = net.add_kv_cache_update(cache, new, first, trt.KVCacheMode.LINEAR).get_output(0)
        _, kv_heads, _, head_dim = cache.shape

        def size() -> Any:
            view = net.add_slice(net.add_shape(bias).get_output(0), (3,), (1,), (1,)).get_output(0)
            parts = [self._numbers(1, kv_heads), view, self._numbers(head_dim)]
            return net.add_concatenation(parts).get_output(0)

        in_view = net.add_slice(present, (0,) * 4, (0,) * 4, (1,) * 4)
        in_view.set_input(2, self._once(("view", bias.name, kv_heads, head_dim), size))
        return present, in_view.get_output(0)

    def _written_out(self, queries: Any, keys: Any, values: Any, bias: Any, groups: int) -> Any:
        """Attend in float32, for which TensorRT has no kernel, as matrix products per group of heads."""
        trt, net = self._trt, self._net
        _, heads, _, head_dim = queries.shape
        by_group = self._reshape(queries, (1, heads // groups, groups, -1, head_dim))
        keys, values, bias = (
            net.add_unsqueeze(x, self._once("axis", lambda: self._numbers(2))).get_output(0)
            for x in (keys, values, bias)
        )
        none, turned = trt.MatrixOperation.NONE, trt.MatrixOperation.TRANSPOSE
        scores = net.add_matrix_multiply(by_group, none, keys, turned).get_output(0)
        softmax = net.add_softmax(self._elementwise(scores, bias, "SUM"))
        softmax.axes = 1 << 4
        mixed = net.add_matrix_multiply(softmax.get_output(0), none, values, none).get_output(0)
        return self._reshape(mixed, (1, heads, -1, head_dim))

    def _bounded(self, bias: Any, dtype: Any) -> Any:
        """Return the bias in the model's type, bounded by `_LOWEST` so that it stays finite there."""
        lowest = self._number(_LOWEST[dtype.name], bias.dtype, rank=4)
        return self._net.add_cast(self._elementwise(bias, lowest, "MAX"), dtype).get_output(0)

    def _split_heads(self, x: Any, heads: int) -> Any:
        """Reshape `[1, S, heads * head_dim]` to `[1, heads, S, head_dim]`."""
        layer = self._net.add_shuffle(x)
        layer.reshape_dims = (0, 0, heads, x.shape[2] // heads)
        layer.second_transpose = (0, 2, 1, 3)
        return layer.get_output(0)

    def _join_heads(self, x: Any) -> Any:
        layer = self._net.add_shuffle(x)
        layer.first_transpose = (0, 2, 1, 3)
        layer.reshape_dims = (0, 0, x.shape[1] * x.shape[3])
        return layer.get_output(0)

    def _reshape(self, x: Any, shape: tuple[int, ...]) -> Any:
        layer = self._net.add_shuffle(x)
        layer.reshape_dims = shape
        return layer.get_output(0)

    def _elementwise(self, a: Any, b: Any, operation: str) -> Any:
        return self._net.add_elementwise(a, b, getattr(self._trt.ElementWiseOperation, operation)).get_output(0)

    def _number(self, value: float, dtype: Any, rank: int) -> Any:
        def make() -> Any:
            shape = (1,) * rank
            constant = self._held_constant(np.full(shape, value, np.float32))
            return constant if dtype == constant.dtype else self._net.add_cast(constant, dtype).get_output(0)

        return self._once(("number", value, dtype.name, rank), make)

    def _numbers(self, *values: int) -> Any:
        return self._held_constant(np.array(values, np.int64))

    def _held_constant(self, values: np.ndarray[Any, Any]) -> Any:
        self._held.append(values)  # the network points into the array's memory
        return self._net.add_constant(values.shape, values).get_output(0)

    def _constant(self, table: Tensor) -> Any:
        from torch_tensorrt.dynamo.conversion.converter_utils import get_trt_tensor

        return self._once(
            ("table", table.data_ptr()), lambda: get_trt_tensor(self._context, table, f"rope.{len(self._made)}")
        )

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the value at `key`, made for the first layer that needs it and shared by the others."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]
