"""A recipe's copy with another tree: the same text but for the tree, and the same paths wherever it lies."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.compiler.recipe import load_recipe
from outrider.compiler.recipe_copy import RecipeCopy
from outrider.compiler.recipe_drafters import NgramSection
from outrider.plans.errors import RecipeError
from outrider.plans.manifest import Tree

TREE, CHAIN = Tree(top_k=3, depth=2, nodes=9), Tree(top_k=1, depth=4, nodes=6)
WRITTEN = "tree: {top_k: 3, depth: 2, nodes: 9}"
HEADER = "# what it is for\nname: pair   # a name\ntarget:\n  checkpoint: models/target # big\n"
FOOTER = "capacity:\n  context: 512  # tokens\nheld_out: text/held_out.jsonl\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("target", "drafter"):
        (tmp_path / "recipes" / "models" / name).mkdir(parents=True)
    (tmp_path / "recipes" / "text").mkdir()
    (tmp_path / "recipes" / "text" / "held_out.jsonl").write_text("{}\n")
    (tmp_path / "elsewhere").mkdir()
    return tmp_path


def recipe(folder: Path, drafters: str, header: str = HEADER) -> Path:
    path = folder / "recipes" / "model.yaml"
    path.write_bytes(f"{header}drafters:\n  - {{name: lookup, kind: ngram}}\n{drafters}{FOOTER}".encode())
    return path


D = "name: d, kind: model, checkpoint: models/drafter"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (f"  - {{{D}, tree: {{top_k: 9, depth: 1, nodes: 4}}}}  # x\n", f"  - {{{D}, {WRITTEN}}}  # x\n"),
        (f"  - {{tree: auto, {D}}}\n", f"  - {{{WRITTEN}, {D}}}\n"),
        (f"  - {{{D}, gamma: 4}}\n", f"  - {{{D}, {WRITTEN}}}\n"),
        (f"  - {{{D}, gamma: 4, tree: null}}\n", f"  - {{{D}, gamma: null, {WRITTEN}}}\n"),
        (f"  - {{{D}, gamma: {{max: 6}}}}\n", f"  - {{{D}, {WRITTEN}}}\n"),
        (
            "  - name: d\n    kind: model\n    gamma:\n      min: 2\n      max: 6  # long\n    # then\n"
            "    checkpoint: models/drafter\n",
            f"  - name: d\n    kind: model\n    tree:\n      {WRITTEN.removeprefix('tree: ')}  # long\n    # then\n"
            "    checkpoint: models/drafter\n",
        ),
        (f"  - {{{D}}}\n", f"  - {{{D.replace('checkpoint', f'{WRITTEN}, checkpoint')}}}\n"),
        (
            "  - name: 'd'  # quoted\n    kind: model\n    tree:\n      top_k: 8  # wide\n      nodes: 60\n"
            "      # deep\n      depth: 5\n    checkpoint: models/drafter\n",
            "  - name: 'd'  # quoted\n    kind: model\n    tree:\n      top_k: 3  # wide\n      nodes: 9\n"
            "      # deep\n      depth: 2\n    checkpoint: models/drafter\n",
        ),
        (
            "  - checkpoint: models/drafter  # here\n    kind: model\n    name: d\n",
            f"  - {WRITTEN}\n    checkpoint: models/drafter  # here\n    kind: model\n    name: d\n",
        ),
        (
            "  - name: d\n    kind: model\n    tree:\n    checkpoint: models/drafter\n",
            f"  - name: d\n    kind: model\n    {WRITTEN}\n    checkpoint: models/drafter\n",
        ),
    ],
)
def test_the_tree_is_all_that_changes(folder: Path, before: str, after: str) -> None:
    path = recipe(folder, before)
    out = path.with_name("copy.yaml")
    RecipeCopy(path, out, "d").write(TREE)
    assert out.read_text(encoding="utf-8") == path.read_text(encoding="utf-8").replace(before, after)
    assert sorted(p.name for p in path.parent.iterdir()) == ["copy.yaml", "model.yaml", "models", "text"]


def test_a_chain_stays_a_chain(folder: Path) -> None:
    for before, after in (("gamma: 4", "gamma: 5"), ("tree: {nodes: 4, top_k: 2, depth: 2}", "nodes: 6, top_k: 1")):
        path = recipe(folder, f"  - {{{D}, {before}}}\n")
        RecipeCopy(path, path.with_name("copy.yaml"), "d").write(CHAIN)
        assert after in path.with_name("copy.yaml").read_text(encoding="utf-8")


def test_paths_lead_to_the_same_files_from_another_folder(folder: Path) -> None:
    weights = "weights: {type: int4, method: awq, calibration: text/held_out.jsonl}"
    header = HEADER.replace("models/target # big", f"models/target # big\n  {weights}")
    path, out = recipe(folder, f"  - {{{D}, {weights}}}\n", header), folder / "elsewhere" / "copy.yaml"
    path.write_text(path.read_text() + "backends: [onnxruntime-cpu, {kind: tensorrt, timing_cache: kernels.cache}]\n")
    RecipeCopy(path, out, "d").write(TREE)
    old, new = load_recipe(path), load_recipe(out)
    caches = [r.timing_cache_path(target) for r in (old, new) for target in r.backends]
    assert caches == 2 * [None, folder / "recipes" / "kernels.cache"]
    assert (new.checkpoint_path, new.held_out_path) == (old.checkpoint_path, old.held_out_path)
    (section,) = (d for d in new.drafters if not isinstance(d, NgramSection))
    assert new.drafter_path(section) == folder / "recipes" / "models" / "drafter"
    for found in (new.target.weights, section.weights):
        assert new.calibration_path(found) == folder / "recipes" / "text" / "held_out.jsonl"
    assert "# big" in out.read_text(encoding="utf-8")


def test_absolute_paths_and_line_ends_stay(folder: Path) -> None:
    header = HEADER.replace("models/target", str(folder / "recipes" / "models" / "target")).replace("\n", "\r\n")
    path = recipe(folder, f"  - {{{D}}}\n", header)
    out = folder / "elsewhere" / "copy.yaml"
    RecipeCopy(path, out, "d").write(TREE)
    assert header.encode() in out.read_bytes()


def test_what_cannot_be_written_is_refused_before_anything_is_measured(folder: Path) -> None:
    path = recipe(folder, f"  - {{{D}}}\n")
    with pytest.raises(RecipeError, match="is the recipe itself; choose another --out"):
        RecipeCopy(path, path.parent / "." / "model.yaml", "d")
    for out in (folder / "nowhere" / "copy.yaml", folder / "elsewhere"):
        with pytest.raises(RecipeError, match="cannot be written; choose another --out"):
            RecipeCopy(path, out, "d")
    with pytest.raises(RecipeError, match=r"has no drafter 'e' \(--set gave it\?\); write it into the recipe"):
        RecipeCopy(path, path.with_name("copy.yaml"), "e")


def test_a_copy_that_reads_otherwise_is_removed(folder: Path) -> None:
    path = recipe(folder, f"  - {{{D}, tree: auto}}\n")
    copy = RecipeCopy(path, path.with_name("copy.yaml"), "d")
    with pytest.raises(RecipeError, match="grows only 13"):
        copy.write(Tree(top_k=3, depth=1, nodes=30))
    assert not path.with_name("copy.yaml").exists()
