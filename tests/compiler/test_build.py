"""A second build keeps what is unchanged, the same inputs give the same plan, and a failed build changes nothing."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

import outrider.compiler.build
from outrider import Runtime
from outrider.compiler.build import BuildResult, build
from outrider.compiler.design import design_plan
from outrider.compiler.drafters import source_hashes
from outrider.compiler.identity import tool_versions
from outrider.compiler.inspect import describe, print_description
from outrider.compiler.recipe import load_recipe
from outrider.plans.buffers import DType
from outrider.plans.build_record import read_build_record
from outrider.plans.errors import CheckpointError, PlanError, RecipeError
from outrider.plans.plan import open_plan, read_manifest

BACKEND = "onnxruntime-cpu"
RECIPE = """\
name: light
target:
  checkpoint: target
drafters:
  - {name: ngram, kind: ngram, max_draft: 6}
capacity:
  context: 160
  prefill_chunk: 16
"""


@pytest.fixture(scope="module")
def light(toy_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe, its checkpoint and its plan: the toy without drafters that take seconds to export."""
    folder = tmp_path_factory.mktemp("light")
    for name in ("target", "head"):
        shutil.copytree(toy_recipe.parent / name, folder / name)
    (folder / "model.yaml").write_text(RECIPE, encoding="utf-8")
    rebuild(folder)
    return folder


@pytest.fixture
def workplace(light: Path, tmp_path: Path) -> Path:
    """A copy of it, to change."""
    return shutil.copytree(light, tmp_path / "work")


def rebuild(workplace: Path, *overrides: str, out: str = "plan") -> tuple[BuildResult, list[str]]:
    recipe = workplace / "model.yaml"
    said: list[str] = []
    built = build(load_recipe(recipe, overrides), recipe, workplace / out, lambda done, total, text: said.append(text))
    return built, said


