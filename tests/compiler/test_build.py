"""A second build keeps what is unchanged, the same inputs give the same plan, and a failed build changes nothing."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

import outrider.compiler.build
from outrider import Runtime
from outrider.compiler.build import BuildResult, build
from outrider.compiler.design import design_plan
from outrider.compiler.drafters import source_hashes
from outrider.compiler.identity import tool_versions
from outrider.compiler.inspect import describe
from outrider.compiler.recipe import load_recipe
from outrider.plans.buffers import DType
from outrider.plans.build_record import read_build_record
from outrider.plans.errors import CheckpointError, PlanError, RecipeError
from outrider.plans.plan import open_plan, read_manifest
from outrider.plans.skeleton import Skeleton

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
    """A folder with the toy's recipe, without drafters that take seconds to export, its checkpoints and its plan."""
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
    (workplace / "empty").mkdir()
    assert rebuild(workplace, out="empty")[0].plan.manifest == built.plan.manifest
    weights = workplace / "plan" / "engines" / BACKEND / "weights.bin"
    weights.write_bytes(bytes(weights.stat().st_size))
    assert rebuild(workplace)[0].reused == (), "the plan was damaged"
    assert snapshot(workplace / "plan").keys() == before.keys()
    open_plan(workplace / "plan")


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
        ("skeleton={most_points: 3, branch: 'To {point}:'}", True),
        ("target.rope_scaling={rope_type: linear, factor: 2.0}", False),
        ("kv_cache=int8", False),
    ],
)
def test_engines_are_built_anew_only_for_what_they_depend_on(workplace: Path, override: str, kept: bool) -> None:
    before = open_plan(workplace / "plan").manifest
    built, _ = rebuild(workplace, override)
    assert built.plan.manifest.identity != before.identity
    assert built.reused == ((BACKEND,) if kept else ())
    found = Runtime.load(workplace / "plan").skeleton
    assert (found.most_points, found.branch) == (3, "To {point}:") if "skeleton" in override else found == Skeleton()
    assert rebuild(workplace, override)[0].reused == ("plan",)


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


@pytest.mark.usefixtures("fresh_exports")
def test_the_same_inputs_in_another_folder_give_the_same_bytes_but_for_what_it_took(
    workplace: Path, tmp_path: Path
) -> None:
    elsewhere = shutil.copytree(workplace, tmp_path / "a" / "longer path")
    head = "drafters=[{name: head, kind: eagle3, checkpoint: head, tree: {top_k: 2, depth: 1, nodes: 4}}]"
    found = []
    for folder, out in ((workplace, "plan"), (elsewhere, "other name")):
        shutil.rmtree(folder / "plan")
        built, _ = rebuild(folder, head, out=out)
        assert built.reused == ()
        found.append(snapshot(built.plan.root))
        assert found[-1].pop("build.json")
    assert found[0] == found[1]


def test_a_build_records_what_it_took(workplace: Path) -> None:
    rebuild(workplace, "drafters[0].max_draft=19")
    record = read_build_record(workplace / "plan")
    assert record is not None
    assert record.seconds > 0
    assert record.peak_rss_bytes is None or record.peak_rss_bytes > 2**20
    assert record.reused == (BACKEND,)
    assert record.model_dump() == describe(workplace / "plan")["build"]
    path = workplace / "plan" / "build.json"
    for make in (lambda: path.write_text("[]"), lambda: os.mkfifo(path)):
        path.unlink()
        make()
        open_plan(workplace / "plan")  # what runs does not read it
        with pytest.raises(PlanError, match=r"build\.json is no record of a build; remove it"):
            describe(workplace / "plan")
    path.unlink()
    assert describe(workplace / "plan")["build"] is None
    assert rebuild(workplace, "drafters[0].max_draft=19")[0].reused == ("plan",)


