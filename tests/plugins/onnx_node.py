"""One of our ops in a session of ONNX Runtime, as its kernel or as its function body."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from outrider.plugins.onnx_ops import DOMAIN, FUNCTIONS, OPSET, VERSION
from outrider.plugins.schema import CPU_DOMAIN
from tests.cpu_session import cpu_session

FLOAT, INT, BYTES = TensorProto.FLOAT, TensorProto.INT64, TensorProto.UINT8
Values = Sequence[tuple[str, int, int]]
"""Names, types and ranks; an input without a name is absent."""


@cache
def kernel_session(
    op: str, inputs: Values, outputs: Values, threads: int = 0, **attributes: Any
) -> ort.InferenceSession:
    return _session(op, inputs, outputs, CPU_DOMAIN, {}, [], threads, attributes)


def body_session(
    op: str,
    inputs: Values,
    outputs: Values,
    constants: Mapping[str, NDArray[Any]] | None = None,
    body: onnx.FunctionProto | None = None,
    **attributes: Any,
) -> ort.InferenceSession:
    """A session of the op's function body, or of another `body`; `constants` follow the inputs."""
    return _session(op, inputs, outputs, DOMAIN, constants or {}, [body or FUNCTIONS[op]()], 1, attributes)


def _session(
    op: str, inputs: Values, outputs: Values, domain: str, constants: Mapping[str, NDArray[Any]],
    functions: list[onnx.FunctionProto], threads: int, attributes: Mapping[str, Any],
) -> ort.InferenceSession:  # fmt: skip
    names = [*(name for name, _, _ in inputs), *constants]
    graph = helper.make_graph(
        [helper.make_node(op, names, [name for name, _, _ in outputs], domain=domain, **attributes)],
        op,
        *(
            [helper.make_tensor_value_info(name, kind, [None] * rank) for name, kind, rank in values if name]
            for values in (inputs, outputs)
        ),
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(domain, VERSION)]
    model = helper.make_model(graph, functions=functions, opset_imports=opsets, ir_version=11)
    if functions:
        onnx.checker.check_model(model)
    return cpu_session(model.SerializeToString(), threads)
