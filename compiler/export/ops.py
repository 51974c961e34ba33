"""Our graph ops as PyTorch ops, and their translation to the ONNX ops of the same names.

PyTorch runs those of `models`; the others are only traced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnxscript
import torch
from torch import Tensor

from outrider.compiler.models.experts import EXPERT_OPS
from outrider.compiler.models.ops import COMPOSITES, LIBRARY
from outrider.plugins.onnx_ops import DOMAIN, VERSION
from outrider.plugins.ops import OPS


def _traced_op(name: str, fake: Callable[..., tuple[Tensor, ...]]) -> Any:
    """Return the op of `plugins.ops` for traces: its inputs, then its attributes. `fake` returns tensors like the
    outputs."""
    schema, own = OPS[name].schema, "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")
    arguments = [f"Tensor{'?' if spec.optional else ''} {spec.name}" for spec in schema.inputs]
    arguments += [f"{spec.kind.__name__} {spec.name}" for spec in schema.attributes]
    outputs = ", ".join("Tensor" for _ in schema.outputs)
    LIBRARY.define(f"{own}({', '.join(arguments)}) -> ({outputs})")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"outrider::{own}", fake, lib=LIBRARY)
    return getattr(torch.ops.outrider, own).default


def _attended(q: Tensor, _k: Tensor, _v: Tensor, k_cache: Tensor, v_cache: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(q), torch.empty_like(k_cache), torch.empty_like(v_cache), torch.empty_like(q[0])


def _convolved(x: Tensor, _weight: Tensor, tail: Tensor, log: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(x), torch.empty_like(tail), torch.empty_like(log)


def _scanned(
    x: Tensor, a: Tensor, _decay_log: Tensor, _step_bias: Tensor, state: Tensor, log: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    values = rest[-5]  # the attributes are key_heads, values, delta and three numbers
    return x.new_empty((*x.shape[:-1], a.shape[-1] * values)), torch.empty_like(state), torch.empty_like(log)


def _expanded(logits: Tensor, score: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    (trees, nodes), top_k = score.shape, rest[2]
    candidates = logits.new_empty((trees, nodes * top_k))
    return candidates.long(), candidates, logits.new_empty((trees, top_k), dtype=torch.int64)


def _sampled(logits: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
    return logits.new_empty(logits.shape[:2], dtype=torch.int64), torch.empty_like(logits)


def _reranked(token: Tensor, score: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    shape = (token.shape[0], rest[-1] - 1)
    return *(token.new_empty(shape) for _ in range(4)), score.new_empty(shape)


branch_attention = _traced_op("BranchAttention", _attended)
path_conv = _traced_op("PathConv", _convolved)
state_scan = _traced_op("StateScan", _scanned)
tree_expand = _traced_op("TreeExpand", _expanded)
draft_sample = _traced_op("DraftSample", _sampled)
tree_rerank = _traced_op("TreeRerank", _reranked)


def arguments_of(op: Any, given: tuple[Any, ...]) -> dict[str, Any]:
    """Return the arguments of a call of `op` by name."""
    return {argument.name: value for argument, value in zip(op._schema.arguments, given, strict=True)}


def _translated(op: Any) -> Callable[..., Any]:
    """Return the translation of an op of ours: to the ONNX op of its name, of its tensors and attributes."""
    name = "".join(part.capitalize() for part in op._schema.name.partition("::")[2].split("_"))
    tensors = [argument.name for argument in op._schema.arguments if "Tensor" in str(argument.type)]

    def translate(*given: Any) -> Any:
        arguments = arguments_of(op, given)
        inputs = list[Any]()
        for tensor in map(arguments.pop, tensors):
            inputs += tensor if isinstance(tensor, list | tuple) else [tensor]
        return getattr(onnxscript.values.Opset(DOMAIN, VERSION), name)(*inputs, **arguments)

    return translate


def _translate_cast(x: Any, dtype: int) -> Any:
    return onnxscript.opset23.Cast(x, to=dtype)


def _translate_subtracted(x: Any, other: Any) -> Any:
    return onnxscript.opset23.Sub(onnxscript.opset23.CastLike(other, x), x)


def _translate_detach(x: Any) -> Any:
    return x


TRANSLATIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.to.dtype: _translate_cast,
    torch.ops.aten.rsub.Scalar: _translate_subtracted,
    torch.ops.aten.detach_.default: _translate_detach,
    **{
        op: _translated(op)
        for op in (
            branch_attention,
            path_conv,
            state_scan,
            tree_expand,
            draft_sample,
            tree_rerank,
            *EXPERT_OPS,
            *COMPOSITES,
        )
    },
}
