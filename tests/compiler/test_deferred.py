"""Graphs of modules without weights, and what an export leaves out: the same graphs, and each weight is read once."""

from __future__ import annotations

import re
import shutil
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import onnx_ir as ir
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.compiler.build import build
from outrider.compiler.checkpoint import defer_decoder, load_decoder
from outrider.compiler.deferred import deferred
from outrider.compiler.export import export_draft, export_target, tracing
from outrider.compiler.lowering import lower
from outrider.compiler.models.drafting import BlockDraft
from outrider.compiler.quantization.graph import quantize
from outrider.compiler.quantization.weight_form import WeightForm
from outrider.compiler.recipe import load_recipe
from outrider.compiler.weights import Weights
from outrider.plans.errors import CheckpointError
from outrider.plans.manifest import Tree

from .block_heads import VOCAB, load_block, random_target, write_block
from .eagle3_heads import target_config
from .steps import write_engine

CPU, CAPACITY = "onnxruntime-cpu", 32
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def checkpoint(toy_recipe: Path, tmp_path: Path) -> Path:
    return shutil.copytree(toy_recipe.parent / "target", tmp_path / "target")


def changed(checkpoint: Path, name: str, change: Callable[[Tensor], Tensor]) -> None:
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    tensors[name] = change(tensors[name].clone())
    save_file(tensors, file, metadata={"format": "pt"})


def write(graph: ir.Model, folder: Path, form: WeightForm | None) -> None:
    quantize("target", graph, form)
    lower("target", graph, CPU, 1)
    write_engine(graph, folder)


def serialised(graph: ir.Model) -> bytes:
    return ir.to_proto(graph).SerializeToString(deterministic=True)


@pytest.mark.usefixtures("fresh_exports")
def test_the_targets_graph_is_that_of_the_loaded_model(checkpoint: Path) -> None:
    changed(checkpoint, "model.layers.1.input_layernorm.weight", lambda w: w * 2)  # equal norms are merged
    loaded, lazy, again = (
        serialised(export_target(model, CAPACITY, (0, 1)))
        for model in (load_decoder(checkpoint), *(defer_decoder(checkpoint) for _ in range(2)))
    )
    assert lazy == loaded
    assert lazy == again


@pytest.mark.parametrize("form", [None, WeightForm(4, 8)])
def test_weights_are_read_once_and_let_go(
    form: WeightForm | None, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, alive, most, original = list[str](), list[weakref.ref[Tensor]](), 0, Weights.read

    def watched(self: Weights, name: str) -> Tensor:
        nonlocal most
        most = max(most, sum(each() is not None for each in alive))
        tensor = original(self, name)
        if tensor.ndim == 2:
            read.append(name)
            alive.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(Weights, "read", watched)
    graph = export_target(defer_decoder(checkpoint), CAPACITY)
    read.clear()  # the test's shared exports read them
    write(graph, tmp_path / "engine", form)
    assert sorted(set(read)) == sorted(n for n, stored in Weights(checkpoint).found.items() if len(stored.shape) == 2)
    assert len(read) == len(set(read))
    assert most <= 2  # the first of q, k and v, while the others are read


@pytest.mark.usefixtures("fresh_exports")
def test_a_weight_that_is_not_finite_fails_the_build_as_it_is_written(checkpoint: Path, tmp_path: Path) -> None:
    changed(checkpoint, UP, lambda weight: weight.index_fill(0, torch.tensor(3), torch.nan))
    recipe = tmp_path / "model.yaml"
    recipe.write_text("name: toy\ntarget: {checkpoint: target}\ncapacity: {context: 160, prefill_chunk: 16}\n")
    said = f"'{UP}' holds values that are not finite in float32; the file is damaged"
    weight = deferred(defer_decoder(checkpoint))["layers.1.up.weight"]
    with pytest.raises(CheckpointError, match=said):
        weight.numpy()
    with pytest.raises(CheckpointError, match=said):
        build(load_recipe(recipe, ["target.weights={type: int4}"]), recipe, tmp_path / "plan")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.yaml", "target"]


def test_a_file_that_changes_under_a_build_is_refused(checkpoint: Path) -> None:
    tensors = Weights(checkpoint)
    changed(checkpoint, UP, lambda weight: weight[:-1])
    with pytest.raises(CheckpointError, match=f"tensor '{re.escape(UP)}' changed while it was read; start again"):
        tensors.read(UP)


def test_a_weight_too_large_for_its_scales_is_named(checkpoint: Path, tmp_path: Path) -> None:
    changed(checkpoint, UP, lambda weight: weight.index_fill(0, torch.tensor(3), 1e8))
    with pytest.raises(CheckpointError, match=rf"'{UP}' has values of 1e\+08, too large for int4, whose scales"):
        write(export_target(defer_decoder(checkpoint), CAPACITY), tmp_path / "engine", WeightForm(4, 8))


def of_target(toy_recipe: Path, folder: Path) -> ir.Model:
    return export_target(defer_decoder(toy_recipe.parent / "target", "float16"), 32, (0, 1))


def of_block_head(toy_recipe: Path, folder: Path) -> ir.Model:
    write_block(folder, layout="deepspec", markov=("rnn", 6), confidence="hidden")
    draft = BlockDraft(load_block(folder, target_config()), random_target()).to(torch.float16)
    return export_draft(draft, Tree(top_k=2, depth=1, nodes=4), 64, VOCAB)


@pytest.mark.long
@pytest.mark.usefixtures("fresh_exports")
@pytest.mark.parametrize("export", [of_target, of_block_head])
def test_the_exporter_makes_the_same_nodes_with_all_that_it_does(
    export: Callable[[Path, Path], ir.Model], toy_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No type is promoted that a module does not cast, no operator comes apart, and no other rewrite applies."""

    def nodes() -> list[str]:
        return [node.op_type for node in export(toy_recipe, tmp_path).graph]

    found = nodes()
    monkeypatch.setattr(tracing, "_no_detours", nullcontext)
    assert found == nodes()
