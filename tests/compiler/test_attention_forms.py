"""Windows, capped scores, sinks and rotations of a part, lowered for every backend: each computes the references; what
GroupQueryAttention reads of BranchAttention, and where it declines."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import onnx.inliner
import onnx_ir as ir
import pytest
import torch

from outrider.compiler.backends import BACKEND_CLASSES
from outrider.compiler.backends.base import Backend
from outrider.compiler.checkpoint import load_decoder
from outrider.compiler.engines.torch_converters import is_plain
from outrider.compiler.export import DraftOptions, export_draft, export_target
from outrider.compiler.export.ops import branch_attention
from outrider.compiler.export.tracing import traced_of
from outrider.compiler.lowering import lower
from outrider.compiler.lowering.own_ops import CpuNorms
from outrider.compiler.lowering.products import FuseProjections, GatedUnitOfProduct
from outrider.compiler.lowering.rule import Rule
from outrider.compiler.models.decoder import Decoder
from outrider.compiler.models.drafting import DecoderDraft
from outrider.compiler.probes.choice import probed_ops
from outrider.compiler.probes.graph import probe_graph
from outrider.plans import names
from outrider.plans.kv_slots import KvType
from outrider.plans.manifest import RuleReport, Tree
from outrider.plugins.schema import CPU_DOMAIN
from outrider.runtime.exactness import EVERY, differing
from tests.compiler.attention_forms import FORMS, Arrays, Form, Forms, export_forms, random_step
from tests.compiler.steps import CUDA, in_float32, run_engine, spell_norms_out, write_engine
from tests.cpu_session import cpu_session

CPU, RTX = "onnxruntime-cpu", "tensorrt-rtx"
CAPACITY = 64
TREES = {  # by rows: pasts, parents; of three, two are idle and have an inert token
    1: ([9], [[-1, 0, 0, 1, 1, 2]]),
    2: ([9, 4], [[-1, 0, 0, 1, 1, 2], [-1, 0]]),
    3: ([9, 5, 0], [[-1], [-1, 0, 1, 1], [-1]]),
}

COMBINED = ("gemma 3", "smollm 3", "phi 3")
"""Whose layers have nothing that those of the other forms have not, and the whole body in the long run alone."""


@cache
def module(name: str, queries: bool = False) -> Forms:
    return Forms(FORMS[name], CAPACITY, queries=queries)


@cache
def exported(name: str, queries: bool) -> onnx.ModelProto:
    return ir.to_proto(export_forms(module(name, queries), CAPACITY))


def lowered(
    name: str, target: str, rows: int, *, queries: bool = False, kv_cache: KvType | None = None
) -> tuple[ir.Model, list[RuleReport]]:
    model = ir.from_proto(exported(name, queries))
    return model, lower("target", model, target, rows, kv_cache=kv_cache)


def compare(model: ir.Model, feeds: Arrays, wanted: Arrays, folder: Path, tolerance: float = 3e-5) -> Arrays:
    """Run the model, compare what it computes, and return that."""
    write_engine(model, folder)
    spell_norms_out(folder / "target.onnx")
    found = run_engine(folder / "target.onnx", feeds)
    for output, value in found.items():
        if not output.endswith("_out"):
            np.testing.assert_allclose(value, wanted[output], atol=tolerance, rtol=tolerance, err_msg=output)
            continue
        for row, past in enumerate(feeds["past_length"]):
            end = past + feeds["row_splits"][row + 1] - feeds["row_splits"][row]
            np.testing.assert_allclose(value[row, :, :end], wanted[output][row, :, :end], atol=tolerance)
    return found


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("target", [CPU, CUDA, RTX])
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.long) if n in COMBINED else n for n in FORMS])
def test_every_backend_computes_the_references(name: str, target: str, rows: int, tmp_path: Path) -> None:
    model, _ = lowered(name, target, rows)
    feeds = random_step(FORMS[name], CAPACITY, *TREES[rows])
    compare(model, feeds, module(name).in_numpy(feeds), tmp_path)


@pytest.mark.parametrize("name", ["gemma 2", "gemma 3", "gpt-oss"])
def test_a_backend_without_rules_of_its_own_computes_them_too(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BACKEND_CLASSES, "of-tests", Backend)
    feeds = random_step(FORMS[name], CAPACITY, *TREES[2])
    compare(lowered(name, "of-tests", 2)[0], feeds, module(name).in_numpy(feeds), tmp_path)


@pytest.mark.parametrize(("name", "plain"), [("gemma 2", 0), ("gpt-oss", 0), ("smollm 3", 3), ("phi 3", 1)])
def test_the_torch_front_end_knows_which_attention_it_converts(name: str, plain: int) -> None:
    nodes = traced_of(export_forms(module(name), CAPACITY)).program.graph.nodes
    attention = [node for node in nodes if node.target is branch_attention]
    assert len(attention) == len(FORMS[name])
    assert sum(map(is_plain, attention)) == plain


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_bodies_of_standard_ops_are_inlined_for_tensorrt(rows: int, tmp_path: Path) -> None:
    """The nodes' overloads distinguish bodies of one name."""
    forms = (Form(), Form(window=3), Form(softcap=5.0), Form(sinks=True), Form(softcap=5.0, sinks=True))
    own = Forms(forms, CAPACITY)
    model = export_forms(own, CAPACITY)
    lower("target", model, "tensorrt", 2)  # as a backend of several rows gets it
    assert {each.overload for each in model.functions.values()} == {"", "softcap", "sinks", "softcap_sinks"}
    inlined = ir.from_proto(onnx.inliner.inline_local_functions(ir.to_proto(model)))
    feeds = random_step(forms, CAPACITY, *TREES[rows])
    compare(inlined, feeds, own.in_numpy(feeds), tmp_path)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("name", [name for name, forms in FORMS.items() if not any(form.sinks for form in forms)])