def snapshot(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def hashes(built: BuildResult) -> dict[str, str]:
    return {entry.path: entry.sha256 for entry in built.plan.manifest.files}


def leftovers(folder: Path) -> list[str]:
    return [p.name for p in folder.iterdir() if p.name.startswith(".")]


def test_an_unchanged_recipe_keeps_the_plan_and_says_so(workplace: Path) -> None:
    before = snapshot(workplace / "plan")
    built, said = rebuild(workplace)
    assert built.reused == ("plan",)
    assert any("unchanged" in text for text in said)
    assert snapshot(workplace / "plan") == before


def test_changed_drafter_settings_take_the_engines_over(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_plan(workplace / "plan").manifest
    monkeypatch.setattr(outrider.compiler.build, "defer_decoder", None)  # a weight that is read would be a mistake
    built, said = rebuild(workplace, "drafters[0].max_draft=19")
    after = built.plan.manifest
    assert built.reused == (BACKEND,)
    assert any("engines unchanged" in text for text in said)
    assert after.identity != before.identity
    assert after.backends[BACKEND].engines == before.backends[BACKEND].engines
    assert after.backends[BACKEND].symbols["target"]["M"] == 20
    assert Runtime.load(workplace / "plan").generate("import", max_new_tokens=3).token_ids
    assert leftovers(workplace) == []


@pytest.mark.parametrize(
    ("override", "kept"),
    [
        ("capacity.context=200", True),  # the same KV cache: sizes are rounded up
        ("capacity.context=256", True),
        ("target.rope_scaling={rope_type: linear, factor: 2.0}", False),
    ],
)
def test_engines_are_built_anew_only_for_what_they_depend_on(workplace: Path, override: str, kept: bool) -> None:
    before = open_plan(workplace / "plan").manifest
    built, _ = rebuild(workplace, override)
    assert built.plan.manifest.identity != before.identity
    assert built.reused == ((BACKEND,) if kept else ())


def test_changed_weights_build_anew(workplace: Path) -> None:
    before = open_plan(workplace / "plan").manifest
    old = Runtime.load(workplace / "plan").generate("import", max_new_tokens=8, ignore_eos=True).token_ids
    path = workplace / "target" / "model.safetensors"
    weights = load_file(path)
    torch.manual_seed(5)
    save_file({name: torch.randn_like(w) * 0.3 for name, w in weights.items()}, path, metadata={"format": "pt"})
    built, _ = rebuild(workplace)
    after = built.plan.manifest
    assert built.reused == ()
    assert after.identity != before.identity
    assert after.backends[BACKEND].engines_key != before.backends[BACKEND].engines_key
    assert Runtime.load(workplace / "plan").generate("import", max_new_tokens=8, ignore_eos=True).token_ids != old


SEARCHED = "target.weights={type: int4, method: awq, calibration: text.jsonl}"


def test_weights_are_searched_anew_for_another_text_or_another_tokenizer(workplace: Path) -> None:
    text = workplace / "text.jsonl"
    text.write_text(json.dumps({"prompt": "import os and read the licence of the work. " * 8}) + "\n", encoding="utf-8")
    first, said = rebuild(workplace, SEARCHED, out="first")
    assert [step for step in said if "searching" in step] == [
        f"searching weights of target: layer {layer} of 3" for layer in (1, 2, 3)
    ]
    second, _ = rebuild(workplace, SEARCHED, out="second")
    assert hashes(first) == hashes(second)  # the same text gives the same bits

    moved = text.rename(workplace / "moved.jsonl")
    elsewhere, _ = rebuild(workplace, SEARCHED.replace("text", "moved"), out="first")
    assert elsewhere.reused == (BACKEND,)

    recipe = load_recipe(workplace / "model.yaml", [SEARCHED.replace("text", "moved")])
    sources = source_hashes(recipe)
    moved.write_text(json.dumps({"prompt": "Other words."}) + "\n", encoding="utf-8")
    other = source_hashes(recipe)
    assert {name for name in sources if sources[name] != other[name]} == {"calibration"}
    tokenizer = workplace / "target" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    assert source_hashes(recipe)["calibration"] != other["calibration"]  # of the hashes that engines depend on


def test_a_text_too_short_to_choose_weights_by_is_refused(workplace: Path) -> None:
    (workplace / "text.jsonl").write_text('{"prompt": "short"}\n', encoding="utf-8")
    with pytest.raises(
        RecipeError, match=r"text\.jsonl holds \d+ tokens, too few to choose weights by; give some thou"
    ):
        rebuild(workplace, SEARCHED)
    assert leftovers(workplace) == []


def test_a_changed_chat_template_keeps_the_engines(workplace: Path) -> None:
    path = workplace / "target" / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(settings | {"chat_template": "{{ messages[0].content }}"}), encoding="utf-8")
    built, _ = rebuild(workplace)
    assert built.reused == (BACKEND,)
    runtime = Runtime.load(workplace / "plan")
    assert runtime.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == "hi"


def test_a_damaged_plan_is_built_anew(workplace: Path) -> None:
    weights = workplace / "plan" / "engines" / BACKEND / "weights.bin"
    weights.write_bytes(bytes(weights.stat().st_size))
    built, _ = rebuild(workplace)
    assert built.reused == ()
    open_plan(workplace / "plan")


def test_the_same_inputs_in_another_folder_give_the_same_identity_and_the_same_files(
    workplace: Path, tmp_path: Path
) -> None:
    elsewhere = shutil.copytree(workplace, tmp_path / "a" / "longer path")
    shutil.rmtree(elsewhere / "plan")
    head = "drafters=[{name: head, kind: eagle3, checkpoint: head, tree: {top_k: 2, depth: 1, nodes: 4}}]"
    (here, _), (there, _) = rebuild(workplace, head), rebuild(elsewhere, head, out="other name")
    assert there.reused == ()
    assert there.plan.manifest.identity == here.plan.manifest.identity
    assert hashes(there) == hashes(here)
    assert str(tmp_path) not in (there.plan.root / "plan.json").read_text(encoding="utf-8")


@pytest.mark.usefixtures("fresh_exports")
def test_two_builds_are_the_same_bytes_but_for_what_they_took(workplace: Path) -> None:
    def files() -> dict[str, bytes]:
        shutil.rmtree(workplace / "plan")
        built, _ = rebuild(workplace)
        assert built.reused == ()
        found = snapshot(workplace / "plan")
        del found["build.json"]
        return found

    assert files() == files()


def test_a_build_records_what_it_took(workplace: Path) -> None:
    rebuild(workplace, "drafters[0].max_draft=19")
    record = read_build_record(workplace / "plan")
    assert record is not None
    assert record.seconds > 0
    assert record.peak_rss_bytes is None or record.peak_rss_bytes > 2**20
    assert record.reused == (BACKEND,)
    assert record.model_dump() == describe(workplace / "plan")["build"]
    path = workplace / "plan" / "build.json"
    path.write_text("[]")
    open_plan(workplace / "plan")  # what runs does not read it
    with pytest.raises(PlanError, match=r"build\.json is no record of a build; remove it"):
        describe(workplace / "plan")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(PlanError, match=r"build\.json is no record of a build; remove it"):
        describe(workplace / "plan")
    path.unlink()
    assert describe(workplace / "plan")["build"] is None
    assert rebuild(workplace, "drafters[0].max_draft=19")[0].reused == ("plan",)


def test_end_tokens_are_shown_and_a_word_among_them_is_warned_of(
    workplace: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rebuild(workplace, "drafters[0].max_draft=17")
    assert not caplog.records
    tokenizer = Tokenizer.from_file(str(workplace / "target" / "tokenizer.json"))
    (workplace / "target" / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 200]}))
    rebuild(workplace)
    word = tokenizer.decode([200])
    assert f"the end token 200 is {word!r}, which is no special token" in caplog.text
    shown = describe(workplace / "plan")
    special = {"id": 0, "text": tokenizer.id_to_token(0), "special": True}
    assert shown["end_tokens"] == [special, {"id": 200, "text": word, "special": False}]
    console = Console(file=StringIO(), width=400)
    print_description(shown, console)
    said = f"ends at the tokens 0 {special['text']!r}, 200 {word!r} (a word)\n"
    assert said in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_failed_build_leaves_the_old_plan_and_nothing_else(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = snapshot(workplace / "plan")

    def fail(*_: object, **__: object) -> None:
        raise PlanError("the rule broke")

    monkeypatch.setattr(outrider.compiler.build, "lower", fail)
    for out in ("plan", "new"):
        with pytest.raises(PlanError, match="the rule broke"):
            rebuild(workplace, "capacity.context=256", "target.rope_scaling={rope_type: linear, factor: 2.0}", out=out)
    assert snapshot(workplace / "plan") == before
    assert not (workplace / "new").exists()
    assert leftovers(workplace) == []


def test_a_plan_that_cannot_be_put_in_place_leaves_the_old_one(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = snapshot(workplace / "plan")
    rename = Path.rename

    def refuse_the_new(self: Path, target: Path) -> Path:
        if ".building-" in self.name:
            raise PermissionError("no")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse_the_new)
    with pytest.raises(PlanError, match="plan cannot be written"):
        rebuild(workplace, "drafters[0].max_draft=19")
    assert snapshot(workplace / "plan") == before
    assert leftovers(workplace) == []


def test_a_folder_that_is_no_plan_is_not_replaced(workplace: Path) -> None:
    (workplace / "mine").mkdir()
    (workplace / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(PlanError, match="mine exists and is not a plan; choose another --out"):
        rebuild(workplace, out="mine")
    with pytest.raises(PlanError, match="is not a folder"):
        rebuild(workplace, out="model.yaml")
    assert (workplace / "mine" / "thesis.txt").read_text() == "x"


def test_an_empty_folder_becomes_the_plan(workplace: Path) -> None:
    (workplace / "empty").mkdir()
    built, _ = rebuild(workplace, out="empty")
    assert open_plan(workplace / "empty").manifest == built.plan.manifest


def test_half_precision_on_the_cpu_is_refused_with_its_line(workplace: Path) -> None:
    recipe = workplace / "model.yaml"
    text = recipe.read_text(encoding="utf-8").replace("checkpoint: target\n", "checkpoint: target\n  dtype: float16\n")
    recipe.write_text(text, encoding="utf-8")
    line = text.splitlines().index("  dtype: float16") + 1
    with pytest.raises(
        RecipeError, match="is float16; onnxruntime-cpu computes in float32: set it to float32"
    ) as caught:
        rebuild(workplace)
    assert f"model.yaml:{line}" in str(caught.value)
    assert "target.dtype" in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "kept"),
    [
        (["kv_cache=int8", "backends=[onnxruntime-cuda]"], "int8; onnxruntime-cuda keeps .* float32 here"),
        (
            ["kv_cache=float16", "backends=[onnxruntime-cpu, {kind: tensorrt-rtx, dtype: bfloat16}]"],
            "float16; tensorrt-rtx keeps .* bfloat16 here",
        ),
    ],
)
def test_other_backends_keep_kv_as_their_weights_are(workplace: Path, overrides: list[str], kept: str) -> None:
    with pytest.raises(RecipeError, match=f"kv_cache is {kept}: leave kv_cache out, or build this backend by a recipe"):
        design_plan(load_recipe(workplace / "model.yaml", overrides))
    own = ["kv_cache=float16", "backends=[{kind: onnxruntime-cuda, dtype: float16}]"]
    design = design_plan(load_recipe(workplace / "model.yaml", own))
    kv = next(each for each in design.buffers(design.recipe.backends[0]) if each.name == "target.kv")
    assert kv.dtype is DType.FLOAT16


