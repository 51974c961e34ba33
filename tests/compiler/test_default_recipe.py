"""A checkpoint without a recipe: what is written, and that it builds."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from outrider.compiler.__main__ import main
from outrider.compiler.default_recipe import is_checkpoint, write_recipe
from outrider.compiler.recipe import load_recipe
from outrider.plans.errors import CheckpointError, RecipeError


def test_a_recipe_is_written_beside_the_plan_and_kept(
    toy_plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = load_recipe(toy_plan.parent / "model.yaml").checkpoint_path
    place = tmp_path / "My Model: 1"
    place.symlink_to(checkpoint)
    monkeypatch.chdir(tmp_path)
    assert is_checkpoint(place)
    assert not is_checkpoint(toy_plan.parent / "model.yaml")
    file = write_recipe(place, None)
    assert file == tmp_path / "build" / "my-model-1.yaml"
    recipe = load_recipe(file)
    assert recipe.checkpoint_path.resolve() == checkpoint.resolve()
    assert [drafter.kind for drafter in recipe.drafters] == ["ngram"]
    file.write_text(file.read_text(encoding="utf-8").replace("ngram, kind", "mine, kind"), encoding="utf-8")
    assert write_recipe(place, None) == file
    assert yaml.safe_load(file.read_text(encoding="utf-8"))["drafters"][0]["name"] == "mine"
    assert main(["build", str(place), "--out", "plan", "--set", "capacity.context=64"]) == 0
    assert (tmp_path / "plan" / "plan.json").exists()
    assert (tmp_path / "plan.yaml").exists()


def test_a_path_with_a_mistake_in_it_does_not_wait_for_torch() -> None:
    program = (
        "import sys\nfrom outrider.compiler.__main__ import main\n"
        "print(main(['build', 'no/such/checkpoint']), 'torch' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout == "2 False\n"


def test_the_recipe_of_another_checkpoint_is_not_taken(toy_plan: Path, tmp_path: Path) -> None:
    checkpoint = load_recipe(toy_plan.parent / "model.yaml").checkpoint_path
    long = tmp_path / f"{'long ' * 20}name" / "hf"
    shutil.copytree(checkpoint, long)
    file = write_recipe(long, tmp_path / "plan")
    assert load_recipe(file).checkpoint_path == long
    with pytest.raises(RecipeError, match="is the recipe of another checkpoint; pass --out"):
        write_recipe(checkpoint, tmp_path / "plan")
    with pytest.raises(CheckpointError, match=r"config\.json does not exist; a checkpoint folder needs"):
        write_recipe(tmp_path, tmp_path / "other")
