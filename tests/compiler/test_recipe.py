"""Recipes that are right, and the sentence, with its line, for those that are not."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from outrider.compiler.models.config import DecoderConfig
from outrider.compiler.models.rope import RopeScaling
from outrider.compiler.opening import read_config
from outrider.compiler.recipe import Recipe, check_capacity, load_recipe
from outrider.plans.errors import RecipeError

FULL = """\
name: reference
target:
  checkpoint: ../model
  dtype: bfloat16
  rope_scaling: {rope_type: yarn, factor: 4.0, original_max_position_embeddings: 8192}
drafters:
  - {name: ngram, kind: ngram, max_context: 3, min_context: 2, max_draft: 6, min_confidence: 1e-1}
  - name: short
    kind: ngram
    max_draft: 2
capacity:
  context: 4096
  branches: 4
  prefill_chunk: 128
backends: [onnxruntime-cpu]
held_out: ../held_out.jsonl
"""
SHORT = "name: short\ntarget:\n  checkpoint: ../model\ncapacity:\n  context: 512\n"


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "held_out.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "recipes").mkdir()
    return tmp_path / "recipes" / "model.yaml"


def load(file: Path, text: str, *overrides: str) -> Recipe:
    file.write_text(text, encoding="utf-8")
    return load_recipe(file, overrides)


def refusal(file: Path, text: str, *overrides: str) -> str:
    with pytest.raises(RecipeError) as error:
        load(file, text, *overrides)
    return str(error.value).replace(str(file), "FILE")


def test_every_field_is_read(recipe_file: Path) -> None:
    recipe = load(recipe_file, FULL)
    assert load(recipe_file, SHORT, "capacity.context=100").capacity.prefill_chunk == 100
    assert recipe.name == "reference"
    assert recipe.target.dtype == "bfloat16"
    assert recipe.rope_scaling == RopeScaling("yarn", 4.0, 8192)
    assert [drafter.name for drafter in recipe.drafters] == ["ngram", "short"]
    assert recipe.drafters[0].min_confidence == 0.1
    assert recipe.capacity.branches == 4
    assert recipe.checkpoint_path == recipe_file.parent.parent / "model"
    assert recipe.held_out_path == recipe_file.parent.parent / "held_out.jsonl"


def test_resolved_is_json_with_defaults_and_without_absolute_paths(recipe_file: Path, tmp_path: Path) -> None:
    resolved = load(recipe_file, SHORT).resolved()
    assert json.loads(json.dumps(resolved)) == resolved == {
        "name": "short",
        "target": {"checkpoint": "../model", "dtype": "float32"},
        "drafters": [],
        "capacity": {"context": 512, "branches": 1, "batching": False, "prefill_chunk": 256},
        "backends": [{"kind": "onnxruntime-cpu"}],
    }  # fmt: skip
    absolute = load(recipe_file, FULL.replace("../", f"{tmp_path}/"))
    assert absolute.checkpoint_path == tmp_path / "model"
    assert str(tmp_path) not in json.dumps(absolute.resolved())
    same = load(recipe_file, FULL + "# a comment\n").resolved()
    assert json.dumps(load(recipe_file, FULL).resolved()) == json.dumps(same)


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("dtype: bfloat16", "dtyp: float32", "FILE:4: target.dtyp is not a known key (did you mean 'dtype'?); known"),
        ("backends: [", "targets: [", "FILE:15: targets is not a known key; known keys: name, target, drafters"),
        ("factor: 4.0, ", "", "FILE:5: target.rope_scaling is wrong: rope scaling 'yarn' needs a 'factor'"),
        ("factor: 4.0", "factor: .inf", "FILE:5: target.rope_scaling.factor must be a finite number, found inf"),
        ("name: reference", "name: a\nkv_cache: int4", "FILE:2: kv_cache must be 'float32', 'float16' or 'int8',"),
        ("  context: 4096\n", "", "FILE:11: capacity.context is missing; add it (tokens of the longest sequence"),
        ("branches: 4", "branches: 1\n  batching: true", "FILE:14: capacity.batching is true, and"),
        ("branches: 4", "branches:", "FILE:13: capacity.branches must be a whole number, found nothing"),
        ("chunk: 128", "chunk: 8192", "FILE:14: capacity.prefill_chunk is 8192, more than capacity.context 4096; set"),
        ("name: short", "name: ngram", "FILE:8: drafters[1].name is 'ngram', which is the name of an earlier drafter"),
        ("name: short", "name: none", "FILE:8: drafters[1].name is 'none', which means no drafter; choose another"),
        ("  - name: short\n    kind: ngram", "  - name: short\n    kind: oracle",
         "FILE:9: drafters[1].kind must be one of 'ngram', 'eagle3', 'block', 'model', found 'oracle'"),
        ("  - name: short\n    kind: ngram", "  - name: short", "FILE:8: drafters[1].kind is missing; add it"),
        ("min_context: 2", "min_context: 9", "FILE:7: drafters[0].min_context is 9, more than max_context 3; lower it"),
        ("max_draft: 2", "max_draft: 2\n    memory: 9", "FILE:11: drafters[1].memory is 9; raise it to at least 1024"),
        ("max_draft: 2", "max_draft: 2\n    least: 3", "FILE:11: drafters[1].least is 3, more than max_draft 2; lower"),
        ("max_draft: 2", "max_draft: 2\n    otherwise: ngram",
         "FILE:11: drafters[1].otherwise is 'ngram'; name a model, eagle3 or block drafter, not of rejection: none"),
        ("held_out:", "skeleton: {branch: '{outline}'}\nheld_out:",
         "FILE:16: skeleton.branch must have {point}, and may have {outline}; double other braces"),
        ("[onnxruntime-cpu]", "[cpu]", "FILE:15: backends[0].kind must be one of 'onnxruntime-cpu', 'cuda', 'onn"),
        ("[onnxruntime-cpu]", "[{kind: cuda, compute_capabilities: [sm_75]}]",
         "FILE:15: backends[0].compute_capabilities[0] must be 'sm_80', 'sm_86', 'sm_87', 'sm_89', 'sm_90'"),
        ("[onnxruntime-cpu]", "[{kind: tensorrt-rtx, compute_capabilities: [sm_80, sm_80]}]",
         "FILE:15: backends[0].compute_capabilities[1] repeats 'sm_80'; keep one of them"),
        ("[onnxruntime-cpu]", "[{kind: tensorrt, timing_cache: a/b}]", "a/b, which can be no file; name one in"),
        ("[onnxruntime-cpu]", "[]", "FILE:15: backends must have at least 1 entry, found []"),
        ("../model", '"a\\0b"', "FILE:3: target.checkpoint holds a character that cannot be printed; correct the path"),
        ("../model", "''", "FILE:3: target.checkpoint must not be empty"),
        ("../model", "~nobody-here/x", "/~nobody-here/x, which is neither a folder nor a GGUF file; correct the path"),
        ("../held_out.jsonl", "../model", "FILE:16: held_out names "),
        ("branches: 4", "context: 4", "FILE:13: capacity.context is given twice; keep one of them"),
        ("branches: 4", "1: 4", "FILE:13: the key 1 is not text; quote it or remove it"),
        ("name: reference", "name: !!python/name:os.system", "FILE:1: is not valid YAML: could not determine"),
        ("name: reference", "name: &a reference\nother: *a", "FILE:2: is not valid YAML: aliases are not read"),
        ("branches: 4", "branches: 2024-99-99", "FILE: is not valid YAML: month must be in 1..12"),
        (FULL, "# nothing\n", "FILE: is empty, expected a mapping that starts with 'name:'"),
        (FULL, "- a\n- b\n", "FILE: holds ['a', 'b'], expected a mapping"),
        (FULL, "a: 1\n---\nb: 2\n", "FILE:2: is not valid YAML: but found another document"),
        (FULL, "a: \x01", "FILE: is not valid YAML: unacceptable character"),
        (FULL, "[" * 5000, "FILE: is nested too deeply"),
    ],
)  # fmt: skip
def test_wrong_recipe_names_line_and_key(old: str, new: str, sentence: str, recipe_file: Path) -> None:
    assert FULL.count(old) >= 1
    message = refusal(recipe_file, FULL.replace(old, new, 1))
    assert sentence in message
    assert message.count("FILE") == 1
    assert "\n" not in message


def test_all_faults_are_reported_in_the_order_of_the_file(recipe_file: Path) -> None:
    text = FULL.replace("branches: 4", "branches: 400").replace("bfloat16", "int8").replace("max_draft: 2", "max: 2")
    lines = refusal(recipe_file, text).splitlines()
    assert [line.split(" ")[0] for line in lines] == ["FILE:4:", "FILE:10:", "FILE:13:"]


def test_file_that_cannot_be_read(recipe_file: Path) -> None:
    with pytest.raises(RecipeError, match=r"model\.yaml: cannot be read \(No such file or directory\)"):
        load_recipe(recipe_file)
    recipe_file.write_bytes(b"name: \xff\n")
    with pytest.raises(RecipeError, match=r"model\.yaml: is not UTF-8 text \(byte 6\); save it as UTF-8"):
        load_recipe(recipe_file)
    with pytest.raises(RecipeError, match=r"/dev/zero: cannot be read \(it has more than 67,108,864 characters\)"):
        load_recipe(Path("/dev/zero"))


def test_words_that_yaml_once_took_for_booleans_are_words(recipe_file: Path) -> None:
    assert load(recipe_file, SHORT, "partial_kv={enabled: True, mode: off}").partial_kv.mode == "off"
    assert "partial_kv.enabled must be true or false, found 'on'" in refusal(
        recipe_file, SHORT, "partial_kv.enabled=on"
    )


def test_overrides_win_over_the_file(recipe_file: Path) -> None:
    recipe = load(
        recipe_file,
        FULL,
        "capacity.context=1024",
        "drafters[1].max_draft=3",
        "drafters.0.name=lookup",
        "target.rope_scaling={rope_type: linear, factor: 2}",
        "target.rope_scaling.factor=3",
    )
    assert recipe.capacity.context == 1024
    assert [(drafter.name, drafter.max_draft) for drafter in recipe.drafters] == [("lookup", 6), ("short", 3)]
    assert recipe.rope_scaling == RopeScaling("linear", 3)
    added = load(recipe_file, SHORT, "target.rope_scaling.rope_type=linear", "target.rope_scaling.factor=2.0")
    assert added.rope_scaling == RopeScaling("linear", 2.0)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("capacity.context=big", "override 'capacity.context=big': capacity.context must be a whole number"),
        ("capcity.context=1", "override 'capcity.context=1': capcity is not a known key (did you mean 'capacity'?)"),
        ("drafters.5.name=a", "override 'drafters.5.name=a': drafters.5.name does not lead to a value of FILE"),
        ("name.x=1", "override 'name.x=1': name.x does not lead to a value"),
        ("capacity.context", "override 'capacity.context': must have the form key=value"),
        ("name=[", "override 'name=[': is not valid YAML"),
        ("capacity={context: 1, context: 2}", "capacity.context is given twice"),
        ("partial_kv={budget: {a: 1}}", "partial_kv.budget must be a whole number or 'auto', found {'a': 1} ("),
        ("partial_kv={n_sink_blocks: 1000000000}", "partial_kv.n_sink_blocks must be at most 16777216"),
        ("target.rope_scaling={rope_type: linear, factor: 1e300}", "factor must be at most 1000000000000.0, found"),
    ],
)  # fmt: skip
def test_wrong_override_is_named(override: str, sentence: str, recipe_file: Path) -> None:
    assert sentence in refusal(recipe_file, FULL, override)
    assert "\n" not in refusal(recipe_file, SHORT, "capacity.context=big")  # on which a default depends


def test_every_whole_number_of_a_recipe_has_a_largest_value() -> None:
    """So that a slip of the hand is a sentence, and neither an endless build nor a number that no plan can hold."""
    by_another_key = {"CapacitySection.prefill_chunk", "NgramDrafter.min_context"}
    numbers = Recipe.model_json_schema()["$defs"]
    unbounded = [
        f"{section}.{name}"
        for section, schema in numbers.items()
        for name, field in schema.get("properties", {}).items()
        for option in field.get("anyOf", [field])
        if option.get("type") == "integer" and "maximum" not in option
    ]
    assert {name for name in unbounded if not name.startswith("RopeScaling")} == by_another_key


class TestCapacity:
    @pytest.fixture
    def config(self, tmp_path: Path) -> DecoderConfig:
        sizes = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"), 8)
        raw = {"model_type": "llama", **sizes, "num_attention_heads": 1, "max_position_embeddings": 1024}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        return read_config(tmp_path)

    def test_context_beyond_the_model_names_both_numbers(self, recipe_file: Path, config: DecoderConfig) -> None:
        check_capacity(load(recipe_file, SHORT, "capacity.context=1024"), config)
        recipe = load(recipe_file, SHORT.replace("512", "3000"))
        with pytest.raises(RecipeError) as error:
            check_capacity(recipe, config)
        message = str(error.value)
        assert f"{recipe_file}:5: capacity.context is 3000, but the model is made for 1024 positions" in message
        assert "{rope_type: yarn, factor: 3.0, original_max_position_embeddings: 1024}" in message

    @pytest.mark.parametrize(
        "scaling",
        ["{rope_type: yarn, factor: 3, original_max_position_embeddings: 1024}", "{rope_type: linear, factor: 3}"],
    )
    def test_scaling_extends_the_model(self, scaling: str, recipe_file: Path, config: DecoderConfig) -> None:
        recipe = load(recipe_file, SHORT, "capacity.context=3000", f"target.rope_scaling={scaling}")
        assert recipe.rope_scaling is not None
        config = dataclasses.replace(config, rope_scaling=recipe.rope_scaling)
        check_capacity(recipe, config)
        with pytest.raises(RecipeError, match=r"override 'capacity.context=4000': .* made for 3072 positions"):
            check_capacity(load(recipe_file, SHORT, f"target.rope_scaling={scaling}", "capacity.context=4000"), config)


SEARCHED = "{type: int4, method: awq, calibration: text.jsonl}"


@pytest.mark.parametrize(
    ("weights", "drafter", "said"),
    [
        ("{type: int4, method: awq}", "", "target.weights.method is awq, which searches on text; name it with"),
        ("{type: int4, calibration: text.jsonl}", "", "target.weights.calibration is read by method: awq alone; set"),
        ("{type: int4, method: awq, calibration: gone.jsonl}", "",
         "target.weights.calibration names FOLDER/gone.jsonl, which is not a file; correct it"),
        (None, "kind: model, checkpoint: target, weights: {type: int4, method: awq, calibration: target}",
         "drafters[0].weights.calibration names FOLDER/target, which is not a file; correct it"),
        (None, f"kind: eagle3, checkpoint: target, weights: {SEARCHED}",
         "drafters[0].weights.method is awq, which searches on text, and a head reads the target's features; leave"),
        (None, "kind: block, checkpoint: gone", "drafters[0].checkpoint names FOLDER/gone, which is not a folder"),
        *((None, f"kind: model, checkpoint: target, {shape}", f"drafters[0].{said}") for shape, said in (
            ("tree: {top_k: 2, depth: 1, nodes: 30}", "tree has 30 nodes, but grows only 7; lower nodes"),
            ("tree: {top_k: 2, nodes: 3}", "tree.depth is missing; add it"),
            ("tree: tall", "tree must be {top_k, depth, nodes}, or auto"),
            ("gamma: 2, tree: auto", "gamma stands beside tree"),
            ("gamma: 0", "gamma must be at least 1"),
            ("gamma: {max: 2}", "gamma must be a whole number"),
        )),
    ],
)  # fmt: skip
def test_wrong_weights_and_shapes_of_drafts_are_named(
    tmp_path: Path, weights: str | None, drafter: str, said: str
) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "text.jsonl").write_text('{"prompt": "a"}\n')
    text = f"name: a\ntarget: {{checkpoint: target, weights: {weights or 'null'}}}\ncapacity: {{context: 64}}\n"
    entry = f"{{name: d, {drafter}}}" if drafter else ""
    message = refusal(tmp_path / "model.yaml", f"{text}drafters: [{entry}]\n").replace(str(tmp_path), "FOLDER")
    assert message.startswith(f"FILE:{4 if drafter else 2}: {said}")
    assert "\n" not in message


def test_where_the_text_of_a_search_lies_is_no_part_of_the_recipe(recipe_file: Path, tmp_path: Path) -> None:
    """Its contents are hashed apart."""
    text = tmp_path / "held_out.jsonl"
    recipe = load(recipe_file, SHORT, f"target.weights={SEARCHED.replace('text.jsonl', str(text))}")
    assert recipe.calibration_path(recipe.target.weights) == text
    target = recipe.resolved()["target"]
    assert isinstance(target, dict)
    assert target["weights"] == {
        "type": "int4", "lm_head": "int8", "method": "awq", "calibration": "held_out.jsonl", "requantize": False,
    }  # fmt: skip
