"""Lowering keeps what a model computes: every form of BranchAttention against PyTorch, and against each other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto

import outrider.compiler.lowering as lowering
from outrider.compiler.checkpoint import load_decoder
from outrider.compiler.engines.onnxruntime import OnnxRuntimeEngines
from outrider.compiler.export import export_target
from outrider.compiler.lowering import lower
from outrider.compiler.lowering.attention import CpuAttention
from outrider.compiler.lowering.functions import FunctionBody
from outrider.compiler.lowering.gated_unit import FuseGatedUnit
from outrider.compiler.lowering.inside import NormInside, PackedInside, RotateInside
from outrider.compiler.lowering.projections import FuseProjections
from outrider.compiler.lowering.rule import Lowering, Rule, apply_rules
from outrider.compiler.lowering.scatter_attention import ScatterAttention, UpdateOnceAttention
from outrider.compiler.lowering.sizes import CopiedSizes
from outrider.compiler.lowering.softcap import FuseSoftcap
from outrider.compiler.models.decoder import Decoder
from outrider.compiler.models.eager import sequence_logits
from outrider.plugins.reference import bim_mask
from outrider.plugins.schema import CPU_DOMAIN
from tests.compiler.steps import Arrays, depths, flat, run_engine, write_engine

CPU = "onnxruntime-cpu"
CAPACITY = 32


# The rules, on a whole model.


@pytest.fixture(scope="module")
def decoder(toy_recipe: Path) -> Decoder:
    return load_decoder(toy_recipe.parent / "target", "float32", None)


def engine(decoder: Decoder, folder: Path, rows: int = 1, target: str = CPU) -> tuple[Path, list[Any]]:
    graph = export_target(decoder, CAPACITY)
    reports = lower("target", graph, target, rows)
    write_engine(graph, folder)
    return folder / "target.onnx", reports


def run_rows(path: Path, decoder: Decoder, tokens: list[list[int]], parents: list[NDArray[np.int64]]) -> list[Arrays]:
    """Feed each row its tokens in two steps (a past, then a tree); logits of the second step, all tokens."""
    config, rows = decoder.config, len(tokens)
    shape = (rows, config.num_kv_heads, CAPACITY, config.head_dim)
    caches = {f"{kind}_cache.{i}": np.zeros(shape, np.float32) for kind in "kv" for i in range(config.num_layers)}
    past, found = [0] * rows, []
    bim = np.full((rows, CAPACITY), -1, np.int64)
    chains = [
        np.arange(len(row) - len(parent), dtype=np.int64) - 1 for row, parent in zip(tokens, parents, strict=True)
    ]
    for trees in (chains, parents):
        new = [len(t) for t in trees]
        view = max(p + n for p, n in zip(past, new, strict=True)) + 3
        branch, splits = np.zeros(sum(new), np.int64), np.cumsum([0, *new])
        bias = bim_mask(bim, np.array(past), splits, branch, flat(trees), view, max(new))
        positions = [place for parent, first in zip(trees, past, strict=True) for place in depths(parent, first)]
        feeds = {
            "token_ids": np.concatenate(
                [np.array(t[p : p + n], np.int64) for t, p, n in zip(tokens, past, new, strict=True)]
            ),
            "positions": np.array(positions, np.int64),
            "row_splits": splits,
            "attn_bias": bias,
            "past_length": np.array(past, np.int64),
            "logit_indices": np.arange(sum(new), dtype=np.int64),
            **caches,
        }
        outputs = run_engine(path, feeds)
        caches = {name: outputs[f"{name}_out"] for name in caches}
        past = [p + n for p, n in zip(past, new, strict=True)]
        found.append(outputs)
    return found


TREE = np.array([-1, 0, 0, 1, 1, 2], np.int64)
TOKENS = [5, 17, 40, 99, 250, 3, 77, 8, 120, 64]  # four of the past, then the tree


def test_our_kernel_gives_what_standard_attention_gives(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused, _ = engine(decoder, tmp_path / "fused")
    monkeypatch.setitem(lowering.RULES, CPU, (FunctionBody(),))
    standard, _ = engine(decoder, tmp_path / "standard")
    found, wanted = (run_rows(path, decoder, [TOKENS], [TREE]) for path in (fused, standard))
    for a, b in zip(found, wanted, strict=True):
        for name in a:
            np.testing.assert_allclose(a[name], b[name], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rule", [CpuAttention, ScatterAttention, UpdateOnceAttention])
def test_each_path_of_a_tree_gives_the_logits_of_that_path_alone_in_pytorch(
    decoder: Decoder, rule: type[Rule], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(lowering.RULES, CPU, (rule(), FunctionBody()))
    path, reports = engine(decoder, tmp_path / "engine")
    assert [report.applied for report in reports] == [decoder.config.num_layers, 0]
    logits = run_rows(path, decoder, [TOKENS], [TREE])[1]["logits"]
    for node in range(len(TREE)):
        line = [node]
        while TREE[line[0]] >= 0:
            line.insert(0, int(TREE[line[0]]))
        alone = sequence_logits(decoder, TOKENS[:4] + [TOKENS[4 + i] for i in line])
        np.testing.assert_allclose(logits[node], alone[-1].numpy(), atol=1e-4, rtol=1e-4)


def test_two_ragged_rows_have_the_bits_of_each_alone(decoder: Decoder, tmp_path: Path) -> None:
    path, _ = engine(decoder, tmp_path / "two", rows=2)
    other = [9, 30, 31, 200, 201]
    chain = np.array([-1, 0], np.int64)
    found = run_rows(path, decoder, [TOKENS, other], [TREE, chain])[1]["logits"].view(np.uint32)
    alone, _ = engine(decoder, tmp_path / "one")
    for tokens, tree, place in ((TOKENS, TREE, slice(0, 6)), (other, chain, slice(6, None))):
        expected = run_rows(alone, decoder, [tokens], [tree])[1]["logits"].view(np.uint32)
        np.testing.assert_array_equal(found[place], expected)


def test_one_node_a_layer_norms_rotates_appends_and_attends(decoder: Decoder, tmp_path: Path) -> None:
    path, reports = engine(decoder, tmp_path / "one")
    layers = decoder.config.num_layers
    assert decoder.config.qk_norm
    once = ("FuseProjections", "FuseGatedUnit", "CpuAttention", "RotateInside", "NormInside", "PackedInside")
    assert {r.rule: r.applied for r in reports if r.applied} == {
        **dict.fromkeys(once, layers),
        "FuseSkipNorms": 2 * layers - 1,  # all but the first norm, of the embedding, and the last, of picked rows
        "CpuNorms": 2,
    }
    declined = {r.rule: r.declined for r in reports if r.declined}
    assert declined == {"QueriesFromInside": {"nobody asks for its queries": layers}}
    graph = onnx.load(path, load_external_data=False).graph
    ops = [node.op_type for node in graph.node]
    assert ops.count("BranchAttention") == layers
    assert not {"Split", "RotaryEmbedding"} & set(ops)
    assert {node.domain for node in graph.node} == {"", CPU_DOMAIN}
    assert "row_splits" not in {value.name for value in graph.input}


@pytest.mark.parametrize("left_out", [FuseProjections, FuseGatedUnit, RotateInside, NormInside, PackedInside])
def test_what_the_kernel_takes_over_stays_what_it_was(
    left_out: type[Rule], decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a rule does not run, those after it decline with a reason, and the engine computes the same."""
    whole, _ = engine(decoder, tmp_path / "whole")
    rules = tuple(rule for rule in lowering.RULES[CPU] if not isinstance(rule, left_out))
    monkeypatch.setitem(lowering.RULES, CPU, rules)
    part, reports = engine(decoder, tmp_path / "part")
    if left_out in (RotateInside, FuseProjections):
        assert any(report.declined for report in reports)
    found, wanted = (run_rows(path, decoder, [TOKENS], [TREE])[1]["logits"] for path in (part, whole))
    np.testing.assert_allclose(found, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("head_dim", [2, 6, 24, None])
def test_heads_of_any_size_and_layers_that_share_a_projection(
    head_dim: int | None, decoder: Decoder, tmp_path: Path
) -> None:
    """The exporter stores equal weights once; what is fused with them differs from layer to layer."""
    torch.manual_seed(0)
    other = Decoder(replace(decoder.config, head_dim=head_dim or decoder.config.head_dim)).eval()
    for weight in other.parameters():
        torch.nn.init.normal_(weight, std=0.05)
    if head_dim is None:
        with torch.no_grad():
            for layer in other.layers[1:]:
                layer.q.weight.copy_(other.layers[0].q.weight)
    path, _ = engine(other, tmp_path / "other")
    found = run_rows(path, other, [TOKENS], [np.arange(6) - 1])[1]["logits"]
    np.testing.assert_allclose(found, sequence_logits(other, TOKENS)[4:].numpy(), atol=1e-4, rtol=1e-4)


# Declining.


def matched(rule: Rule, text: str) -> tuple[ir.Graph, list[ir.Node], Lowering]:
    """A graph in ONNX's text form, a node after each ";", and its nodes that the rule is for."""
    text = text.replace(";", "\n")
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 24, "outrider.cpu" : 1]> g {text}')
    graph = ir.from_proto(proto).graph
    return graph, [node for node in graph if rule.pattern(node)], Lowering("target", ir.Model(graph, ir_version=10), 1)


