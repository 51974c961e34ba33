"""The printed keys of a recipe are those that the models check, all of them."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from functools import cache
from typing import Any

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
        found = [kind for kind in waiting.pop().__subclasses__() if kind.__module__.startswith("compiler.")]
        waiting += found
        yield from found


@cache
def printed(*wanted: str) -> str:
    console = Console(file=io.StringIO(), width=1000)
    print_keys(choose_keys(*wanted) if wanted else recipe_keys(), console)
    return " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]


@pytest.mark.parametrize("section", list(sections()), ids=lambda section: section.__name__)
def test_every_field_of_every_section_is_described_and_printed(section: type[Section]) -> None:
    assert section.__doc__
    assert " ".join(section.__doc__.split()) in printed()
    (mapping,) = (m for m in recipe_keys() if m.meaning == " ".join(str(section.__doc__).split()))
    for name, field in section.model_fields.items():
        assert field.description, f"{section.__name__}.{name} has no description"
        (key,) = (key for key in mapping.keys if key.name == name)
        assert (key.meaning, key.default == "required") == (field.description, field.is_required())
        assert key.type
        assert f"{name} {key.type} {key.default} {field.description}" in printed()


def test_types_and_defaults_are_written_as_a_recipe_has_them() -> None:
    for path, words in (
        ("capacity.context", "whole number from 2 to 8388608 required"),
        ("capacity.branches", "whole number from 1 to 16 1"),
        ("capacity.prefill_chunk", "whole number from 1 see meaning"),
        ("drafters.ngram.min_confidence", "number from 0 to 1 0.25"),
        ("drafters[0].checkpoint", "path required"),
        ("drafters.eagle3.tree", "drafters.eagle3.tree, drafters.block.tree, drafters.model.tree"),
        ("drafters.eagle3.aux_layers", "list of 3: whole number not set"),
        ("drafters.model.gamma", "max whole number from 1 to 64 required"),
        ("backends", "list of: sm_75 | sm_80"),
        ("backends.tensorrt.workspace_mb", "whole number from 1 to 1048576 1024"),
        ("partial_kv.budget", "or auto not set"),
        ("partial_kv", "enabled true | false false"),
        ("target.rope_scaling.beta_fast", "number 32.0"),
        ("recipe", "backends list of: mapping or onnxruntime-cpu"),
        ("backends.tensorrt.version_compatible", "true | false false"),
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
    texts = [TOY_RECIPE, *(p.read_text(encoding="utf-8") for p in (REPOSITORY / "plans" / "recipes").glob("*.yaml"))]
    for text in texts:
        known(yaml.safe_load(text), schema, schema["$defs"])


def known(value: Any, schema: dict[str, Any], defs: dict[str, Any]) -> None:
    """Every key of `value` is one of the schema's."""
    if "$ref" in schema:
        known(value, defs[schema["$ref"].rpartition("/")[2]], defs)
    for word in ("anyOf", "oneOf"):
        if word in schema and isinstance(value, dict):
            errors = 0
            for choice in schema[word]:
                try:
                    known(value, choice, defs)
                except AssertionError:
                    errors += 1
            assert errors < len(schema[word])
    if "properties" in schema and isinstance(value, dict):
        assert set(value) <= set(schema["properties"])
        for key, inner in value.items():
            known(inner, schema["properties"][key], defs)
    if "items" in schema and isinstance(value, list):
        for inner in value:
            known(inner, schema["items"], defs)
