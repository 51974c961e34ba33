"""A plan is opened strictly: whatever is wrong with it ends in a `PlanError`, when it is loaded and not later."""

from __future__ import annotations

import json
import os
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

# Files.


def test_an_untouched_copy_loads_and_gives_the_same_tokens(plan: Path, toy: Runtime) -> None:
    copy = Runtime.load(plan)
    assert copy.generate("import", max_new_tokens=8).token_ids == toy.generate("import", max_new_tokens=8).token_ids


@pytest.mark.parametrize("name", [ENGINE, WEIGHTS, TOKENIZER, TEMPLATE])
def test_a_truncated_file_is_refused_by_its_size(plan: Path, name: str) -> None:
    path = plan / name
    path.write_bytes(path.read_bytes()[:-1])
    sentence = refused(plan)
    assert name in sentence
    assert "bytes" in sentence


@pytest.mark.parametrize("place", [0, 5000, -1])
def test_one_flipped_bit_of_the_weights_is_refused_by_its_hash(plan: Path, place: int) -> None:
    path = plan / WEIGHTS
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)
    sentence = refused(plan)
    assert WEIGHTS in sentence
    assert "sha256" in sentence
    open_plan(plan, verify=False)  # hashes are what `verify` is about


@pytest.mark.parametrize("name", [ENGINE, WEIGHTS, TOKENIZER])
def test_a_missing_file_is_named(plan: Path, name: str) -> None:
    (plan / name).unlink()
    sentence = refused(plan)
    assert name in sentence
    assert "missing" in sentence


def test_a_folder_in_the_place_of_a_file_is_refused(plan: Path) -> None:
    (plan / TOKENIZER).unlink()
    (plan / TOKENIZER).mkdir()
    assert "missing" in refused(plan)


@pytest.mark.parametrize("name", ["tokenizer/added.txt", f"engines/{BACKEND}/.hidden", "extra.json"])
def test_a_file_that_is_not_listed_is_refused(plan: Path, name: str) -> None:
    (plan / name).write_text("x")
    assert name in refused(plan)


def test_a_chat_template_taken_off_the_list_is_not_read(plan: Path) -> None:
    edit(plan, lambda m: m.update(files=[f for f in m["files"] if f["path"] != TEMPLATE]))
    assert TEMPLATE in refused(plan)


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


@pytest.mark.parametrize("name", ["x" * 300, "a\0b"])
def test_a_path_that_cannot_be_one_is_refused(tmp_path: Path, name: str) -> None:
    assert "cannot be read" in refused(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"most_points": 3, "branch": "{point}"}', None),
        ("{}", None),
        ('{"branch": "{outline}"}', "skeleton.json: branch: Value error, is no template of a branch"),
        ('{"branch": "{point.line}"}', "skeleton.json: branch"),
        ('{"most_points": 17}', "skeleton.json: most_points"),
        ('{"color": 1}', "skeleton.json: color"),
        ("[", "skeleton.json: the file"),
        ("", "skeleton.json: the file"),
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


def test_a_linked_folder_is_refused(plan: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (plan / "engines" / BACKEND / "more").symlink_to(tmp_path / "elsewhere")
    assert "more" in refused(plan)


def test_no_folder_and_an_empty_folder_are_no_plans(tmp_path: Path) -> None:
    assert "outrider build" in refused(tmp_path)
    assert "outrider build" in refused(tmp_path / "none")
    (tmp_path / "file").write_text("x")
    assert "outrider build" in refused(tmp_path / "file")


# Paths of the file list.


@pytest.mark.parametrize(
    "path",
    [
        "../outside", "tokenizer/../../outside", "/etc/hostname", "C:/x", "tokenizer\\tokenizer.json",
        "tokenizer//tokenizer.json", "./plan.json", "", "tokenizer/", "/", ".", "..", "tokenizer/\0", "a\nb", "a b",
        "\u202etokenizer", "x" * 5000, "/".join(["x"] * 500), "~/x", "file:x", "con:",
        "C:x", "tokenizer/tokenizer.json::$DATA",
    ],
)  # fmt: skip
def test_a_path_that_is_none_of_a_plans_is_refused(plan: Path, path: str) -> None:
    (plan.parent / "outside").write_text("x")
    edit(plan, lambda m: m["files"][0].update(path=path))
    sentence = refused(plan)
    assert "path" in sentence
    assert len(sentence) < 500


@pytest.mark.parametrize("destination", ["/etc/hostname", "../../outside", "tokenizer.json"])
def test_a_link_out_of_the_plan_or_to_itself_is_refused(plan: Path, destination: str) -> None:
    (plan.parent / "outside").write_text("x")
    (plan / TOKENIZER).unlink()
    (plan / TOKENIZER).symlink_to(destination)
    assert "link" in refused(plan)


def test_an_engine_that_is_not_listed_is_refused(plan: Path) -> None:
    edit(plan, lambda m: m["backends"][BACKEND]["engines"]["target"].update(file="engines/other.onnx"))
    assert "engines/other.onnx" in refused(plan)


# plan.json as text.


@pytest.mark.parametrize(
    "text",
    [
        b"", b"not json", b"\xff\xfe\x00", b"null", b"[]", b"7", b'"x"', b"{}", b'{"format_version": 3}',
        b"[" * 200_000, b'{"format_version": 3, "recipe": ' + b'{"a":' * 900 + b"1" + b"}" * 901,
        b'{"format_version": ' + b"9" * 100_000 + b"}", b'{"format_version": ' + b"9" * 4000 + b"}",
        b'{"format_version": 1e999}', b'{"format_version": NaN}', b'{"format_version": "1"}',
        b'{"format_version": true}', b'{"format_version": 4}', b'{"format_version": {"a": "' + b"x" * 9999 + b'"}}',
        b'{"format_version": 3, "name": "\\ud800"}', b"\xef\xbb\xbf{}",
    ],
)  # fmt: skip
def test_text_that_is_no_manifest_is_refused_in_a_short_sentence(plan: Path, text: bytes) -> None:
    (plan / "plan.json").write_bytes(text)
    assert len(refused(plan)) < 1000


def test_a_plan_of_another_version_is_refused_with_what_to_do(plan: Path) -> None:
    edit(plan, lambda m: m.update(format_version=1))
    assert "has format version 1, this runtime reads 17; build the plan with this version" in refused(plan)


@pytest.mark.parametrize("verify", [True, False])
def test_a_plan_json_that_was_edited_by_hand_is_refused(plan: Path, verify: bool) -> None:
    path = plan / "plan.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    manifest["text"]["eos_token_ids"] = [5]
    path.write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(PlanError, match=r"plan\.json was changed after the build: .* build the plan again"):
        Runtime.load(plan, verify=verify)
    del manifest["digest"]
    path.write_text(json.dumps(manifest), encoding="utf-8")
    assert "was changed after the build" in refused(plan)


def test_the_layout_of_plan_json_says_nothing(plan: Path) -> None:
    path = plan / "plan.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")), indent=7), encoding="utf-8")
    open_plan(plan)


