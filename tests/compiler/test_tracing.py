"""What is left out of an export changes none."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import onnx_ir as ir
import pytest
import torch

from outrider.compiler.checkpoint import defer_decoder
from outrider.compiler.export import export_draft, export_target, tracing
from outrider.compiler.models.drafting import BlockDraft
from outrider.plans.manifest import Tree

from .block_heads import VOCAB, load_block, random_target, write_block
from .eagle3_heads import target_config


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