def test_another_type_of_kv_cache_makes_other_engines(workplace: Path) -> None:
    built, _ = rebuild(workplace, "kv_cache=int8")
    assert built.reused == ()
    assert rebuild(workplace, "kv_cache=int8")[0].reused == ("plan",)


@pytest.fixture
def no_export(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        pytest.fail("the checkpoint was exported before its text was checked")

    monkeypatch.setattr(outrider.compiler.build, "_export", fail)


@pytest.mark.usefixtures("no_export")
def test_a_checkpoint_without_a_tokenizer_is_refused_before_anything_takes_long(workplace: Path) -> None:
    (workplace / "target" / "tokenizer.json").unlink()
    before = snapshot(workplace / "plan")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json does not exist"):
        rebuild(workplace)
    assert snapshot(workplace / "plan") == before
    assert leftovers(workplace) == []


@pytest.mark.parametrize("content", ["{}", "not json", '{"model": {"type": "BPE"}}'])
@pytest.mark.usefixtures("no_export")
def test_a_tokenizer_that_cannot_be_read_is_refused(content: str, workplace: Path) -> None:
    (workplace / "target" / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"target/tokenizer\.json is not a tokenizer .* give a checkpoint with"):
        rebuild(workplace)


@pytest.mark.usefixtures("no_export")
def test_a_tokenizer_that_cannot_be_streamed_is_refused(workplace: Path) -> None:
    path = workplace / "target" / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    tokenizer["decoder"] = {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True}
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"has the decoder CTC, and text cannot be streamed .* give a checkpoint"):
        rebuild(workplace)


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{% if %}", "tokenizer_config.json, line 1, is not a Jinja template: "),
        ("{{ messages[0].contents.text }}", "failed on these messages (UndefinedError: "),
        ("{{ raise_exception('never') }}", "refuses these messages: never"),
        ("{% include 'other' %}", "includes 'other'"),
        ("{{ messages.append(1) }}", "does what the sandbox forbids"),
    ],
)
@pytest.mark.usefixtures("no_export")
def test_a_chat_template_that_renders_no_question_is_refused(template: str, sentence: str, workplace: Path) -> None:
    path = workplace / "target" / "tokenizer_config.json"
    path.write_text(json.dumps({"chat_template": template}), encoding="utf-8")
    with pytest.raises(CheckpointError) as refused:
        rebuild(workplace)
    assert sentence in str(refused.value)
    assert str(path) in str(refused.value)
    assert "correct it there, or remove it, so that the plan continues prompts and has no chat" in str(refused.value)


