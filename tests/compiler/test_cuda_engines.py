"""Engines of the backend `cuda`: what a build says of operators without kernels, and of weights left in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from outrider.compiler.engines import cuda
from outrider.compiler.kernels.layers import unfit_heads
from outrider.plans import names
from outrider.plans.errors import PlanError


def model(operator: str) -> ir.Model:
    """Return a graph of one operator: 1 to N rows of 32 numbers, and a matrix of 32 by 64."""
    x, to = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", width]) for name, width in (("x", 32), ("to", 64))
    )
    weight = numpy_helper.from_array(np.ones((32, 64), np.float32), "w")
    graph = helper.make_graph([helper.make_node(operator, ["x", "w"], ["to"])], "target", [x], [to], [weight])
    return ir.from_proto(helper.make_model(graph))


@pytest.mark.parametrize(("most", "warns"), [(8191, True), (8192, False)])
def test_float32_products_of_a_large_model_are_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, most: int, warns: bool
) -> None:
    monkeypatch.setattr(cuda, "MOST_FLOATS", most)
    engines = cuda.CudaEngines(tmp_path, "float32")
    engines.write("target", model("MatMul"), dict.fromkeys(names.SYMBOLS, 64))
    engines.close()
    assert ("set dtype of the backend to bfloat16, or quantise the weights" in caplog.text) == warns


def test_an_operator_without_kernels_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"the engine 'target': its graph has the operator Conv; .*onnxruntime-cuda"):
        cuda.CudaEngines(tmp_path, "float32").write("target", model("Conv"), dict.fromkeys(names.SYMBOLS, 64))


@pytest.mark.parametrize(
    ("group", "size", "said"),
    [
        (1, 8, None), (46, 256, None), (63, 128, None), (4, 0, "heads have 0 numbers; it takes multiples of 8"),
        (4, 20, "heads have 20 numbers"), (1, 1032, "multiples of 8 up to 1024"), (47, 256, "bytes of shared memory"),
        (64, 128, "64 query heads of 128 numbers"),
    ],
)  # fmt: skip
def test_heads_that_no_block_has_room_for_are_refused(group: int, size: int, said: str | None) -> None:
    assert unfit_heads(group, size) is None if said is None else said in (unfit_heads(group, size) or "")
