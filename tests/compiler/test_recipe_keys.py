"""The printed keys of a recipe are those that the models check, all of them."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from functools import cache

import jsonschema
import pytest
import yaml
from rich.console import Console

import outrider.compiler.__main__
from outrider.compiler.recipe import Recipe
from outrider.compiler.recipe_keys import choose_keys, print_keys, recipe_keys, recipe_schema
from outrider.compiler.recipe_sections import Section
from outrider.plans.errors import UsageError
from tests.conftest import REPOSITORY, TOY_RECIPE

Captured = pytest.CaptureFixture[str]


def sections() -> Iterator[type[Section]]:
    waiting = [Section]
    while waiting:
        found = [kind for kind in waiting.pop().__subclasses__() if kind.__module__.startswith("outrider.compiler.")]
        waiting += found
        yield from (kind for kind in found if not kind.__name__.startswith("_"))


@cache
def printed(*wanted: str) -> str:
    console = Console(file=io.StringIO(), width=1000)
    print_keys(choose_keys(*wanted) if wanted else recipe_keys(), console)
    return " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]


def test_every_field_of_every_section_is_described_and_printed() -> None:
    found = list(sections())
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
        "drafters.model", "drafters.model.tree", "drafters.eagle3.tree", "drafters.model.gamma",
        "drafters.block.tree", "drafters.block.weights",
        "drafters.model.rope_scaling", "target.rope_scaling", "drafters.model.weights", "drafters.eagle3.weights",
        "target.weights",
    }  # fmt: skip
    with pytest.raises(UsageError, match=r"no key 'capcity'; did you mean capacity\?"):
        choose_keys("capcity")
    assert outrider.compiler.__main__.main(["recipe", "nothing.like.it"]) == 2
    assert "leave it out to see all" in capsys.readouterr().err
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
