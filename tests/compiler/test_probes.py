"""Probes hold the ops that engines run, each on rows of its own."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from outrider.compiler.probes.choice import probed_ops, widest
from outrider.compiler.probes.graph import probe_graph
from outrider.plans import names
from outrider.plans.manifest import deciding_engines
from outrider.plans.plan import Plan, open_plan
from outrider.plugins.quant_layout import GROUP, QuantLayout, pack
from outrider.plugins.reference.quant_matmul import quant_matmul
from outrider.runtime.backends.onnxruntime_cpu import session_options
from outrider.runtime.exactness import EVERY, ROWS, differing
from tests.plans.damage import BACKEND


@pytest.fixture(scope="module")
def plan(everything_plan: Path) -> Plan:
    return open_plan(everything_plan, verify=False)


def engines(plan: Plan) -> dict[str, ir.Model]:
    return {name: ir.load(plan.file(engine.file)) for name, engine in plan.manifest.backends[BACKEND].engines.items()}


def session_of(model: ir.Model, folder: Path | None = None, threads: int = 1) -> ort.InferenceSession:
    options = session_options(threads)
    if folder is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    return ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])


def test_the_probe_of_a_plan_has_the_ops_of_engines_that_decide(plan: Plan) -> None:
    probe = plan.manifest.backends[BACKEND].probe
    assert probe is not None
    decide = deciding_engines(plan.manifest.drafters)
    assert set(decide) == {"target", "classical", "classical-block", "classical-head"}
    assert {text.partition(":")[0] for text in probe.ops.values()} <= set(decide)
    kinds = {re.sub(r"[\w-]+: (\w+).*", r"\1", text) for text in probe.ops.values()}  # the widest, of any engine
    assert kinds == {"MatMul", "Gemm", "BranchAttention", "RmsNorm", "GatedUnit"}
    size = plan.file(probe.file).stat().st_size
    assert size < 2**16, "weights stay in the engines' file"


@pytest.mark.parametrize("threads", [1, 2])
def test_every_op_of_every_engine_is_exact_here(plan: Plan, threads: int) -> None:
    ops = probed_ops(engines(plan))
    for op in ops:
        (one,) = (other for other in widest(ops) if other.family == op.family)
        assert one.columns >= op.columns
    model, outputs = probe_graph(ops)
    folder = plan.file(plan.manifest.backends[BACKEND].engines[names.TARGET].file).parent
    found = differing(session_of(model, folder, threads), EVERY)
    assert [outputs[name].text for name in found] == []
    assert {id(op) for op in outputs.values()} == {id(op) for op in ops}


def test_onnx_runtime_runs_the_products_that_are_probed(plan: Plan, tmp_path: Path) -> None:
    """Its optimiser joins no product of ours with what stands after it, in an engine or in a probe."""

    def products(graph: onnx.GraphProto) -> Counter[tuple[str, int, int]]:
        floats = [tensor for tensor in graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT]
        extents = {tensor.name: tuple(tensor.dims) for tensor in floats if len(tensor.dims) == 2}
        nodes = [node for node in graph.node if len(node.input) > 1 and node.op_type not in ("Gather", "Reshape")]
        return Counter((node.op_type, *extents[node.input[1]]) for node in nodes if node.input[1] in extents)

    for engine in plan.manifest.backends[BACKEND].engines.values():
        path = plan.file(engine.file)
        options = session_options(1)
        options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
        ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        kept = products(onnx.load(str(tmp_path / "optimised.onnx"), load_external_data=False).graph)
        assert kept == products(onnx.load(str(path), load_external_data=False).graph)
        assert {op for op, *_ in kept} <= {"MatMul", "Gemm"}


def test_an_op_that_nobody_has_thought_about_is_refused(plan: Plan) -> None:
    model = engines(plan)[names.TARGET]
    node = next(node for node in model.graph if node.op_type == "GatedUnit")
    node.op_type = "Softmax"
    with pytest.raises(ValueError, match="engine target: nobody has said whether rows of Softmax depend on each other"):
        probed_ops({"target": model})


def test_a_product_with_fewer_columns_has_the_first_ones() -> None:
    rng, outputs, inputs = np.random.default_rng(0), 300, 64
    integers = rng.integers(-8, 8, (outputs, inputs)).astype(np.int8)
    scales = rng.random((outputs, inputs // 32), dtype=np.float32).astype(np.float16).astype(np.float32)
    layout = QuantLayout(outputs, inputs, bits=4, wide=False, minimums=False)
    packed = pack(integers, scales, None, layout)
    x, weight = ir.Value(name="x"), ir.Value(name="w", const_value=ir.tensor(packed, name="w"))
    node = ir.node("QuantMatMul", [x, weight], layout.attributes, domain="outrider.cpu")
    ops = probed_ops({"target": ir.Model(ir.Graph([x], [], nodes=[node], opset_imports={"": 24}), ir_version=10)})
    model, _ = probe_graph(ops, most=64 * (2 * GROUP + 1))
    given = rng.standard_normal((1, ROWS, 64), dtype=np.float32)
    (found,) = session_of(model).run(None, {"0.x": given})
    assert found.shape == (1, ROWS, 2 * GROUP)
    expected = quant_matmul(given[0], integers[: 2 * GROUP], scales[: 2 * GROUP])
    np.testing.assert_array_equal(found[0].view(np.uint32), expected.view(np.uint32))


def test_attention_reads_the_past_and_what_a_row_chooses_of_it(plan: Plan) -> None:
    """Else its rows could not differ in any company."""
    op = next(op for op in probed_ops(engines(plan)) if op.node.op_type == "BranchAttention")
    model, _ = probe_graph([op])
    folder = plan.file(plan.manifest.backends[BACKEND].engines[names.TARGET].file).parent
    session, rng = session_of(model, folder), np.random.default_rng(0)
    data = {
        tensor.name: rng.standard_normal([5 if d == names.PROBED else d for d in tensor.shape]).astype(np.float32)
        for tensor in session.get_inputs()
    }
    whole = session.run(None, data)[0][0]
    for name, axis in (("0.0", 1), ("0.choice", 0), ("0.past.0", 1)):
        other = {key: value.copy() for key, value in data.items()}
        index = (slice(None),) * axis + (2,)
        other[name][index] = rng.standard_normal(other[name][index].shape)
        changed = (session.run(None, other)[0][0] != whole).any(axis=1)
        if name == "0.past.0":  # seen by those who chose it
            assert 0 < changed.sum() < len(changed)
        else:
            assert changed.tolist() == [row == 2 for row in range(5)]
