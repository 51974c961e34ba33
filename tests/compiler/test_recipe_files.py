"""Recipes that are written, the printed keys of recipes, and the prompts that they name."""

from __future__ import annotations

import gzip
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import jsonschema
import pytest
import yaml
from rich.console import Console

import outrider.compiler.__main__
from outrider.compiler.__main__ import main
from outrider.compiler.default_recipe import is_checkpoint, write_recipe
from outrider.compiler.held_out import Prompt, read_prompts, read_tasks, read_text
from outrider.compiler.recipe import Recipe, load_recipe
from outrider.compiler.recipe_copy import RecipeCopy
from outrider.compiler.recipe_keys import choose_keys, print_keys, recipe_keys, recipe_schema
from outrider.compiler.recipe_sections import Section
from outrider.plans.errors import CheckpointError, RecipeError, UsageError
from outrider.plans.host_drafters import HostDrafter, NgramDrafter
from outrider.plans.manifest import Tree
from tests.conftest import REPOSITORY, TOY_RECIPE


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
    caches = [r.cache_path(target) for r in (old, new) for target in r.backends]
    assert caches == 2 * [None, folder / "recipes" / "kernels.cache"]
    assert (new.checkpoint_path, new.held_out_path) == (old.checkpoint_path, old.held_out_path)
    (section,) = (d for d in new.drafters if not isinstance(d, NgramDrafter))
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


Captured = pytest.CaptureFixture[str]


def sections() -> Iterator[type[Section]]:
    waiting = [Section]
    while waiting:
        found = [kind for kind in waiting.pop().__subclasses__() if kind.__module__.startswith("outrider.compiler.")]
        waiting += found
        yield from (kind for kind in found if not kind.__name__.startswith("_") and not kind.__subclasses__())


@cache
def printed(*wanted: str) -> str:
    console = Console(file=io.StringIO(), width=1000)
    print_keys(choose_keys(*wanted) if wanted else recipe_keys(), console)
    return " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]


def test_every_field_of_every_section_is_described_and_printed() -> None:
    found = [*sections(), *HostDrafter.__subclasses__()]
    assert len(found) >= 17
    for section in found:
        about = " ".join(str(section.__doc__).split())
        assert about in printed()
        (mapping,) = (m for m in recipe_keys() if m.meaning == about)
        for name, field in section.model_fields.items():
            (key,) = (key for key in mapping.keys if key.name == name)
            assert field.description, f"{section.__name__}.{name} has no description"
            assert (key.meaning, key.default == "required") == (field.description, field.is_required())
            assert f"{name} {key.type} {key.default} {field.description}" in printed()


def test_types_and_defaults_are_written_as_a_recipe_has_them() -> None:
    for path, words in (
        ("capacity.context", "whole number from 2 to 8388608 required"),
        ("drafters.ngram.min_confidence", "number from 0 to 1 0.25"),
        ("drafters[0].checkpoint", "path required"),
        ("drafters.eagle3.tree", "drafters.eagle3.tree, drafters.block.tree, drafters.model.tree"),
        ("drafters.eagle3.aux_layers", "list of 3: whole number not set"),
        ("backends", "list of: sm_75 | sm_80"),
        ("recipe", "backends list of: mapping or onnxruntime-cpu"),
    ):
        assert words in printed(path), path


def test_one_key_or_one_mapping_can_be_asked_for(capsys: Captured) -> None:
    assert "max_draft" in printed("drafters[0].max_draft")
    assert "min_context" not in printed("drafters[0].max_draft")
    assert {path for m in choose_keys("drafters.model") for path in m.paths} == {
        "drafters.model", "drafters.model.tree", "drafters.eagle3.tree", "drafters.block.tree",
        "drafters.block.weights", "drafters.model.rope_scaling", "target.rope_scaling", "drafters.model.weights",
        "drafters.eagle3.weights", "target.weights",
    }  # fmt: skip
    with pytest.raises(UsageError, match=r"no key 'capcity'; did you mean capacity\?"):
        choose_keys("capcity")
    assert outrider.compiler.__main__.main(["recipe", "capacity"]) == 0
    text = capsys.readouterr().out
    assert "prefill_chunk" in text
    assert "drafters" not in text
    assert outrider.compiler.__main__.main(["recipe"]) == 0
    assert "drafters[0].max_draft=4" in capsys.readouterr().out


