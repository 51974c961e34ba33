"""Plans with a head whose checkpoint stores integers: they are kept, and the tokens are those of plain decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from torch import Tensor

from outrider import Runtime
from outrider.compiler.build import build
from outrider.compiler.deferred import deferred
from outrider.compiler.inspect import describe
from outrider.compiler.opening import read_config
from outrider.compiler.recipe import Recipe, load_recipe
from outrider.plans.errors import RecipeError
from outrider.plugins.quant_layout import QuantLayout, unpack
from outrider.plugins.reference import dequantize
from outrider.runtime.options.options import Options
from outrider.tools.verify.agreement import compare_drafters
from tests.compiler.eagle3_heads import defer_eagle3, write_eagle3
from tests.compiler.packed_heads import pack_head
from tests.conftest import made_once

CPU = "onnxruntime-cpu"
BITS = (4, 8)
PROMPTS = [[(41 * i) % 299 + 1 for i in range(length)] for length in (60, 9, 1)]


def write_head(folder: Path, bits: int) -> dict[str, Tensor]:
    """A head for the toy with all projections packed, and an embedding of its own."""
    write_eagle3(
        folder, target_hidden=32, vocab=300, draft_vocab=120, intermediate=64, aux_layer_ids=[0, 1, 2],
        own_embedding=True,
    )  # fmt: skip
    return pack_head(folder, bits)


def recipe_of(toy_recipe: Path, head: Path, *overrides: str, weights: str = "null") -> Recipe:
    section = (
        f"{{name: head, kind: eagle3, checkpoint: {head}, weights: {weights}, tree: {{top_k: 3, depth: 2, nodes: 9}}}}"
    )
    return load_recipe(toy_recipe, [f"drafters=[{section}]", *overrides])


@pytest.fixture(scope="module", params=BITS)
def head(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, f"head-int{request.param}", lambda folder: write_head(folder, request.param))


@pytest.fixture(scope="module")
def plan(head: Path, toy_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = recipe_of(toy_recipe, head)
    return made_once(tmp_path_factory, f"{head.name}-plan", lambda out: build(recipe, toy_recipe, out))


def test_the_engine_has_the_integers_of_the_checkpoint(plan: Path, head: Path, toy_recipe: Path) -> None:
    """All of them, though some products became one; the embedding, a table of floats, stays one."""
    graph = onnx.load(plan / "engines" / CPU / "head.onnx").graph
    weights = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    found: dict[str, NDArray[np.float32]] = {}
    for node in graph.node:
        if node.op_type == "QuantMatMul":
            given = {attribute.name: attribute.i for attribute in node.attribute}
            layout = QuantLayout(given["N"], given["K"], given["bits"], given.get("wide", 0), given.get("minimums", 0))
            found[node.input[1]] = dequantize(*unpack(weights[node.input[1]], layout))
            assert layout.bits == int(head.name[-1])
    stored = deferred(defer_eagle3(head, read_config(toy_recipe.parent / "target")))
    rows = {row.tobytes() for matrix in found.values() for row in matrix}
    kept = [each for name, each in stored.items() if each.tensors.quantized(each.stored_name) is not None]
    assert len(kept) == 9
    for each in kept:
        for row in each.read_stored().numpy():
            assert row.tobytes() in rows, each.stored_name
    assert [each.dtype for each in weights.values() if each.shape == (300, 32)] == [np.float32]
    assert not [node for node in graph.node if node.op_type == "MatMul"]


@pytest.mark.parametrize("options", [Options(temperature=0.0), Options(temperature=0.9, seed=3)])
def test_tokens_are_those_of_plain_decoding(plan: Path, options: Options) -> None:
    runtime = Runtime.load(plan, threads=1)
    (check,) = compare_drafters(
        runtime.session(), PROMPTS, ["head"], options | Options(max_new_tokens=24), 0.0, exact=True
    ).values()
    assert check.tokens == 24 * len(PROMPTS)
    assert check.partings == []


def test_weights_of_the_recipe_round_integers_again_only_where_it_says_so(toy_recipe: Path, tmp_path: Path) -> None:
    """As for decoders: integers are kept, the embedding, which is stored as floats, is rounded."""

    def engine() -> dict[str, Any]:
        shown: dict[str, Any] = describe(tmp_path / "plan")["backends"][CPU]["engines"]["head"]
        return shown

    write_head(tmp_path / "head", 8)
    build(recipe_of(toy_recipe, tmp_path / "head", weights="{type: int8}"), toy_recipe, tmp_path / "plan")
    assert any(op.endswith("QuantGather") for op in engine()["ops"])
    assert set(engine()["weights"]) - {"bool", "int64"} == {"int8", "float32"}
    with pytest.raises(RecipeError, match=r"drafters\[0\]\.weights\.requantize is false, and .* integers of 8 bits"):
        build(recipe_of(toy_recipe, tmp_path / "head", weights="{type: int4}"), toy_recipe, tmp_path / "plan")
    again = recipe_of(toy_recipe, tmp_path / "head", weights="{type: int4, requantize: true}")
    build(again, toy_recipe, tmp_path / "plan")
    assert "int4" in engine()["weights"]
