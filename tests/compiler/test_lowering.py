"""Rules of lowering: where they apply and why they decline, and files of weights; what lowered graphs compute is tested
in `test_attention_forms.py`."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from onnx import TensorProto

from outrider.compiler.checkpoint import load_decoder
from outrider.compiler.engines.onnxruntime import OnnxRuntimeEngines
from outrider.compiler.export import export_target
from outrider.compiler.lowering import lower
from outrider.compiler.lowering.functions import CopiedSizes
from outrider.compiler.lowering.products import GatedUnitOfProduct
from outrider.compiler.lowering.rule import Lowering, Rule, apply_rules
from outrider.compiler.models.decoder import Decoder
from outrider.plugins.schema import CPU_DOMAIN

CPU = "onnxruntime-cpu"
CAPACITY = 32


# The rules, on a whole model.


@pytest.fixture(scope="module")
def decoder(toy_recipe: Path) -> Decoder:
    return load_decoder(toy_recipe.parent / "target", "float32", None)


# Declining.


def matched(rule: Rule, text: str) -> tuple[ir.Graph, list[ir.Node], Lowering]:
    """A graph in ONNX's text form, a node after each ";", and its nodes that the rule is for."""
    text = text.replace(";", "\n")
    opsets = '["" : 24, "outrider" : 1, "outrider.cpu" : 1]'
    proto = onnx.parser.parse_model(f"<ir_version: 10, opset_import: {opsets}> g {text}")
    graph = ir.from_proto(proto).graph
    return graph, [node for node in graph if rule.pattern(node)], Lowering("target", ir.Model(graph, ir_version=10), 1)


@pytest.mark.parametrize(
    ("products", "joined"),
    [
        ("gate = MatMul(x, w); up = MatMul(x, u)", True),
        ("gate = Relu(x); up = MatMul(x, u)", False),
        ("gate = MatMul(x, w); z = Relu(x); up = MatMul(z, u)", False),
        ("g = MatMul(x, w); gate = Add(g, b); p = MatMul(x, u); up = Add(p, b)", False),
    ],
)
def test_gate_and_up_become_one_product_or_are_laid_side_by_side(products: str, joined: bool) -> None:
    weights = "float[2, 2] w = {1.0, 2.0, 3.0, 4.0}, float[2, 2] u = {5.0, 6.0, 7.0, 8.0}, float[2] b = {1.0, 2.0}"
    text = f"(float[1, N, 2] x) => (float[1, N, 2] y) <{weights}> {{ {products}; y = outrider.SiluUnit(gate, up) }}"
    graph, (node,), state = matched(GatedUnitOfProduct(), text)
    GatedUnitOfProduct().rewrite(node, state)
    *_, both, unit = graph
    assert (both.op_type, len(graph)) == ("MatMul", 2) if joined else both.op_type == "Concat"
    assert (unit.domain, unit.attributes["activation"].as_string()) == (CPU_DOMAIN, "silu")


# Writing.


def test_engines_that_share_a_weight_file_store_equal_tensors_once(decoder: Decoder, tmp_path: Path) -> None:
    engines = OnnxRuntimeEngines(tmp_path)
    sizes = []
    for name in ("target", "again"):
        graph = export_target(decoder, CAPACITY)
        lower(name, graph, CPU, rows=1)
        engines.write(name, graph, {})
        sizes.append(engines._weights._file.tell())
    engines.close()
    assert sizes[0] == sizes[1] > 0
    data = (tmp_path / "weights.bin").read_bytes()
    spans = set()
    for name in ("target", "again"):
        for tensor in onnx.load(tmp_path / f"{name}.onnx", load_external_data=False).graph.initializer:
            if tensor.data_location == TensorProto.EXTERNAL:
                entries = {entry.key: entry.value for entry in tensor.external_data}
                spans.add((int(entries["offset"]), int(entries["length"])))
    contents = [data[offset : offset + length] for offset, length in spans]
    assert len(set(contents)) == len(contents)
    assert all(offset % 4096 == 0 for offset, _ in spans)


def test_a_view_of_one_size_becomes_a_copy_and_other_views_stay() -> None:
    model = ir.from_onnx_text(
        """
        <ir_version: 10, opset_import: ["": 24]>
        sizes (float[N, M] x, float[1, K] y, int64[1] axis) => (int64 rows, int64[K] all)
        {
            of_rows = Shape <start: int = 0, end: int = 1> (x)
            rows = Squeeze (of_rows, axis)
            of_all = Shape (y)
            all = Squeeze (of_all)
        }
        """
    )
    (report,) = apply_rules(Lowering("sizes", model, 1), [CopiedSizes()])
    assert report.applied == 1
    assert [node.op_type for node in model.graph] == ["Shape", "Constant", "Gather", "Shape", "Squeeze"]
    assert [value.name for value in model.graph.outputs] == ["rows", "all"]