def test_grouped_heads_of_onnx_runtime_compute_them_too(
    name: str, half: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number of float16 is known to a two-thousandth, and logits are up to 4."""
    in_float32(monkeypatch)
    own, feeds = Forms(FORMS[name], CAPACITY), random_step(FORMS[name], CAPACITY, *TREES[1])
    model = export_forms(own.half() if half else own, CAPACITY)
    if half:
        feeds |= {name: feeds[name].astype(np.float16) for name in feeds if "cache" in name}
    reports = lower("target", model, CUDA, 1)
    assert {r.rule: r.applied for r in reports}["GroupQueryAttention"] == len(FORMS[name])
    compare(model, feeds, own.in_numpy(feeds), tmp_path, 0.04 if half else 3e-5)


def test_sinks_are_written_out_on_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_float32(monkeypatch)
    _, reports = lowered("gpt-oss", CUDA, 1)
    by_rule = {r.rule: r for r in reports}
    assert by_rule["GroupQueryAttention"].applied == 0
    assert any("sinks" in reason for reason in by_rule["GroupQueryAttention"].declined)
    assert by_rule["ScatterAttention"].applied == len(FORMS["gpt-oss"])


@pytest.mark.parametrize("left_out", [FuseProjections, GatedUnitOfProduct, CpuNorms])
def test_where_a_rule_does_not_run_nothing_else_changes(
    left_out: type[Rule], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = tuple(rule for rule in BACKEND_CLASSES[CPU].rules() if not isinstance(rule, left_out))
    monkeypatch.setattr(BACKEND_CLASSES[CPU], "rules", lambda: rules)
    model, _ = lowered("gemma 3", CPU, 1)
    feeds = random_step(FORMS["gemma 3"], CAPACITY, *TREES[1])
    compare(model, feeds, module("gemma 3").in_numpy(feeds), tmp_path)


def test_layers_that_share_a_projection_keep_their_others(tmp_path: Path) -> None:
    """The exporter stores equal weights once; what is fused with them differs from layer to layer."""
    own = Forms(FORMS["smollm 3"], CAPACITY)
    for layer in own.layers[1:]:
        layer.q.weight.data.copy_(own.layers[0].q.weight)
    model = export_forms(own, CAPACITY)
    lower("target", model, CPU, 1)
    feeds = random_step(own.forms, CAPACITY, *TREES[1])
    compare(model, feeds, own.in_numpy(feeds), tmp_path)


def test_two_ragged_rows_have_the_bits_of_each_alone(tmp_path: Path) -> None:
    feeds = random_step(FORMS["gemma 3"], CAPACITY, *TREES[2])
    write_engine(lowered("gemma 3", CPU, 2)[0], tmp_path / "two")
    write_engine(lowered("gemma 3", CPU, 1)[0], tmp_path / "one")
    together = run_engine(tmp_path / "two" / "target.onnx", feeds)[names.LOGITS_OUT]
    for row, (first, end) in enumerate(pairwise(feeds["row_splits"])):
        new = end - first
        alone = {name: value[row : row + 1] for name, value in feeds.items() if "cache" in name}
        alone |= {name: feeds[name][first:end] for name in ("token_ids", "positions")}
        alone |= {
            "attn_bias": feeds["attn_bias"][row : row + 1, :, :new],
            "past_length": feeds["past_length"][row:][:1],
        }
        alone |= {"row_splits": np.array([0, new]), "logit_indices": np.arange(new)}
        found = run_engine(tmp_path / "one" / "target.onnx", alone)[names.LOGITS_OUT]
        np.testing.assert_array_equal(found.view(np.uint32), together[first:end].view(np.uint32))


@pytest.mark.parametrize("name", FORMS)
def test_on_the_cpu_a_layer_is_six_nodes_of_ours(name: str) -> None:
    """Norm, packed product, attention with all that is before it, product and sum, the packed product of the unit, the
    unit, product and sum; a window is part of attention, and a cap of logits one node."""
    model, reports = lowered(name, CPU, 1)
    forms, counts = FORMS[name], Counter((node.domain, node.op_type) for node in model.graph)
    applied = {r.rule: r.applied for r in reports}
    assert applied["CpuAttention"] == applied["GatedUnitOfProduct"] == applied["FuseProjections"] == len(forms)
    assert applied["CpuNorms"] == counts[CPU_DOMAIN, "RmsNorm"] == 2 * len(forms) + 1
    assert {domain for domain, _ in counts} == {"", CPU_DOMAIN}
    assert "row_splits" not in {value.name for value in model.graph.inputs}
    assert applied["OwnKernels"] == counts[CPU_DOMAIN, "Softcap"] == 1
    assert counts[CPU_DOMAIN, "BranchAttention"] == counts[CPU_DOMAIN, "GatedUnit"] == len(forms)
    assert not {"Split", "RotaryEmbedding", "Tanh", "Gelu", "WindowBias", "Softmax"} & {op for _, op in counts}
    attention = [node for node in model.graph if node.op_type == "BranchAttention"]
    assert [node.attributes.get_int("window", 0) for node in attention] == [form.window for form in forms]
    assert {node.inputs[5].name for node in attention if node.inputs[5] is not None} == {names.ATTN_BIAS}


@pytest.mark.parametrize("target", [CUDA, RTX, "tensorrt"])
def test_layers_share_one_bias_a_window(target: str) -> None:
    model, _ = lowered("gemma 2", target, 1)
    assert sum(node.op_type == "WindowBias" for node in model.graph) == 1


@pytest.mark.parametrize(
    "name", [name if name in ("gemma 2", "gpt-oss") else pytest.param(name, marks=pytest.mark.long) for name in FORMS]
)
def test_queries_come_out_of_the_node_as_they_are_compared_with_keys(name: str, tmp_path: Path) -> None:
    model, _ = lowered(name, CPU, 1, queries=True)
    feeds = random_step(FORMS[name], CAPACITY, *TREES[1])
    assert names.queries(len(FORMS[name]) - 1) in compare(model, feeds, module(name).in_numpy(feeds), tmp_path)


@pytest.mark.parametrize("kv_cache", [None, "int8"])
@pytest.mark.parametrize("name", FORMS)
def test_probes_have_every_op_and_find_it_exact(name: str, kv_cache: KvType | None) -> None:
    model, _ = lowered(name, CPU, 1, kv_cache=kv_cache)
    ops = probed_ops({names.TARGET: model})
    kinds = Counter(op.node.op_type for op in ops)
    assert kinds["Softcap"] == 1
    assert kinds["GatedUnit"] == 1
    assert kinds["BranchAttention"] == len(set(FORMS[name]))
    graph, outputs = probe_graph(ops)
    attributes = [node.attributes for node in graph.graph if node.op_type == "BranchAttention"]
    assert max(own.get_int("window", 0) for own in attributes) == max(form.window for form in FORMS[name])
    session = cpu_session(ir.to_proto(graph).SerializeToString())
    assert [outputs[output].text for output in differing(session, EVERY)] == []


def test_a_wide_window_is_narrowed_in_a_probe() -> None:
    """Else it would hide nothing of the probe's short past."""
    model, _ = lowered("gemma 2", CPU, 1)
    for node in model.graph:
        if node.op_type == "BranchAttention" and node.attributes.get_int("window", 0):
            node.attributes["window"] = ir.AttrInt64("window", 4096)
    graph, _ = probe_graph(probed_ops({names.TARGET: model}))
    windows = {node.attributes.get_int("window", 0) for node in graph.graph if node.op_type == "BranchAttention"}
    assert windows == {0, 12}


@pytest.fixture(scope="module")
def decoder(toy_recipe: Path) -> Decoder:
    return load_decoder(toy_recipe.parent / "target", "float32", None)


def test_what_a_step_reads_on_the_host_are_sizes(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """`total_sequence_length` comes from the shape of the bias, and `seqlens_k` from no shape but through Range, whose
    output the CUDA provider keeps on the device."""
    in_float32(monkeypatch)
    model, layers = export_target(decoder, CAPACITY), decoder.config.num_layers
    once = ("FuseProjections", "GroupQueryAttention", "UnbranchedBody")  # the body of the gated unit
    applied = {**dict.fromkeys(once, layers), "SkipNorm": 2 * layers - 1, "CopiedSizes": 1}
    assert {r.rule: r.applied for r in lower("target", model, CUDA, rows=1) if r.applied} == applied
    graph = ir.to_proto(model).graph
    made = {output: node for node in graph.node for output in node.output}
    attention = [node for node in graph.node if node.op_type == "GroupQueryAttention"]
    assert len({node.input[5] for node in attention}) == len({node.input[6] for node in attention}) == 1
    total = made[attention[0].input[6]]
    assert (total.op_type, made[total.input[0]].op_type) == ("Cast", "Shape")
    ends = made[attention[0].input[5]]
    past, last = made[ends.input[0]].input
    assert (ends.op_type, past) == ("Cast", names.PAST_LENGTH)
    assert [made[last].op_type, made[made[last].input[0]].op_type] == ["Slice", "Range"]


@pytest.mark.parametrize(
    ("heads", "dtype", "rows", "reason"),
    [
        ({}, torch.float32, 1, "no GroupQueryAttention in float32"),
        ({"head_dim": 12}, torch.float16, 1, "heads of a multiple of 8 numbers up to 256; these have 12"),
        ({"head_dim": 264}, torch.float16, 1, "these have 264"),
        ({}, torch.float16, 2, "several rows: GroupQueryAttention takes several tokens after earlier ones in one row"),
    ],
)
def test_it_declines_with_a_reason(
    heads: dict[str, int], dtype: torch.dtype, rows: int, reason: str, decoder: Decoder
) -> None:
    graph = export_target(Decoder(replace(decoder.config, num_layers=1, **heads)).to(dtype).eval(), CAPACITY)
    reports = {report.rule: report for report in lower("target", graph, CUDA, rows)}
    (declined,) = reports["GroupQueryAttention"].declined
    assert reason in declined
    assert reports["ScatterAttention"].applied == (1 if rows == 1 else 0)


@pytest.mark.parametrize(
    ("head_dim", "positions", "outside"),
    [
        (16, CAPACITY, 0),
        (24, CAPACITY, 4),  # its kernel rotates heads of a multiple of 16 numbers
        (16, CAPACITY - 1, 4),  # it compares the rows of its table with the keys in view, at any positions
    ],
)
def test_what_its_kernel_does_not_rotate_is_rotated_outside(
    head_dim: int, positions: int, outside: int, decoder: Decoder
) -> None:
    one = Decoder(replace(decoder.config, num_layers=1, head_dim=head_dim)).half().eval()
    options = DraftOptions(positions=positions)
    graph = export_draft(DecoderDraft(one), Tree(top_k=2, depth=1, nodes=4), CAPACITY, 300, options)
    reports = {report.rule: report for report in lower("draft", graph, CUDA, 1)}
    assert reports["GroupQueryAttention"].applied == 2
    assert sum(node.op_type == "RotaryEmbedding" for node in graph.graph) == outside
