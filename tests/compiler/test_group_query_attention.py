"""BranchAttention as GroupQueryAttention: what it reads, and where it declines. What it computes is tested in
`test_attention_forms.py`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx_ir as ir
import pytest
import torch

from outrider.compiler.checkpoint import load_decoder
from outrider.compiler.export import DraftOptions, export_draft, export_target
from outrider.compiler.lowering import lower
from outrider.compiler.models.decoder import Decoder
from outrider.compiler.models.drafting import DecoderDraft
from outrider.plans import names
from outrider.plans.manifest import Tree
from tests.compiler.grouped_attention import CUDA, in_float32

CAPACITY = 64


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