def test_a_deeply_nested_recipe_is_refused_or_read(plan: Path) -> None:
    text = (plan / "plan.json").read_text(encoding="utf-8")
    for depth in (150, 300, 5000, 100_000):
        nested = '{"deep":' + "[" * depth + "]" * depth + ","
        (plan / "plan.json").write_text(text.replace('"recipe":{', '"recipe":' + nested, 1).replace(
            '"recipe": {', '"recipe": ' + nested, 1), encoding="utf-8")  # fmt: skip
        sign_again(plan)
        try:
            open_plan(plan)
        except PlanError:
            continue
        assert depth < 1000


def test_a_manifest_that_is_too_large_to_be_one_is_not_parsed(plan: Path) -> None:
    os.truncate(plan / "plan.json", 2**33)
    assert "larger" in refused(plan)


# Contents that are whole but wrong.


@pytest.mark.parametrize("location", ["../../tokenizer/tokenizer.json", "/etc/hostname", "../weights.bin", "none"])
def test_weights_outside_the_engines_folder_are_refused(plan: Path, location: str) -> None:
    model = onnx.load(plan / ENGINE, load_external_data=False)
    for initializer in model.graph.initializer:
        for entry in initializer.external_data:
            if entry.key == "location":
                entry.value = location
    (plan / ENGINE).write_bytes(model.SerializeToString())
    list_again(plan)
    assert "target.onnx" in refused(plan)


@pytest.mark.parametrize("data", [b"", b"x" * 100, b"\x08\x0a", b"\xff" * 5000])
def test_an_engine_that_is_no_graph_is_refused(plan: Path, data: bytes) -> None:
    (plan / ENGINE).write_bytes(data)
    list_again(plan)
    assert "target.onnx" in refused(plan)


def test_weights_cut_short_are_refused_by_the_engine(plan: Path) -> None:
    os.truncate(plan / WEIGHTS, 4096)
    list_again(plan)
    assert "target.onnx" in refused(plan)


def test_an_engine_with_another_signature_is_refused(plan: Path) -> None:
    model = onnx.load(plan / ENGINE, load_external_data=False)
    dimension = next(v for v in model.graph.output if v.name == "logits").type.tensor_type.shape.dim[1]
    dimension.dim_value = 600
    (plan / ENGINE).write_bytes(model.SerializeToString())
    list_again(plan)
    assert "target.onnx" in refused(plan)


def test_logits_that_are_not_numbers_end_the_generation_with_a_sentence(plan: Path) -> None:
    weights = np.fromfile(plan / WEIGHTS, dtype=np.float32)
    weights[:] = np.nan
    weights.tofile(plan / WEIGHTS)
    list_again(plan)
    runtime = Runtime.load(plan)
    for drafter in ("none", "ngram"):
        with pytest.raises(PlanError, match="logits"):
            runtime.generate("import", drafter=drafter, temperature=1.0)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"model": {"type": "BPE"}}', "\ufeff{}"])
def test_a_tokenizer_that_is_none_is_refused(plan: Path, text: str) -> None:
    (plan / TOKENIZER).write_text(text, encoding="utf-8")
    list_again(plan)
    assert TOKENIZER in refused(plan)


@pytest.mark.parametrize("text", ["{% for m in messages %}", "{{", "{% endif %}", "{% break %}", "{{ " + "(" * 5000])
def test_a_chat_template_with_a_mistake_is_refused_with_what_helps(plan: Path, text: str) -> None:
    (plan / TEMPLATE).write_text(text, encoding="utf-8")
    list_again(plan)
    sentence = refused(plan)
    assert str(plan / TEMPLATE) in sentence
    assert "correct it there, or remove it, so that the plan continues prompts and has no chat" in sentence
    assert ".." not in sentence.replace(str(plan), "")


@pytest.mark.parametrize("text", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}"])
def test_a_chat_template_cannot_leave_its_sandbox(plan: Path, text: str) -> None:
    (plan / TEMPLATE).write_text(text, encoding="utf-8")
    list_again(plan)
    with pytest.raises(PlanError):
        Runtime.load(plan).tokenizer.apply_chat_template([{"role": "user", "content": "x"}])


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