def assert_declined(rule: Rule, text: str, reason: str | None) -> None:
    _, (node,), state = matched(rule, text)
    found = rule.check(node, state)
    assert found is None if reason is None else found is not None and reason in found


def unit(body: str) -> str:
    weights = "float[2, 2] w = {1.0, 2.0, 3.0, 4.0}, float[2, 2] u = {5.0, 6.0, 7.0, 8.0}, float[2] b = {1.0, 2.0}"
    body = body.replace("SILU", "s = Sigmoid(gate); a = Mul(gate, s)")
    body = body.replace("GELU", 'a = Gelu<approximate = "tanh">(gate)')
    return f"(float[1, N, 2] x) => (float[1, N, 2] y) <{weights}> {{ {body} }}"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("gate = MatMul(x, w); up = MatMul(x, u); SILU; y = Mul(a, up)", None),
        ("gate = Relu(x); up = MatMul(x, u); SILU; y = Mul(a, up)", "no product with a constant matrix"),
        ("gate = MatMul(x, w); z = Relu(x); up = MatMul(z, u); SILU; y = Mul(a, up)", None),
        ("g = MatMul(x, w); gate = Add(g, b); p = MatMul(x, u); up = Add(p, b); SILU; y = Mul(a, up)", None),
        ("g = MatMul(x, w); gate = Add(g, w); up = MatMul(x, u); SILU; y = Mul(a, up)", "no product with a constant"),
        ("gate = MatMul(x, w); up = MatMul(x, u); SILU; y0 = Mul(a, up); y = Add(y0, up)", "read by others too"),
        ("gate = MatMul(x, w); up = MatMul(x, u); SILU; y = Mul(a, up); more = Identity(gate)", "read by others too"),
        ("gate = MatMul(x, w); up = MatMul(x, u); GELU; y = Mul(up, a)", None),
        ("gate = MatMul(x, w); up = MatMul(x, u); GELU; y = Mul(a, up); more = Identity(gate)", "read by others too"),
    ],
)
def test_a_gated_unit_is_fused_or_says_why_not(body: str, reason: str | None) -> None:
    assert_declined(FuseGatedUnit(), unit(body), reason)