@pytest.mark.parametrize(
    ("written", "words"),
    [
        (17, "must be a text, or a list of objects with a name and a template; found 17"),
        ({}, "found {}"),
        ([], r"found \[\]"),
        ([{"name": "default", "template": 5}], "found 5"),
        ([{"name": "tools", "template": "x"}], "without a template named 'default', .* it names tools"),
        (["x"], "without a template named 'default'"),
    ],
)
@pytest.mark.usefixtures("no_export")
def test_a_chat_template_that_cannot_be_told_is_refused(written: object, words: str, workplace: Path) -> None:
    path = workplace / "target" / "tokenizer_config.json"
    path.write_text(json.dumps({"chat_template": written}), encoding="utf-8")
    with pytest.raises(CheckpointError, match=f"tokenizer_config.json: chat_template .*{words}"):
        rebuild(workplace)


def test_how_answers_are_outlined_is_a_file_of_the_plan(workplace: Path) -> None:
    assert not (workplace / "plan" / "skeleton.json").exists()
    built, _ = rebuild(workplace, "skeleton={most_points: 3, branch: 'To {point}:'}")
    assert built.reused == (BACKEND,)
    found = Runtime.load(workplace / "plan").skeleton
    assert (found.most_points, found.branch, found.outline_tokens) == (3, "To {point}:", 384)