def test_the_json_schema_knows_what_recipes_have(capsys: Captured) -> None:
    assert outrider.compiler.__main__.main(["recipe", "--json"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema == json.loads(json.dumps(recipe_schema()))
    assert set(schema["properties"]) == set(Recipe.model_fields)
    entries = json.dumps(schema["properties"]["backends"]["items"])
    assert all(kind in entries for kind in ("tensorrt-rtx", "onnxruntime-cuda"))
    assert "auto" in json.dumps(schema["$defs"]["Eagle3Section"]["properties"]["tree"])
    check = jsonschema.Draft202012Validator(schema)
    texts = [TOY_RECIPE, *(p.read_text(encoding="utf-8") for p in (REPOSITORY / "plans" / "recipes").glob("*.yaml"))]
    for text in texts:
        check.validate(yaml.safe_load(text))
    wrong = yaml.safe_load(TOY_RECIPE)
    wrong["capacity"]["contxt"] = 1
    assert not check.is_valid(wrong)


def test_texts_and_tasks(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a", "task": "long"}\n\n{"prompt": "b"}\n', encoding="utf-8")
    assert read_tasks(path) == [Prompt("a", "long"), Prompt("b")]
    assert read_prompts(path) == ["a", "b"]
    path.write_text("\n", encoding="utf-8")
    with pytest.raises(RecipeError, match="holds no prompts"):
        read_tasks(path)
    with pytest.raises(RecipeError, match="cannot be read as UTF-8 text"):
        read_tasks(tmp_path / "away.jsonl")


def test_a_wrong_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    no_text = 'must be a JSON object with a text under "prompt"'
    task = '"task" must be a name; correct it, or leave it out'
    for line in ("[]", '{"prompt": ""}', "[" * 100_000, '{"prompt": "a", "task": 3}'):
        path.write_text(f'{{"prompt": "a"}}\n{line}\n', encoding="utf-8")
        with pytest.raises(RecipeError, match=rf"prompts\.jsonl:2: .*{task if 'task' in line else no_text}"):
            read_tasks(path)


def test_a_gzipped_file_reads_as_the_plain_one_and_a_broken_one_is_named(tmp_path: Path) -> None:
    plain, packed = tmp_path / "prompts.jsonl", tmp_path / "prompts.jsonl.gz"
    plain.write_text('{"prompt": "ä", "task": "long"}\r\n{"prompt": "b"}\n', encoding="utf-8", newline="")
    whole = gzip.compress(plain.read_bytes())
    packed.write_bytes(whole)
    assert read_text(packed) == read_text(plain)
    assert read_tasks(packed) == read_tasks(plain)
    bad_block = whole[:10] + b"\xff" + whole[11:]
    for broken in (plain.read_bytes(), whole[:-9], whole[:-8] + bytes(8), bad_block, gzip.compress(b"\xff\n")):
        packed.write_bytes(broken)
        with pytest.raises(RecipeError, match=r"prompts\.jsonl\.gz cannot be read as UTF-8 text"):
            read_tasks(packed)
    packed.write_bytes(whole)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outrider.compiler.held_out._LARGEST", 10)
        with pytest.raises(RecipeError, match="unpacks to more than 10 characters"):
            read_tasks(packed)
    plain.write_bytes(b"\xef\xbb\xbf" + plain.read_bytes())  # as editors of Windows write it
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_tasks(plain) == read_tasks(packed)
    assert read_tasks(plain)[0].text == "ä"