def test_gelu_by_the_error_function_is_no_unit_of_ours() -> None:
    text = unit("gate = MatMul(x, w); up = MatMul(x, u); a = Gelu(gate); y = Mul(a, up)")
    assert matched(FuseGatedUnit(), text)[1] == []


@pytest.mark.parametrize(
    ("rotation", "reason"),
    [
        ("rq = RotaryEmbedding(q, cos, sin, p); rk = RotaryEmbedding(k, cos, sin, p)", None),
        ("rq = RotaryEmbedding(q, cos, sin, p); rk = Identity(k)", "not rotated right before it"),
        ("rq = RotaryEmbedding(q, cos, sin); rk = RotaryEmbedding(k, cos, sin)", "has no positions"),
        ("rq = RotaryEmbedding(q, cos, sin, p); rk = RotaryEmbedding(k, cot, sin, p)", "by other angles"),
        ("rq = RotaryEmbedding<interleaved = 1>(q, cos, sin, p); rk = RotaryEmbedding(k, cos, sin, p)", "interleaved"),
        ("rq = RotaryEmbedding<PART>(q, cos, sin, p); rk = RotaryEmbedding<PART>(k, cos, sin, p)", None),
        ("rq = RotaryEmbedding<PART>(q, cos, sin, p); rk = RotaryEmbedding(k, cos, sin, p)", "other parts"),
    ],
)
def test_a_rotation_moves_inside_or_says_why_not(rotation: str, reason: str | None) -> None:
    body = f"{rotation}; o, kc, vc = outrider.cpu.BranchAttention(rq, rk, k, c, c, b, l)"
    inputs = "float[9, 2] cos, float[9, 2] sin, float[9, 2] cot, int64[1, N] p, float[1, N, 8] q, float[1, N, 4] k, "
    inputs += "float[1, 1, 9, 4] c, float[1, 1, N, T] b, int64[1] l"
    text = f"({inputs}) => (float[1, N, 8] o) {{ {body.replace('PART', 'rotary_embedding_dim = 4')} }}"
    assert_declined(RotateInside(), text, reason)


@pytest.mark.parametrize(
    ("capped", "reason"),
    [
        ("d = Div(x, c); t = Tanh(d); y = Mul(t, c)", None),
        ("d = Div(x, c); t = Tanh(d); y = Mul(c, t)", None),
        ("d = Div(x, c); t = Tanh(d); y = Mul(t, e)", "another number than it was divided by"),
        ("d = Div(c, x); t = Tanh(d); y = Mul(t, c)", "another number than it was divided by"),
        ("d = Mul(x, c); t = Tanh(d); y = Mul(t, c)", "no quotient"),
        ("d = Div(x, c); t = Tanh(d); y0 = Mul(t, c); y = Add(y0, t)", "read by others too"),
    ],
)
def test_a_cap_is_fused_or_says_why_not(capped: str, reason: str | None) -> None:
    text = f"(float[M, 2] x) => (float[M, 2] y) <float c = {{30.0}}, float e = {{29.0}}> {{ {capped} }}"
    assert_declined(FuseSoftcap(), text, reason)
    if reason is None:
        graph, (node,), state = matched(FuseSoftcap(), text)
        FuseSoftcap().rewrite(node, state)
        (only,) = graph
        assert (only.domain, only.op_type, only.attributes["cap"].as_float()) == (CPU_DOMAIN, "Softcap", 30.0)
        assert only.outputs[0].name == "y"


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
