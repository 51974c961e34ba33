"""A plan is opened strictly: any fault ends in a `PlanError`, when it is loaded and not later."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider import Runtime
from outrider.plans.errors import PlanError
from outrider.plans.plan import open_plan
from tests.plans.damage import BACKEND, ENGINE, TEMPLATE, TOKENIZER, WEIGHTS, edit, list_again, refused, sign_again


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


def link(file: Path, destination: str) -> None:
    file.unlink()
    file.symlink_to(destination)


def put(plan: Path, name: str, data: bytes) -> None:
    """Write a file that the list of files then says to be right."""
    (plan / name).write_bytes(data)
    list_again(plan)


def edit_graph(plan: Path, change: Callable[[onnx.ModelProto], object]) -> None:
    model = onnx.load(plan / ENGINE, load_external_data=False)
    change(model)
    put(plan, ENGINE, model.SerializeToString())


def place_weights(plan: Path, location: str) -> None:
    def change(model: onnx.ModelProto) -> None:
        for initializer in model.graph.initializer:
            for entry in initializer.external_data:
                if entry.key == "location":
                    entry.value = location

    edit_graph(plan, change)


def widen_logits(model: onnx.ModelProto) -> None:
    next(v for v in model.graph.output if v.name == "logits").type.tensor_type.shape.dim[1].dim_value = 600


GRAPH = "target.onnx"
DAMAGED: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "a file cut short": (lambda p: os.truncate(p / TEMPLATE, 5), (TEMPLATE, "bytes")),
    "one flipped bit of the weights": (lambda p: flip_a_bit(p / WEIGHTS), (WEIGHTS, "sha256")),
    "a missing file": (lambda p: (p / ENGINE).unlink(), (ENGINE, "missing")),
    "a folder in the place of a file": (
        lambda p: ((p / TOKENIZER).unlink(), (p / TOKENIZER).mkdir()),
        (TOKENIZER, "missing"),
    ),
    "a file that is not listed": (lambda p: (p / f"engines/{BACKEND}/.hidden").write_text("x"), (".hidden",)),
    "a chat template taken off the list": (
        lambda p: edit(p, lambda m: m.update(files=[f for f in m["files"] if f["path"] != TEMPLATE])),
        (TEMPLATE,),
    ),
    "an engine that is not listed": (
        lambda p: edit(p, lambda m: m["backends"][BACKEND]["engines"]["target"].update(file="engines/other.onnx")),
        ("engines/other.onnx",),
    ),
    "a linked folder": (lambda p: (p / "engines" / BACKEND / "more").symlink_to(p.parent), ("more",)),
    "a link out of the plan": (lambda p: link(p / TOKENIZER, "/etc/hostname"), ("link",)),
    "a link to itself": (lambda p: link(p / TOKENIZER, "tokenizer.json"), ("link",)),
    "another version": (
        lambda p: edit(p, lambda m: m.update(format_version=1)),
        ("has format version 1, this runtime reads 19; build the plan with this version",),
    ),
    "a plan.json too large to be one": (lambda p: os.truncate(p / "plan.json", 2**33), ("larger",)),
    "weights in another folder": (lambda p: place_weights(p, "../../tokenizer/tokenizer.json"), (GRAPH,)),
    "weights anywhere": (lambda p: place_weights(p, "/etc/hostname"), (GRAPH,)),
    "an engine that is no graph": (lambda p: put(p, ENGINE, b"\x08\x0a"), (GRAPH,)),
    "weights cut short": (lambda p: put(p, WEIGHTS, bytes(4096)), (GRAPH,)),
    "an engine with another signature": (lambda p: edit_graph(p, widen_logits), (GRAPH,)),
    "a tokenizer that is none": (lambda p: put(p, TOKENIZER, b"[]"), (TOKENIZER,)),
    "a chat template with a mistake": (
        lambda p: put(p, TEMPLATE, b"{% break %}"),
        (TEMPLATE, "correct it there, or remove it, so that the plan continues prompts and has no chat"),
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_plan_is_refused_and_the_place_is_named(plan: Path, case: str) -> None:
    damage, named = DAMAGED[case]
    damage(plan)
    sentence = refused(plan)
    assert [part for part in named if part not in sentence] == []


def test_an_untouched_copy_gives_the_same_tokens_and_hashes_are_what_verify_is_about(plan: Path, toy: Runtime) -> None:
    copy = Runtime.load(plan)
    assert copy.generate("import", max_new_tokens=8).token_ids == toy.generate("import", max_new_tokens=8).token_ids
    flip_a_bit(plan / WEIGHTS)
    open_plan(plan, verify=False)


def test_a_link_to_the_plan_is_followed_to_where_it_leads_when_the_plan_is_opened(plan: Path, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    plan.rename(tmp_path / "store" / "abc")
    (tmp_path / "plans").symlink_to("store")
    current = tmp_path / "current"
    current.symlink_to("plans/abc")
    assert Runtime.load(current).generate([5, 6], max_new_tokens=1, ignore_eos=True).token_ids
    opened, through = open_plan(current), open_plan(tmp_path / "plans" / "abc")
    current.unlink()
    current.symlink_to("plans/def")  # another plan is current while the first one is being loaded
    (tmp_path / "plans").unlink()
    assert opened.file(TOKENIZER).is_file()
    assert through.file(TOKENIZER).is_file()
    assert "leads nowhere" in refused(current)
    current.unlink()
    current.symlink_to(current)
    assert "leads nowhere" in refused(current)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"most_points": 3, "branch": "{point}"}', None),
        ('{"branch": "{outline}"}', "skeleton.json: branch: Value error, is no template of a branch"),
        ('{"most_points": 17}', "skeleton.json: most_points"),
    ],
)
def test_how_answers_are_outlined_is_read_with_the_plan(plan: Path, text: str, said: str | None) -> None:
    assert Runtime.load(plan).skeleton.most_points == 16
    (plan / "skeleton.json").write_text(text)
    assert "skeleton.json is not in the file list" in refused(plan)
    edit(plan, lambda m: m["files"].append({"path": "skeleton.json", "sha256": "", "size": 0}))
    list_again(plan)
    if said is None:
        assert Runtime.load(plan).skeleton.most_points in (3, 16)
    else:
        assert said in refused(plan)


def test_what_is_no_folder_of_a_plan_is_refused(tmp_path: Path) -> None:
    for name in ("x" * 300, "a\0b"):
        assert "cannot be read" in refused(tmp_path / name)
    assert "outrider build" in refused(tmp_path)
    assert "outrider build" in refused(tmp_path / "none")
    (tmp_path / "file").write_text("x")
    assert "outrider build" in refused(tmp_path / "file")


# Paths of the file list.


@pytest.mark.parametrize(
    "path",
    [
        "../outside", "tokenizer/../../outside", "/etc/hostname", "C:/x", "tokenizer\\tokenizer.json", "",
        "tokenizer//tokenizer.json", "./plan.json", "tokenizer/", "..", "tokenizer/\0", "a b\n", "x" * 5000,
    ],
)  # fmt: skip
def test_a_path_that_is_none_of_a_plans_is_refused(plan: Path, path: str) -> None:
    (plan.parent / "outside").write_text("x")
    edit(plan, lambda m: m["files"][0].update(path=path))
    sentence = refused(plan)
    assert "path" in sentence
    assert len(sentence) < 500


# plan.json as text.


@pytest.mark.parametrize(
    "text",
    [
        b"", b"\xff\xfe\x00", b"null", b"[]", b"{}", b"[" * 200_000, b'{"format_version": NaN}',
        b'{"format_version": 18, "recipe": ' + b'{"a":' * 900 + b"1" + b"}" * 901,
        b'{"format_version": ' + b"9" * 100_000 + b"}", b'{"format_version": ' + b"9" * 4000 + b"}",
        b'{"format_version": {"a": "' + b"x" * 9999 + b'"}}', b'{"format_version": 18, "name": "\\ud800"}',
    ],
)  # fmt: skip
def test_text_that_is_no_manifest_is_refused_in_a_short_sentence(plan: Path, text: bytes) -> None:
    (plan / "plan.json").write_bytes(text)
    assert len(refused(plan)) < 1000


def test_a_plan_json_that_was_edited_by_hand_is_refused_and_its_layout_says_nothing(plan: Path) -> None:
    path = plan / "plan.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(manifest, indent=7), encoding="utf-8")
    open_plan(plan)
    manifest["text"]["eos_token_ids"] = [5]
    path.write_text(json.dumps(manifest), encoding="utf-8")
    for verify in (True, False):
        with pytest.raises(PlanError, match=r"plan\.json was changed after the build: .* build the plan again"):
            Runtime.load(plan, verify=verify)
    del manifest["digest"]
    path.write_text(json.dumps(manifest), encoding="utf-8")
    assert "was changed after the build" in refused(plan)


def test_a_deeply_nested_recipe_is_refused_or_read(plan: Path) -> None:
    text = (plan / "plan.json").read_text(encoding="utf-8")
    for depth in (150, 300, 5000, 100_000):
        nested = '{"deep":' + "[" * depth + "]" * depth + ","
        (plan / "plan.json").write_text(text.replace('"recipe": {', '"recipe": ' + nested, 1), encoding="utf-8")
        sign_again(plan)
        try:
            open_plan(plan)
        except PlanError:
            continue
        assert depth < 1000


def test_logits_that_are_not_numbers_end_the_generation_with_a_sentence(plan: Path) -> None:
    size = (plan / WEIGHTS).stat().st_size
    put(plan, WEIGHTS, np.full(size // 4, np.nan, np.float32).tobytes())
    runtime = Runtime.load(plan)
    for drafter in ("none", "ngram"):
        with pytest.raises(PlanError, match="logits"):
            runtime.generate("import", drafter=drafter, temperature=1.0)


# Anything at all.


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_edits_of_the_manifest_are_refused_or_harmless(plan: Path, toy_plan: Path, data: st.DataObject) -> None:
    whole = (toy_plan / "plan.json").read_bytes()
    changed = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(changed) - 1))
        match data.draw(st.sampled_from(["set", "digit", "cut", "copy"])):
            case "set":
                changed[place] = data.draw(st.integers(0, 255))
            case "digit":
                digits = [i for i, byte in enumerate(changed) if 48 <= byte <= 57]
                changed[digits[place % len(digits)]] = data.draw(st.integers(48, 57))
            case "cut":
                del changed[place : place + data.draw(st.integers(1, 40))]
            case "copy":
                changed[place:place] = changed[place : place + data.draw(st.integers(1, 200))]
    (plan / "plan.json").write_bytes(changed)
    sign_again(plan)
    try:
        runtime = Runtime.load(plan)
        assert len(runtime.generate([5, 6], max_new_tokens=3, ignore_eos=True).token_ids) == 3
    except PlanError:
        pass  # any other exception fails