@pytest.mark.parametrize("asked", ["system", "user"])
def test_a_chat_template_may_ask_for_a_system_message_or_refuse_it(asked: str, workplace: Path) -> None:
    template = "{% if messages[0].role != '" + asked + "' %}{{ raise_exception('no') }}{% endif %}hi"
    (workplace / "target" / "chat_template.jinja").write_text(template, encoding="utf-8")
    built, _ = rebuild(workplace)
    assert (built.plan.root / "tokenizer" / "chat_template.jinja").read_text(encoding="utf-8") == template


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(workplace: Path) -> None:
    path = workplace / "target" / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_tokens([f"extra{i}" for i in range(9)])
    tokenizer.save(str(path))
    with pytest.raises(CheckpointError, match="tokens up to id 308, and the model 300 of them"):
        rebuild(workplace, out="other")
    assert not list(workplace.glob("*other*"))


def test_a_moved_recipe_is_where_verify_will_look(workplace: Path) -> None:
    rebuild(workplace)
    shutil.move(workplace / "model.yaml", workplace / "renamed.yaml")
    recipe = workplace / "renamed.yaml"
    built = build(load_recipe(recipe), recipe, workplace / "plan")
    assert built.reused == ("plan",)
    assert (workplace / "plan" / read_manifest(workplace / "plan").source).resolve() == recipe.resolve()


@pytest.mark.parametrize("overrides", [(), ("drafters[0].max_draft=3",), ("target.rope_scaling={rope_type: default}",)])
def test_progress_counts_steps_known_from_the_first_report(workplace: Path, overrides: tuple[str, ...]) -> None:
    recipe = workplace / "model.yaml"
    told: list[tuple[int, int]] = []
    build(
        load_recipe(recipe, overrides), recipe, workplace / "plan", lambda done, total, text: told.append((done, total))
    )
    total = told[0][1]
    assert {t for _, t in told} == {total}
    assert [done for done, _ in told] == (list(range(total)) if overrides else [1])


def test_the_place_is_tried_before_the_weights_are_read(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outrider.compiler.build, "defer_decoder", None)
    recipe = workplace / "model.yaml"
    for out in ("/proc/nowhere/plan", workplace / "model.yaml" / "plan"):
        with pytest.raises(PlanError, match=r"cannot be written .*choose another --out"):
            build(load_recipe(recipe), recipe, Path(out))


def test_the_current_folder_becomes_the_plan(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, here = workplace / "model.yaml", workplace / "here"
    shutil.copytree(workplace / "plan", here)  # its engines are taken over: this is about the place
    monkeypatch.chdir(here)
    built = build(load_recipe(recipe, ["drafters=[]"]), Path("..") / "model.yaml", Path("."))
    assert open_plan(here).manifest == built.plan.manifest
    assert built.plan.manifest.drafters == ()
    assert (here / built.plan.manifest.source).resolve() == recipe.resolve()


def test_a_plan_behind_a_link_is_replaced_where_it_lies(workplace: Path) -> None:
    (workplace / "deep" / "down").mkdir(parents=True)
    shutil.copytree(workplace / "plan", workplace / "deep" / "down" / "plan")
    (workplace / "link").symlink_to(workplace / "deep" / "down" / "plan")
    built, _ = rebuild(workplace, "drafters=[]", out="link")
    assert (workplace / "link").is_symlink()
    assert open_plan(workplace / "deep" / "down" / "plan").manifest.drafters == ()
    source = workplace / "deep" / "down" / "plan" / built.plan.manifest.source
    assert source.resolve() == (workplace / "model.yaml").resolve()


def test_local_parts_of_versions_are_no_part_of_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.13.0+cu130" if name == "torch" else "1.0")
    assert tool_versions()["torch"] == "2.13.0"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["capacity.branches=4", "capacity.batching=true", "drafters=[]", "backends=[tensorrt-rtx]"],
            r"capacity\.batching is true, and tensorrt-rtx appends as many slots to every row",
        ),
    ],
)
def test_branches_that_no_plan_serves_are_refused_with_the_key(
    toy_recipe: Path, tmp_path: Path, overrides: list[str], said: str
) -> None:
    with pytest.raises(RecipeError, match=said):
        build(load_recipe(toy_recipe, overrides), toy_recipe, tmp_path / "plan")


def test_a_drafter_may_have_a_dot_in_its_name(toy_recipe: Path, tmp_path: Path) -> None:
    drafter = "{name: qwen3-0.6b, kind: model, checkpoint: drafter, gamma: 1}"
    build(load_recipe(toy_recipe, [f"drafters=[{drafter}]"]), toy_recipe, tmp_path / "plan")
    runtime = Runtime.load(tmp_path / "plan")
    assert runtime.generate([5, 6, 7], max_new_tokens=9, ignore_eos=True).stats.drafted > 0