def test_end_tokens_are_shown_and_a_word_among_them_is_warned_of(
    workplace: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = Tokenizer.from_file(str(workplace / "target" / "tokenizer.json"))
    (workplace / "target" / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 200]}))
    rebuild(workplace)
    word = tokenizer.decode([200])
    assert f"the end token 200 is {word!r}, which is no special token" in caplog.text
    special = {"id": 0, "text": tokenizer.id_to_token(0), "special": True}
    assert describe(workplace / "plan")["end_tokens"] == [special, {"id": 200, "text": word, "special": False}]


@pytest.mark.parametrize("out", ["plan", "new"])
@pytest.mark.parametrize("broken", ["lower", "rename"])
def test_a_failed_build_leaves_the_old_plan_and_nothing_else(
    workplace: Path, out: str, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, rename = snapshot(workplace / "plan"), Path.rename

    def refuse_the_new(self: Path, target: Path) -> Path:
        if ".building-" in self.name:
            raise PermissionError("no")
        return rename(self, target)

    if broken == "lower":
        monkeypatch.setattr(outrider.compiler.build, "lower", Mock(side_effect=PlanError("the rule broke")))
    else:
        monkeypatch.setattr(Path, "rename", refuse_the_new)
    with pytest.raises(PlanError, match="the rule broke" if broken == "lower" else f"{out} cannot be written"):
        rebuild(workplace, "target.rope_scaling={rope_type: linear, factor: 2.0}", out=out)
    assert snapshot(workplace / "plan") == before
    assert not (workplace / "new").exists()
    assert leftovers(workplace) == []


CUDA = "backends=[onnxruntime-cuda]"
PARTIAL = ("partial_kv.enabled=true", "partial_kv.n_spec_tokens_buf=16")
REFUSED: dict[str, tuple[str, ...]] = {
    r"target\.dtype is float16; onnxruntime-cpu computes in float32: set it to float32": ("target.dtype=float16",),
    "kv_cache is int8; onnxruntime-cuda keeps keys and values in float32 here: leave kv_cache out, or build": (
        "kv_cache=int8", CUDA,
    ),
    "kv_cache is float16; tensorrt-rtx keeps keys and values in bfloat16 here: leave kv_cache out": (
        "kv_cache=float16", "backends=[onnxruntime-cpu, {kind: tensorrt-rtx, dtype: bfloat16}]",
    ),
    r"capacity\.batching is true, and tensorrt-rtx appends the same number of slots to every row": (
        "capacity.branches=4", "capacity.batching=true", "drafters=[]", "backends=[tensorrt-rtx]",
    ),
    r"text\.jsonl holds \d+ tokens, too few to choose weights by; give some thou": (SEARCHED,),
    r"partial_kv\.enabled is true, and tensorrt-rtx reads KV caches of one size alone: set it to false, or": (
        "partial_kv.enabled=true", "backends=[tensorrt-rtx]",
    ),
    r"n_spec_tokens_buf is 7, but a step .* has up to 7 tokens, and one more must fit; raise it to 8 or more": (
        PARTIAL[0], "partial_kv.n_spec_tokens_buf=7",
    ),
    r"n_spec_tokens_buf is 17, but what waits there .* at most capacity\.prefill_chunk, 16; lower it": (
        PARTIAL[0], "partial_kv.n_spec_tokens_buf=17",
    ),
    r"n_retrieval_blocks is 256, which makes 4287 tokens .* more than the full KV cache's 384; lower it": (
        *PARTIAL, "partial_kv.partial_threshold=90",
    ),
    r"n_draft_window_tokens is 15, less than capacity\.prefill_chunk, 16": (
        *PARTIAL, "partial_kv.n_retrieval_blocks=2", "partial_kv.n_draft_window_tokens=15",
        "partial_kv.partial_threshold=90",
    ),
    r"partial_threshold is 4096, and no context of the plan is longer than 160; lower it": PARTIAL,
    r"budget is 3, but partial_kv\.n_retrieval_blocks leaves room for 2; lower it": (
        *PARTIAL, "partial_kv.n_retrieval_blocks=2", "partial_kv.budget=3",
    ),
    "is 'partial', which means its partial KV cache": (PARTIAL[0], "drafters=[{name: partial, kind: ngram}]"),
}  # fmt: skip


@pytest.mark.parametrize("said", REFUSED)
def test_a_recipe_that_no_plan_serves_is_refused_with_the_key(workplace: Path, said: str) -> None:
    (workplace / "text.jsonl").write_text('{"prompt": "short"}\n', encoding="utf-8")
    with pytest.raises(RecipeError, match=said):
        rebuild(workplace, *REFUSED[said])
    assert leftovers(workplace) == []


def test_settings_that_are_off_are_no_part_of_a_plan_and_kv_may_be_of_the_weights_type(workplace: Path) -> None:
    recipe = workplace / "model.yaml"
    assert load_recipe(recipe, ["partial_kv.block_size=8"]).resolved() == load_recipe(recipe).resolved()
    assert "partial_kv" in load_recipe(recipe, PARTIAL).resolved()
    own = ["kv_cache=float16", "backends=[{kind: onnxruntime-cuda, dtype: float16}]"]
    design = design_plan(load_recipe(recipe, own))
    kv = next(each for each in design.buffers(design.recipe.backends[0]) if each.name == "target.kv")
    assert kv.dtype is DType.FLOAT16


TOKENIZER, SETTINGS, CHAT = "tokenizer.json", "tokenizer_config.json", "chat_template"
DECODER = {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True}
REPAIR = "correct it there, or remove it, so that the plan continues prompts and has no chat"
WRONG_TEXT: list[tuple[str, dict[str, object] | None, str]] = [
    (TOKENIZER, None, "does not exist"),
    (TOKENIZER, {"model": {"type": "BPE"}}, "is not a tokenizer .* give a checkpoint with"),
    (TOKENIZER, {"decoder": DECODER}, "has the decoder CTC, and text cannot be streamed .* give a checkpoint"),
    (SETTINGS, {CHAT: "{% if %}"}, f", line 1, is not a Jinja template: .*{REPAIR}"),
    (SETTINGS, {CHAT: "{{ messages[0].contents.text }}"}, rf"failed on these messages \(UndefinedError: .*{REPAIR}"),
    (SETTINGS, {CHAT: "{{ raise_exception('never') }}"}, f"refuses these messages: never.*{REPAIR}"),
    (SETTINGS, {CHAT: "{% include 'other' %}"}, f"includes 'other'.*{REPAIR}"),
    (SETTINGS, {CHAT: "{{ messages.append(1) }}"}, f"does what the sandbox forbids.*{REPAIR}"),
    (
        SETTINGS,
        {CHAT: 17},
        ": chat_template .*must be a text, or a list of objects with a name and a template; found 17",
    ),
    (SETTINGS, {CHAT: [{"name": "default", "template": 5}]}, ": chat_template .*found 5"),
    (SETTINGS, {CHAT: [{"name": "tools", "template": "x"}]}, "without a template named 'default', .* it names tools"),
]


@pytest.mark.parametrize(("name", "written", "said"), WRONG_TEXT)
def test_a_checkpoint_whose_text_no_plan_serves_is_refused_before_anything_takes_long(
    name: str, written: dict[str, object] | None, said: str, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    too_early = AssertionError("the checkpoint was exported before its text was checked")
    monkeypatch.setattr(outrider.compiler.build, "_export", Mock(side_effect=too_early))
    path, before = workplace / "target" / name, snapshot(workplace / "plan")
    content = json.loads(path.read_text(encoding="utf-8"))
    path.unlink()
    if written is not None:
        path.write_text(json.dumps(content | written), encoding="utf-8")
    with pytest.raises(CheckpointError, match=f"{re.escape(str(path))}.*{said}"):
        rebuild(workplace)
    assert snapshot(workplace / "plan") == before
    assert leftovers(workplace) == []


@pytest.mark.parametrize("asked", ["system", "user"])
def test_a_chat_template_may_ask_for_a_system_message_or_refuse_it(asked: str, workplace: Path) -> None:
    template = "{% if messages[0].role != '" + asked + "' %}{{ raise_exception('no') }}{% endif %}hi"
    (workplace / "target" / "chat_template.jinja").write_text(template, encoding="utf-8")
    built, _ = rebuild(workplace)
    assert built.reused == (BACKEND,)
    assert (built.plan.root / "tokenizer" / "chat_template.jinja").read_text(encoding="utf-8") == template


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(workplace: Path) -> None:
    path = workplace / "target" / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_tokens([f"extra{i}" for i in range(9)])
    tokenizer.save(str(path))
    with pytest.raises(CheckpointError, match="tokens up to id 308, and the model 300 of them"):
        rebuild(workplace, out="other")
    assert not list(workplace.glob("*other*"))


@pytest.mark.parametrize("overrides", [(), ("drafters[0].max_draft=3",), ("target.rope_scaling={rope_type: default}",)])
def test_progress_counts_steps_known_from_the_first_report(workplace: Path, overrides: tuple[str, ...]) -> None:
    recipe = workplace / "model.yaml"
    steps: list[tuple[int, int]] = []
    build(load_recipe(recipe, overrides), recipe, workplace / "plan", lambda *step: steps.append(step[:2]))
    total = steps[0][1]
    assert {t for _, t in steps} == {total}
    assert [done for done, _ in steps] == (list(range(total)) if overrides else [1])


# The place of the plan.


def test_a_place_that_cannot_be_the_plans_is_refused_before_weights_are_read(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outrider.compiler.build, "defer_decoder", None)
    (workplace / "mine").mkdir()
    (workplace / "mine" / "thesis.txt").write_text("x")
    for out, said in (
        ("mine", "mine exists and is not a plan; choose another --out"),
        ("model.yaml", "is not a folder"),
        ("/proc/nowhere/plan", "cannot be written .*choose another --out"),
        ("model.yaml/plan", "cannot be written .*choose another --out"),
    ):
        with pytest.raises(PlanError, match=said):
            rebuild(workplace, out=out)
    assert (workplace / "mine" / "thesis.txt").read_text() == "x"


def test_a_plan_names_its_recipe_wherever_both_lie(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe that was renamed, the current folder as the plan's, and a link to a plan, which is replaced where it
    lies."""
    recipe, here, deep = workplace / "renamed.yaml", workplace / "here", workplace / "deep" / "plan"
    (workplace / "model.yaml").rename(recipe)
    for copy in (here, deep):
        shutil.copytree(workplace / "plan", copy)  # its engines are taken over: this is about the place
    (workplace / "link").symlink_to(deep)
    monkeypatch.chdir(here)
    for out, override, place, reused in (
        ("../plan", (), workplace / "plan", "plan"),
        ("../link", ("drafters=[]",), deep, BACKEND),
        (".", ("drafters=[]",), here, BACKEND),  # the last one: the folder is another then
    ):
        built = build(load_recipe(recipe, override), Path("..") / "renamed.yaml", Path(out))
        assert built.reused == (reused,)
        assert open_plan(place).manifest.drafters == built.plan.manifest.drafters
        assert (place / read_manifest(place).source).resolve() == recipe.resolve()
    assert (workplace / "link").is_symlink()


def test_local_parts_of_versions_are_no_part_of_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.13.0+cu130" if name == "torch" else "1.0")
    assert tool_versions()["torch"] == "2.13.0"


def test_a_drafter_may_have_a_dot_in_its_name(toy_recipe: Path, tmp_path: Path) -> None:
    drafter = "{name: qwen3-0.6b, kind: model, checkpoint: drafter, gamma: 1}"
    build(load_recipe(toy_recipe, [f"drafters=[{drafter}]"]), toy_recipe, tmp_path / "plan")
    runtime = Runtime.load(tmp_path / "plan")
    assert runtime.generate([5, 6, 7], max_new_tokens=9, ignore_eos=True).stats.drafted > 0
