"""A plan is opened strictly: whatever is wrong with it ends in a `PlanError`, when it is loaded and not later."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plans.errors import PlanError
from plans.plan import file_sha256, open_plan
from runtime import Runtime

Edit = Callable[[dict[str, Any]], object]
TARGET = "onnxruntime-cpu"
ENGINE = f"engines/{TARGET}/target.onnx"
WEIGHTS = f"engines/{TARGET}/weights.bin"
TOKENIZER = "tokenizer/tokenizer.json"
TEMPLATE = "tokenizer/chat_template.jinja"


@pytest.fixture
def plan(toy_plan: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return shutil.copytree(toy_plan, tmp_path / "plan")


def edit(plan: Path, change: Edit) -> None:
    """Change `plan.json` as data."""
    path = plan / "plan.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    change(manifest)
    path.write_text(json.dumps(manifest), encoding="utf-8")


def list_again(plan: Path) -> None:
    """Make sizes and hashes true again, so that the check behind them is reached."""

    def refresh(manifest: dict[str, Any]) -> None:
        for entry in manifest["files"]:
            path = plan / entry["path"]
            entry["sha256"], entry["size"] = file_sha256(path), path.stat().st_size

    edit(plan, refresh)


def refused(plan: Path) -> str:
    """The sentence with which loading refuses the plan."""
    with pytest.raises(PlanError) as caught:
        Runtime.load(plan)
    sentence = str(caught.value)
    assert len(sentence) > 30
    assert "Traceback" not in sentence
    return sentence


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


@pytest.mark.parametrize("name", ["tokenizer/added.txt", f"engines/{TARGET}/.hidden", "extra.json"])
def test_a_file_that_is_not_listed_is_refused(plan: Path, name: str) -> None:
    (plan / name).write_text("x")
    assert name in refused(plan)


def test_a_chat_template_taken_off_the_list_is_not_read(plan: Path) -> None:
    edit(plan, lambda m: m.update(files=[f for f in m["files"] if f["path"] != TEMPLATE]))
    assert TEMPLATE in refused(plan)


def test_a_linked_folder_is_refused(plan: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (plan / "engines" / TARGET / "more").symlink_to(tmp_path / "elsewhere")
    assert "more" in refused(plan)


def test_no_folder_and_an_empty_folder_are_no_plans(tmp_path: Path) -> None:
    assert "compiler build" in refused(tmp_path)
    assert "compiler build" in refused(tmp_path / "none")
    (tmp_path / "file").write_text("x")
    assert "compiler build" in refused(tmp_path / "file")


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
    edit(plan, lambda m: m["targets"][TARGET]["engines"]["target"].update(file="engines/other.onnx"))
    assert "engines/other.onnx" in refused(plan)


# plan.json as text.


@pytest.mark.parametrize(
    "text",
    [
        b"", b"not json", b"\xff\xfe\x00", b"null", b"[]", b"7", b'"x"', b"{}", b'{"format_version": 1}',
        b"[" * 200_000, b'{"format_version": 1, "recipe": ' + b'{"a":' * 900 + b"1" + b"}" * 901,
        b'{"format_version": ' + b"9" * 100_000 + b"}", b'{"format_version": ' + b"9" * 4000 + b"}",
        b'{"format_version": 1e999}', b'{"format_version": NaN}', b'{"format_version": "1"}',
        b'{"format_version": true}', b'{"format_version": 2}', b'{"format_version": {"a": "' + b"x" * 9999 + b'"}}',
        b'{"format_version": 1, "name": "\\ud800"}', b"\xef\xbb\xbf{}",
    ],
)  # fmt: skip
def test_text_that_is_no_manifest_is_refused_in_a_short_sentence(plan: Path, text: bytes) -> None:
    (plan / "plan.json").write_bytes(text)
    assert len(refused(plan)) < 1000


def test_a_deeply_nested_recipe_is_refused_or_read(plan: Path) -> None:
    text = (plan / "plan.json").read_text(encoding="utf-8")
    for depth in (150, 300, 5000, 100_000):
        nested = '{"deep":' + "[" * depth + "]" * depth + ","
        (plan / "plan.json").write_text(text.replace('"recipe":{', '"recipe":' + nested, 1).replace(
            '"recipe": {', '"recipe": ' + nested, 1), encoding="utf-8")  # fmt: skip
        try:
            open_plan(plan)
        except PlanError:
            continue
        assert depth < 1000


def test_a_manifest_that_is_too_large_to_be_one_is_not_parsed(plan: Path) -> None:
    os.truncate(plan / "plan.json", 2**33)
    assert "larger" in refused(plan)


# plan.json as data. Every case names what the sentence must name.


def target(m: dict[str, Any]) -> dict[str, Any]:
    return m["targets"][TARGET]


def model(m: dict[str, Any]) -> dict[str, Any]:
    return m["models"]["target"]


def symbols(m: dict[str, Any]) -> dict[str, Any]:
    return target(m)["symbols"]["target"]


def stage(m: dict[str, Any], program: str, index: int) -> dict[str, Any]:
    return target(m)["programs"][program]["stages"][index]


def tensor(m: dict[str, Any], name: str) -> dict[str, Any]:
    return next(b for b in target(m)["buffers"] if b["name"] == f"target.{name}")


def engine(m: dict[str, Any]) -> dict[str, Any]:
    return target(m)["engines"]["target"]


def rename_buffer(m: dict[str, Any], old: str, new: str) -> None:
    tensor(m, old)["name"] = new


MASK, FORWARD, SAMPLE = 0, 1, 2  # places in `decode`

WRONG: dict[str, tuple[Edit, str]] = {
    "an extra key": (lambda m: m.update(hook="import os"), "hook"),
    "an extra key deep inside": (lambda m: model(m).update(color=1), "models.target.color"),
    "a missing key": (lambda m: m.pop("drafters"), "drafters"),
    "a number as text": (lambda m: model(m).update(layers="2"), "models.target.layers"),
    "a number as a fraction": (lambda m: model(m).update(layers=2.0), "models.target.layers"),
    "a number as a truth": (lambda m: model(m).update(branches=True), "models.target.branches"),
    "null for a table": (lambda m: m.update(targets=None), "targets"),
    "a list for a table": (lambda m: m.update(targets=[]), "targets"),
    "no target": (lambda m: m.update(targets={}), "holds"),
    "an unknown target": (lambda m: m.update(targets={"cuda": target(m)}), "cuda"),
    "a hash of the wrong length": (lambda m: m["files"][0].update(sha256="00"), "sha256"),
    "an identity that is no hash": (lambda m: m.update(identity="x"), "identity"),
    "a negative size of a file": (lambda m: m["files"][0].update(size=-1), "size"),
    "a size of a file with 4000 digits": (lambda m: m["files"][0].update(size=10**3999), "size"),
    "negative layers": (lambda m: model(m).update(layers=-1), "models.target.layers"),
    "no layers": (lambda m: model(m).update(layers=0), "models.target.layers"),
    "layers with 4000 digits": (lambda m: model(m).update(layers=10**3999), "models.target.layers"),
    "another number of layers": (lambda m: model(m).update(layers=3), "kv"),
    "heads that do not divide": (lambda m: model(m).update(heads=3), "heads"),
    "another vocabulary": (lambda m: model(m).update(vocab_size=299), "logits"),
    "another capacity": (lambda m: model(m).update(capacity=2**20), "kv"),
    "a context beyond the arena": (lambda m: model(m).update(context=1000), "context"),
    "a chunk beyond the buffers": (lambda m: model(m).update(prefill_chunk=17), "symbols.target.N"),
    "more branches than slots": (lambda m: model(m).update(branches=2), "accepted_count"),
    "two drafters of one name": (lambda m: m["drafters"][1].update(name="ngram"), "ngram"),
    "a drafter named none": (lambda m: m["drafters"][1].update(name="none"), "none"),
    "a drafter of unknown kind": (lambda m: m["drafters"][0].update(kind="oracle"), "kind"),
    "a draft longer than its buffers": (lambda m: m["drafters"][0].update(max_draft=2**24), "draft"),
    "a draft of absurd length": (lambda m: m["drafters"][0].update(max_draft=10**15), "max_draft"),
    "a drafter with contexts in the wrong order": (lambda m: m["drafters"][0].update(min_context=9), "min_context"),
    "a drafter without a program": (lambda m: target(m)["programs"].pop("speculate.short"), "speculate.short"),
    "no decode program": (lambda m: target(m)["programs"].pop("decode"), "decode"),
    "no prefill program": (lambda m: target(m)["programs"].pop("prefill"), "prefill"),
    "an unknown symbol in a buffer": (lambda m: tensor(m, "token_ids").update(shape=["Q"]), "token_ids"),
    "a symbol that is no letter": (lambda m: tensor(m, "token_ids").update(shape=["NN"]), "buffers"),
    "a symbol without a size": (lambda m: symbols(m).pop("M"), "symbols"),
    "a symbol too many": (lambda m: symbols(m).update(Q=1), "symbols"),
    "a symbol of size 0": (lambda m: symbols(m).update(M=0), "symbols.target.M"),
    "a negative symbol": (lambda m: symbols(m).update(N=-5), "symbols.target.N"),
    "a view beyond the arena": (lambda m: symbols(m).update(T=2**23), "symbols.target.T"),
    "steps of absurd length": (lambda m: symbols(m).update(N=2**24), "symbols.target.N"),
    "trees of absurd size": (lambda m: symbols(m).update(N=2**24, M=2**23), "symbols.target.M"),
    "a buffer of terabytes": (
        lambda m: target(m)["buffers"].append({"name": "x", "dtype": "float64", "shape": [2**24, 2**24]}), "bytes",
    ),
    "a buffer of more bytes than 64 bits count": (
        lambda m: target(m)["buffers"].append({"name": "x", "dtype": "float64", "shape": [2**24] * 40}), "bytes",
    ),
    "a negative dimension": (lambda m: tensor(m, "kv").update(shape=[4, 1, 2, -384, 16]), "buffers"),
    "a dimension of 0": (lambda m: tensor(m, "kv").update(shape=[4, 1, 2, 0, 16]), "buffers"),
    "a buffer with another dtype": (lambda m: tensor(m, "positions").update(dtype="int32"), "positions"),
    "a buffer with an unknown dtype": (lambda m: tensor(m, "positions").update(dtype="object"), "dtype"),
    "a buffer that is too small": (lambda m: tensor(m, "kept_rows").update(shape=["M"]), "kept_rows"),
    "an arena of whole numbers": (lambda m: tensor(m, "kv").update(dtype="int64"), "k_cache.0"),
    "an arena of half precision": (lambda m: tensor(m, "kv").update(dtype="float16"), "k_cache.0"),
    "a missing buffer": (lambda m: rename_buffer(m, "logits", "target.other"), "logits"),
    "a buffer twice": (lambda m: target(m)["buffers"].append(tensor(m, "bim")), "twice"),
    "a view of an unknown buffer": (lambda m: target(m)["views"]["target.k_cache.0"].update(buffer="x"), "k_cache.0"),
    "a view beyond its buffer": (lambda m: target(m)["views"]["target.k_cache.0"].update(plane=4), "k_cache.0"),
    "a view before its buffer": (lambda m: target(m)["views"]["target.k_cache.0"].update(plane=-1), "plane"),
    "a view with a buffer's name": (
        lambda m: target(m)["views"].update({"target.bim": {"buffer": "target.kv", "plane": 0}}), "bim",
    ),
    "a missing view": (lambda m: target(m)["views"].pop("target.v_cache.1"), "v_cache.1"),
    "an unknown buffer in a stage": (lambda m: stage(m, "decode", MASK)["inputs"].update(bim="nowhere"), "nowhere"),
    "an unknown op": (lambda m: stage(m, "decode", MASK).update(run="os.system"), "os.system"),
    "an op that stands in graphs only": (lambda m: stage(m, "decode", MASK).update(run="BranchAttention"), "Branch"),
    "an unknown engine": (lambda m: stage(m, "decode", FORWARD).update(run="draft"), "draft"),
    "an unknown drafter": (lambda m: stage(m, "speculate.ngram", 0).update(run="oracle"), "oracle"),
    "an unknown kind of stage": (lambda m: stage(m, "decode", 0).update(kind="python"), "kind"),
    "an op without an input": (lambda m: stage(m, "decode", MASK)["inputs"].pop("bim"), "bim"),
    "an op with a tensor too many": (lambda m: stage(m, "decode", MASK)["inputs"].update(x="target.bim"), "x"),
    "an op on a buffer of another dtype": (
        lambda m: stage(m, "decode", SAMPLE)["inputs"].update(temperature="top_k"), "temperature",
    ),
    "an op on a buffer of another shape": (
        lambda m: stage(m, "decode", MASK)["inputs"].update(branch="target.logit_rows"), "BimMask",
    ),
    "an op with an unknown attribute": (lambda m: stage(m, "decode", SAMPLE).update(attributes={"x": 1}), "x"),
    "an attribute out of range": (
        lambda m: stage(m, "decode", SAMPLE).update(attributes={"purpose": 10**30}), "Sample",
    ),
    "an attribute that is a fraction": (
        lambda m: stage(m, "decode", SAMPLE).update(attributes={"purpose": 0.5}), "Sample",
    ),
    "an attribute with a tensor's name": (
        lambda m: stage(m, "decode", SAMPLE).update(attributes={"seed": 1}), "Sample",
    ),
    "a parameter bound twice": (
        lambda m: stage(m, "speculate.ngram", 4).update(outputs={"source": "target.kv"}), "source",
    ),
    "an engine without an input": (lambda m: stage(m, "decode", FORWARD)["inputs"].pop("token_ids"), "bind"),
    "an engine on a buffer of another shape": (
        lambda m: stage(m, "decode", FORWARD)["inputs"].update(token_ids="target.logit_rows"), "token_ids",
    ),
    "an engine on a buffer of another dtype": (
        lambda m: stage(m, "decode", FORWARD)["inputs"].update({"k_cache.0": "target.kv"}), "k_cache.0",
    ),
    "an alias broken in a stage": (
        lambda m: stage(m, "decode", FORWARD)["outputs"].update({"k_cache.0_out": "target.k_cache.1"}), "k_cache.0",
    ),
    "an alias of nothing": (lambda m: engine(m)["aliases"].update(logits="nothing"), "logits"),
    "an engine tensor the graph lacks": (
        lambda m: (engine(m)["inputs"].append({"name": "bim", "dtype": "int64", "shape": [1, 384]}),
                   [p["stages"][i]["inputs"].update(bim="target.bim")
                    for p in target(m)["programs"].values()
                    for i, s in enumerate(p["stages"]) if s["kind"] == "engine"]), "target.onnx",
    ),
    "an engine tensor with another symbol": (
        lambda m: next(t for t in engine(m)["inputs"] if t["name"] == "token_ids").update(shape=["M"]), "token_ids",
    ),
    "an engine input twice": (lambda m: engine(m)["inputs"].append(engine(m)["inputs"][0]), "same name"),
    "an engine of an unknown symbol": (
        lambda m: next(t for t in engine(m)["inputs"] if t["name"] == "token_ids").update(shape=["Q"]), "token_ids",
    ),
    "results nowhere": (lambda m: target(m)["programs"]["decode"]["results"].update(tokens="x"), "results"),
    "results that no stage writes": (
        lambda m: target(m)["programs"]["decode"]["results"].update(tokens="target.bim"), "results",
    ),
    "no results": (lambda m: target(m)["programs"]["decode"].update(results=None), "results"),
    "counts where nothing is counted": (
        lambda m: target(m)["programs"]["decode"]["results"].update(counts="target.accepted_count"), "counts",
    ),
    "no counts where trees are": (
        lambda m: target(m)["programs"]["speculate.ngram"]["results"].update(counts=None), "counts",
    ),
    "counts of another kind": (
        lambda m: target(m)["programs"]["speculate.ngram"]["results"].update(counts="target.kept_count"), "results",
    ),
    "two drafting stages": (
        lambda m: target(m)["programs"]["speculate.ngram"]["stages"].insert(1, stage(m, "speculate.ngram", 0)),
        "first stage",
    ),
    "a stage that writes what the host owns": (
        lambda m: stage(m, "speculate.ngram", 3)["outputs"].update(kept_count="target.past_length"), "past_length",
    ),
    "a program without an engine": (lambda m: target(m)["programs"]["prefill"].update(stages=[]), "prefill"),
    "a stage for an unknown model": (lambda m: stage(m, "decode", MASK).update(model="draft"), "draft"),
    "no target model": (lambda m: m["models"].clear(), "target"),
    "a model without buffers": (lambda m: m["models"].update(draft=model(m)), "models"),
    "more rows than one": (lambda m: symbols(m).update(R=2), "rows"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_manifest_that_is_wrong_is_refused_and_the_place_is_named(plan: Path, case: str) -> None:
    change, named = WRONG[case]
    edit(plan, change)
    sentence = refused(plan)
    assert named in sentence
    assert len(sentence) < 1500


def test_geometry_and_buffers_that_agree_with_each_other_must_agree_with_the_graph(plan: Path) -> None:
    """A consistent lie about the arena: nothing is allocated by its word."""

    def lie(m: dict[str, Any]) -> None:
        model(m)["capacity"] = 2**24
        tensor(m, "bim")["shape"][1] = tensor(m, "slot_positions")["shape"][1] = 2**24
        tensor(m, "kv")["shape"][3] = 2**24
        for t in (*engine(m)["inputs"], *engine(m)["outputs"]):
            if "cache" in t["name"]:
                t["shape"][2] = 2**24

    edit(plan, lie)
    assert "target.onnx" in refused(plan)


def test_a_session_that_memory_cannot_hold_is_a_sentence(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(np, "zeros", full)
    assert "capacity.context" in refused(plan)


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


@pytest.mark.parametrize("text", ["{% for m in messages %}", "{{", "{% endif %}"])
def test_a_chat_template_with_a_mistake_is_refused(plan: Path, text: str) -> None:
    (plan / TEMPLATE).write_text(text, encoding="utf-8")
    list_again(plan)
    assert TEMPLATE in refused(plan)


@pytest.mark.parametrize("text", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}"])
def test_a_chat_template_cannot_leave_its_sandbox(plan: Path, text: str) -> None:
    (plan / TEMPLATE).write_text(text, encoding="utf-8")
    list_again(plan)
    with pytest.raises(PlanError):
        Runtime.load(plan).tokenizer.apply_chat_template([{"role": "user", "content": "x"}])


# Anything at all.


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
    try:
        runtime = Runtime.load(plan)
        assert len(runtime.generate([5, 6], max_new_tokens=3, ignore_eos=True).token_ids) == 3
    except PlanError:
        pass  # any other exception fails
