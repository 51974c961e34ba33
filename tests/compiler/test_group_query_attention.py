"""BranchAttention as GroupQueryAttention computes what the op's function body computes, on the CPU provider."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray

import outrider.compiler.lowering as lowering
from outrider.compiler.checkpoint import load_decoder
from outrider.compiler.export import export_draft, export_target
from outrider.compiler.lowering import lower
from outrider.compiler.lowering.functions import FunctionBody
from outrider.compiler.models.decoder import Decoder
from outrider.compiler.models.drafting import DecoderDraft
from outrider.plans import names
from outrider.plans.manifest import Tree
from outrider.plugins.reference import bim_mask
from tests.compiler.grouped_attention import CUDA, in_float32, spell_norms_out
from tests.compiler.steps import write_engine
from tests.cpu_session import cpu_session

CAPACITY = 64
NOBODY = -2


@dataclass(frozen=True)
class Fed:
    """A step of one row: tokens, their parents in the step (-1: none), and the branch of each."""

    tokens: Sequence[int]
    parent: Sequence[int]
    branch: Sequence[int]


def chain(tokens: Sequence[int], branch: int = 0) -> Fed:
    return Fed(tokens, [i - 1 for i in range(len(tokens))], [branch] * len(tokens))


STEPS = {
    "one token at a time": [chain([t]) for t in (5, 17, 40, 99)],
    "a prompt, its rest after a prefix, a token": [chain(range(3, 14)), chain(range(40, 57)), chain([8])],
    "a tree": [chain([5, 17, 40]), Fed([99, 250, 3, 77, 8, 120], [-1, 0, 0, 1, 1, 2], [0] * 6), chain([64])],
    "branches of one row": [
        chain([5, 17, 40, 99], -1),  # what all see
        Fed([11, 12, 13, 21, 22], [-1, 0, 1, -1, 3], [0, 0, 0, 1, 1]),
        Fed([14, 15, 23, 24, 25], [-1, 0, -1, 2, 2], [0, 0, 1, 1, 1]),  # a chain, and a tree
    ],
    "copies that fill a size": [chain([5, 17]), Fed([9, 30, 31, 30, 30], [-1, 0, 1, 0, 0], [0] * 5), chain([8])],
}


def write(decoder: Decoder, folder: Path) -> tuple[Path, list[Any]]:
    graph = export_target(decoder, CAPACITY)
    reports = lower("target", graph, CUDA, rows=1)
    write_engine(graph, folder)
    return folder / "target.onnx", reports


def feed(path: Path, decoder: Decoder, steps: Sequence[Fed], dtype: Any = np.float32) -> list[NDArray[Any]]:
    """Logits of all tokens of each step, over one KV cache that the session writes in place; the cache comes last."""
    session, config = cpu_session(path), decoder.config
    shape = (1, config.num_kv_heads, CAPACITY, config.head_dim)
    caches = {f"{kind}_cache.{i}": np.zeros(shape, dtype) for kind in "kv" for i in range(config.num_layers)}
    bim, position, past, found = np.full((1, CAPACITY), NOBODY, np.int64), dict[int, int](), 0, []
    known = {each.name for each in session.get_inputs()}
    for step in steps:
        n, parent, branch = len(step.tokens), np.array(step.parent), np.array(step.branch)
        view = min(past + n + 5, CAPACITY)  # after the new tokens are slots of nobody
        bias = bim_mask(bim, np.array([past]), np.array([0, n]), branch, parent, view, n)
        positions: list[int] = []
        for p, b in zip(step.parent, step.branch, strict=True):
            positions.append(position.get(b, position.get(-1, 0)) if p < 0 else positions[p] + 1)
        for place, b in zip(positions, step.branch, strict=True):
            position[b] = max(position.get(b, 0), place + 1)
        bim[0, past : past + n] = branch
        feeds: dict[str, NDArray[Any]] = {
            names.TOKEN_IDS: np.array(step.tokens),
            names.POSITIONS: np.array(positions),
            names.ATTN_BIAS: bias,
            names.PAST_LENGTH: np.array([past]),
            names.LOGIT_INDICES: np.arange(n),
            names.ROW_SPLITS: np.array([0, n]),
        }
        binding = session.io_binding()
        for name, array in {**feeds, **caches}.items():
            if name in known:
                binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        logits = np.zeros((n, config.vocab_size), np.float32)
        for name, array in {"logits": logits, **{f"{name}_out": array for name, array in caches.items()}}.items():
            binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        session.run_with_iobinding(binding)
        found.append(logits)
        past += n
    return [*found, np.stack(list(caches.values()))[:, :, :, :past].astype(np.float32)]


@pytest.fixture(scope="module")
def decoder(toy_recipe: Path) -> Decoder:
    decoder = load_decoder(toy_recipe.parent / "target", "float32", None)
    torch.manual_seed(5)
    with torch.no_grad():
        for layer in decoder.layers:  # which are 1 in a fresh checkpoint
            for norm in (layer.q_norm, layer.k_norm):
                norm.weight.uniform_(0.5, 1.5)
    return decoder


@pytest.fixture(scope="module")
def engines(decoder: Decoder, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The graph lowered for CUDA, and with the ops' function bodies."""
    folder = tmp_path_factory.mktemp("engines")
    with pytest.MonkeyPatch.context() as patch:
        in_float32(patch)
        lowered, reports = write(decoder, folder / "lowered")
        layers = decoder.config.num_layers
        once = ("FuseProjections", "GroupQueryAttention", "RotateInside", "NormInside", "PackedInside")
        applied = {**dict.fromkeys(once, layers), "FuseSkipNormsCuda": 2 * layers - 1, "CopiedSizes": 1}
        assert {r.rule: r.applied for r in reports if r.applied} == applied
        assert spell_norms_out(lowered) == layers
        patch.setitem(lowering.RULES, CUDA, (FunctionBody(),))
        body, _ = write(decoder, folder / "body")
    return lowered, body


