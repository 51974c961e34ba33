"""What a drafter with weights must have in common with its target, and the sentence where it has not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from outrider.compiler.drafters import GraphSource, feature_columns, read_sources, taps
from outrider.compiler.opening import read_config
from outrider.compiler.recipe import load_recipe
from outrider.plans.errors import RecipeError
from outrider.plans.manifest import Tree


@pytest.fixture
def checkpoint(toy_recipe: Path, tmp_path: Path) -> Path:
    """A copy of the draft model, to be changed."""
    return Path(shutil.copytree(toy_recipe.parent / "drafter", tmp_path / "drafter"))


def sources(recipe: Path, drafter: str) -> list[GraphSource]:
    loaded = load_recipe(recipe, [f"drafters=[{drafter}]"])
    return read_sources(loaded, read_config(loaded.checkpoint_path))


def change_json(file: Path, key: str, value: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | {key: value}), encoding="utf-8")


def test_a_draft_model_of_another_vocabulary_or_fewer_positions_is_refused(toy_recipe: Path, checkpoint: Path) -> None:
    drafter = f"{{name: a, kind: model, checkpoint: {checkpoint}%s}}"
    config, file = checkpoint / "config.json", checkpoint / "tokenizer.json"
    change_json(config, "max_position_embeddings", 100)
    with pytest.raises(RecipeError, match=r"made for 100 positions, fewer than capacity\.context 160; .*rope_scaling"):
        sources(toy_recipe, drafter % "")
    (source,) = sources(toy_recipe, drafter % ", rope_scaling: {rope_type: linear, factor: 2.0}")
    assert source.config.rope_scaling.factor == 2.0
    change_json(config, "max_position_embeddings", 160)
    model = json.loads(file.read_text(encoding="utf-8"))["model"]
    first, second = (token for token, number in model["vocab"].items() if number in (10, 11))
    model["vocab"] |= {first: model["vocab"][second], second: model["vocab"][first]}
    change_json(file, "model", model)
    with pytest.raises(RecipeError, match=r"token 1[01], in the target's it is 1[01]; .* share"):
        sources(toy_recipe, drafter % "")
    file.unlink()  # without a tokenizer its tokens are trusted
    assert sources(toy_recipe, drafter % "")
    change_json(config, "vocab_size", 299)
    with pytest.raises(RecipeError, match=r"vocabulary of 299 tokens, the target one of 300; .* share .* tokenizer"):
        sources(toy_recipe, drafter % "")


@pytest.mark.parametrize(
    ("drafter", "instead"),
    [
        ("{name: a, kind: model, checkpoint: drafter, tree: auto, acceptance: rejection}", "gamma: 4"),
        ("{name: a, kind: eagle3, checkpoint: head, acceptance: rejection}", "tree: {top_k: 1, depth: 3, nodes: 5}"),
    ],
)
def test_rejection_of_a_tree_says_what_to_write_instead(toy_recipe: Path, drafter: str, instead: str) -> None:
    with pytest.raises(RecipeError) as error:
        sources(toy_recipe, drafter)
    assert instead in str(error.value)
    chain = drafter.replace(" tree: auto,", "").replace("acceptance", f"{instead}, acceptance")
    assert sources(toy_recipe, chain)[0].tree.top_k == 1
    short = "{name: a, kind: model, checkpoint: drafter, tree: {top_k: 1, depth: 3, nodes: 3}, acceptance: rejection}"
    with pytest.raises(RecipeError, match=r"tree\.nodes is 3, but a chain of depth 3 has 5"):
        sources(toy_recipe, short)


def test_taps_of_the_recipe_win_and_must_exist(toy_recipe: Path, tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("*plan*")  # which another process may be building
    deeper = Path(shutil.copytree(toy_recipe.parent, tmp_path / "deeper", ignore=ignored)) / toy_recipe.name
    for key, value in {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}.items():
        change_json(deeper.parent / "target" / "config.json", key, value)
    head = "{name: a, kind: eagle3, checkpoint: head, aux_layers: [%s]}"
    config = sources(deeper, head % "0, 1, 3")[0].config
    assert getattr(config, "aux_layers", None) == (0, 1, 3)
    for wrong in ("0, 1, 4", "0, 1, 1"):
        with pytest.raises(RecipeError, match="three different layers from 0 to 3"):
            sources(deeper, head % wrong)


def test_a_block_drafts_no_more_tokens_than_it_has(toy_recipe: Path) -> None:
    block = "{name: a, kind: block, checkpoint: block%s}"
    (source,) = sources(toy_recipe, block % "")
    assert (source.tree, source.drafter.block) == (Tree(top_k=1, depth=4, nodes=6), 5)
    (short,) = sources(toy_recipe, block % ", gamma: 2")
    assert (short.tree, short.drafter.block) == (Tree(top_k=1, depth=1, nodes=3), 5)
    for shape, key in ((", gamma: 6", r"gamma asks"), (", tree: {top_k: 2, depth: 5, nodes: 9}", r"tree\.depth asks")):
        with pytest.raises(RecipeError, match=rf"{key} for 6 tokens one after another, and a block of the head has 5"):
            sources(toy_recipe, block % shape)


@pytest.mark.parametrize(
    ("backends", "written", "tree", "least_chance"),
    [
        ("onnxruntime-cpu", "", (3, 2, 8), None),
        ("onnxruntime-cpu, cuda", "tree: auto", (3, 2, 8), None),
        ("cuda, tensorrt-rtx", "tree: auto", (10, 7, 60), None),
        ("cuda", "tree: {top_k: 2, depth: 1, nodes: 4}, least_chance: 0.1", (2, 1, 4), 0.1),
        ("cuda", "kind: block, checkpoint: block, tree: auto", (10, 4, 60), None),  # a block of 5 tokens
    ],
)
def test_defaults_go_by_the_backends(
    toy_recipe: Path, backends: str, written: str, tree: tuple[int, int, int], least_chance: float | None
) -> None:
    head = "" if "block" in written else "kind: eagle3, checkpoint: head, "
    recipe = load_recipe(toy_recipe, [f"backends=[{backends}]", f"drafters=[{{name: a, {head}{written}}}]"])
    (source,) = read_sources(recipe, read_config(recipe.checkpoint_path))
    top_k, depth, nodes = tree
    assert source.drafter.tree == Tree(top_k=top_k, depth=depth, nodes=nodes)
    assert source.drafter.least_chance == least_chance


def test_heads_of_one_plan_may_read_different_layers(toy_recipe: Path) -> None:
    """The target gives the streams of all, and each head picks its own."""
    head, block = sources(
        toy_recipe, "{name: a, kind: eagle3, checkpoint: head}, {name: b, kind: block, checkpoint: block}"
    )
    assert taps([head, block]) == (0, 1, 2)
    assert feature_columns(head, (0, 1, 2, 3), 2) == (0, 1, 2, 3, 4, 5)
    assert feature_columns(block, (0, 1, 2), 2) == (0, 1, 4, 5)
    assert feature_columns(block, taps([block]), 2) is None
