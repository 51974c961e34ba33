"""On the CPU a token's logits are the same bits with any tokens computed beside it; probes hold the ops that engines
run, each on rows of its own."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from outrider.compiler.probes.choice import probed_ops, widest
from outrider.compiler.probes.graph import probe_graph
from outrider.plans import names
from outrider.plans.buffers import DType
from outrider.plans.manifest import deciding_engines
from outrider.plans.plan import Plan, open_plan
from outrider.plugins.ops.bim_mask import bim_mask
from outrider.plugins.quant_layout import GROUP, QuantLayout, pack
from outrider.plugins.reference.quant_matmul import quant_matmul
from outrider.runtime.backends.base import LoadedEngine, Settings
from outrider.runtime.backends.onnxruntime_cpu import OnnxRuntimeCpu, session_options
from outrider.runtime.exactness import EVERY, ROWS, differing
from outrider.runtime.execution.buffers import Buffers
from outrider.runtime.execution.step import TargetStep
from tests.compiler.steps import depths
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


TOKENS = [(37 * i) % 299 + 1 for i in range(48)]
Logits = NDArray[np.float32]


class Feeder:
    """The target engine on a session's buffers, fed chains of any length under a view of any length."""

    def __init__(self, toy_plan, engine: LoadedEngine) -> None:
        manifest = open_plan(toy_plan, verify=False).manifest
        plan = manifest.backends["onnxruntime-cpu"]
        # Room for logits of every token of a step, which no plan of one tip needs.
        logits = {names.buffer_name(names.TARGET, name) for name in (names.LOGIT_INDICES, names.LOGITS_OUT)}
        buffers = tuple(
            b.model_copy(update={"shape": (names.NEW, *b.shape[1:])}) if b.name in logits else b for b in plan.buffers
        )
        self.buffers = Buffers(plan.model_copy(update={"buffers": buffers}))
        limits = plan.symbols[names.TARGET]
        self.step = TargetStep(self.buffers, manifest.target, limits)
        forward = next(s for s in plan.programs[names.PREFILL].stages if s.run == "target")
        bound = forward.inputs | forward.outputs
        self.run = engine.bind(self.buffers, bound)
        self.largest_view = limits[names.VIEW]
        self.vocabulary = manifest.target.vocab_size

    def feed(self, tokens: list[int], past: int, view: int) -> Logits:
        """Logits of all of `tokens`, a chain after `past` rows, of which `view` keys are looked at."""
        step, n = self.step, len(tokens)
        step.begin(past, past, tokens, 0)
        return self._logits(past, n, view)

    def _logits(self, past: int, n: int, view: int) -> Logits:
        self.step.logit_indices[:n] = np.arange(n)
        bim, splits = np.full((1, past), -1, np.int64), np.array([0, n])
        bias = bim_mask(bim, np.array([past]), splits, self.step.branch[:n], self.step.parent[:n], view, n)
        self.buffers.array(names.TARGET, names.ATTN_BIAS).reshape(-1)[: bias.size] = bias.reshape(-1)
        self.run([n, view, n, 1, 2, n, n, 1, 1])
        logits = self.buffers.array(names.TARGET, names.LOGITS_OUT)
        return logits.reshape(-1)[: n * self.vocabulary].reshape(n, -1).copy()

    def tree(self, past: int, tokens: list[int], parents: list[int]) -> Logits:
        """Logits of a tree after the first `past` of `TOKENS`, which are there."""
        step, n = self.step, len(tokens)
        step.begin(past, past, tokens, 0)
        step.parent[:n], step.positions[:n] = parents, depths(parents, past)
        return self._logits(past, n, past + n)

    def chunks(self, sizes: list[int], view: int | None = None) -> Logits:
        """Logits of `TOKENS`, fed in chunks of these sizes, the last one repeated to the end."""
        found: list[Logits] = []
        past = 0
        for size in itertools.chain(sizes, itertools.repeat(sizes[-1])):
            tokens = TOKENS[past : past + size]
            if not tokens:
                break
            keys = past + len(tokens)
            found.append(self.feed(tokens, past, view or keys))
            past = keys
        return np.concatenate(found)


@pytest.fixture(scope="module")
def feeder(toy_plan) -> Feeder:
    plan = open_plan(toy_plan, verify=False)
    engine = plan.manifest.backends["onnxruntime-cpu"].engines["target"]
    return Feeder(toy_plan, OnnxRuntimeCpu().load(plan.file(engine.file), engine))


@pytest.fixture(scope="module")
def one_by_one(feeder: Feeder) -> Logits:
    found = feeder.chunks([1])
    assert len(np.unique(found[:, 0])) == len(TOKENS), "the oracle distinguishes tokens"
    return found


def assert_same_bits(found: Logits, wanted: Logits) -> None:
    np.testing.assert_array_equal(found.view(np.uint32), wanted.view(np.uint32))


@given(sizes=st.lists(st.integers(1, 16), min_size=1, max_size=12), view=st.none() | st.integers(len(TOKENS), 256))
@example(sizes=[2], view=None)
@example(sizes=[3], view=49)
@example(sizes=[5], view=127)
@example(sizes=[16], view=None)
@example(sizes=[16], view=128)
@example(sizes=[1], view=256)
def test_chunks_of_any_size_under_any_view_give_the_same_bits(
    feeder: Feeder, one_by_one: Logits, sizes: list[int], view: int | None
) -> None:
    assert_same_bits(feeder.chunks(sizes, view), one_by_one)


@given(past=st.integers(1, 20), parents=st.lists(st.integers(-1, 14), min_size=1, max_size=16))
def test_a_node_of_a_tree_has_the_bits_of_its_path_alone(feeder: Feeder, past: int, parents: list[int]) -> None:
    """Wherever siblings, uncles and their descendants lie between its ancestors."""
    parents = [min(parent, node - 1) for node, parent in enumerate(parents)]
    tokens = [(53 * i) % 299 + 1 for i in range(len(parents))]
    feeder.feed(TOKENS[:past], 0, past)
    whole = feeder.tree(past, tokens, parents)
    for node in {0, len(parents) // 2, len(parents) - 1}:
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        alone = feeder.feed([tokens[i] for i in path], past, past + len(path))
        assert_same_bits(whole[node], alone[-1])


@pytest.mark.parametrize("threads", [2, 3])
def test_the_number_of_threads_does_not_change_a_bit(toy_plan, one_by_one: Logits, threads: int) -> None:
    plan = open_plan(toy_plan, verify=False)
    engine = plan.manifest.backends["onnxruntime-cpu"].engines["target"]
    other = Feeder(toy_plan, OnnxRuntimeCpu(Settings(threads)).load(plan.file(engine.file), engine))
    for size in (1, 16):
        assert_same_bits(other.chunks([size]), one_by_one)


@pytest.mark.parametrize("garbage", [1e30, -1e30, 1e38, np.inf, np.nan, 0.0])
def test_garbage_in_the_kv_cache_after_the_tail_changes_no_bit(
    feeder: Feeder, one_by_one: Logits, garbage: float
) -> None:
    """Rejected drafts leave it there."""
    kv = feeder.buffers.array(names.TARGET, names.KV)
    assert kv.dtype == DType.FLOAT32.numpy
    kv.fill(garbage)
    found = feeder.chunks([5], 128)
    kv.fill(0)
    assert_same_bits(found, one_by_one)