def test_it_computes_what_the_function_body_computes(decoder: Decoder, engines: tuple[Path, Path]) -> None:
    for steps in STEPS.values():
        lowered, body = (feed(path, decoder, steps) for path in engines)
        for own, expected in zip(lowered, body, strict=True):
            np.testing.assert_allclose(own, expected, atol=1e-5, rtol=1e-5)


def test_in_float16_it_differs_by_what_rounding_does(
    decoder: Decoder, engines: tuple[Path, Path], tmp_path: Path
) -> None:
    """A number of the type is known to a two-thousandth; over four layers that makes 0.4 % of the largest logit."""
    half = copy.deepcopy(decoder).half()
    lowered, reports = write(half, tmp_path / "half")
    assert {r.rule: r.applied for r in reports}["GroupQueryAttention"] == decoder.config.num_layers
    spell_norms_out(lowered)
    for steps in STEPS.values():
        found, expected = feed(lowered, decoder, steps, np.float16), feed(engines[1], decoder, steps)
        for own, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(own, other, atol=0.01 * np.abs(other).max())


def test_what_a_step_reads_on_the_host_are_sizes(engines: tuple[Path, Path]) -> None:
    """`total_sequence_length` comes from the shape of the bias, and `seqlens_k` from no shape but through Range, whose
    output the CUDA provider keeps on the device."""
    graph = onnx.load(engines[0], load_external_data=False).graph
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
    ("head_dim", "positions", "reason"),
    [
        (24, CAPACITY, "its kernel rotates heads of a multiple of 16 numbers, and these have 24"),
        # The op compares the rows of its table with the keys in view, at any positions.
        (16, CAPACITY - 1, "it wants angles for every slot's position, 64, and the table has 63"),
    ],
)
def test_what_its_kernel_does_not_rotate_is_rotated_outside(
    head_dim: int, positions: int, reason: str, decoder: Decoder
) -> None:
    one = Decoder(replace(decoder.config, num_layers=1, head_dim=head_dim)).half().eval()
    graph = export_draft(DecoderDraft(one), Tree(top_k=2, depth=1, nodes=4), CAPACITY, 300, positions=positions)
    reports = {report.rule: report for report in lower("draft", graph, CUDA, 1)}
    assert reports["RotateInside"].declined == {reason: 2}
    assert reports["GroupQueryAttention"].applied == 2
    assert sum(node.op_type == "RotaryEmbedding" for node in graph.graph) == 4
