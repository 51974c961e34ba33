"""Other engines run in processes of their own: what is compared is alike, what is missing is said, none disturbs."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from outrider import Runtime
from outrider.compiler.recipe import source_recipe
from outrider.plans.errors import OutriderError, PlanError
from outrider.plans.plan import read_manifest
from outrider.tools.lab.peers import __main__ as peers
from outrider.tools.lab.peers import measure, process
from outrider.tools.lab.peers.conversion import convert
from outrider.tools.lab.peers.engine import GENAI, LLAMA_CPP, OPENVINO, OURS, TRANSFORMERS, Clock, Generated, Settings
from outrider.tools.lab.peers.figures import Generation, Mode, report
from outrider.tools.lab.peers.plan import build_plan, check_plan
from outrider.tools.lab.peers.process import LostEngineError, WorkerError, rest
from outrider.tools.parting import Parting
from tests.conftest import TOY_DRAFTERS

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def workplace(toy_recipe: Path, toy_plan: Path, tmp_path: Path) -> Path:
    return shutil.copytree(toy_recipe.parent, tmp_path / "work")


PEERS = {
    TRANSFORMERS: ("plain", "prompt-lookup", "assisted"),
    GENAI: ("plain", "ngram", "ngram-adaptive", "ngram-16", "draft"),
    OPENVINO: ("plain", "prompt-lookup", "draft"),
    LLAMA_CPP: ("plain", "prompt-lookup", "draft"),
}


def installed() -> list[str]:
    """Peers whose packages are here."""
    packages = measure._PACKAGES
    return [engine for engine in PEERS if all(importlib.util.find_spec(package) for package in packages[engine])]


def arguments(workplace: Path, *more: str) -> list[str]:
    prompts = ("--prompts", str(workplace / "held_out.jsonl"), "--work", str(workplace / "build"))
    return [str(workplace / "target"), *prompts, "--new", "12", "--reps", "2", "--threads", "1", *more]


def set_end_token(checkpoint: Path, token: int) -> None:
    for name in ("config.json", "generation_config.json"):
        path = checkpoint / name
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [0, token]}))


@pytest.mark.long
def test_every_engine_gives_the_same_tokens_and_ignores_end_tokens(
    workplace: Path, toy: Runtime, capsys: Captured
) -> None:
    """Of a checkpoint that chooses an end token early; the plan is built on the way."""
    early = toy.generate("import os\nimport sys\n", drafter="none", max_new_tokens=3, ignore_eos=True).token_ids[-1]
    for folder in ("target", "drafter"):
        set_end_token(workplace / folder, early)
    draft = ("--draft", str(workplace / "drafter"))
    assert peers.main([*arguments(workplace, *draft), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (section,) = found["precisions"]
    modes = {(row["engine"], row["mode"]): row for row in section["rows"]}
    assert set(modes) == {(OURS, mode) for mode in ("none", "ngram", "model")} | {
        (engine, mode) for engine in installed() for mode in PEERS[engine]
    }
    assert {absent["engine"] for absent in section["missing"]} == set(PEERS) - set(installed())
    for row in modes.values():
        assert (row["same_runs"], row["runs"], row["differences"], row["agreement"]) == (4, 4, [], 1)
        assert 0 < row["ttft_ms"] < row["e2e_ms"]
        assert row["tokens_per_second_p10"] <= row["tokens_per_second"] <= row["tokens_per_second_p90"]
    assert modes[OURS, "none"]["speedup"] == 1
    assert section["idle_share"] < 0.5
    assert {ratio["ours"] for ratio in section["ratios"]} == {"none", "ngram", "model"}
    assert section["best_ratio"] == min(best["ratio"] for best in section["best"])
    assert [plain["engine"] for plain in section["plain"]] == installed()
    assert (found["threads"], section["precision"], section["prompts"]) == (1, "fp32", 2)
    assert (len(section["prompts_sha256"]), found["new_tokens"]) == (64, 12)
    assert datetime.fromisoformat(found["time"]).tzinfo is not None


@pytest.mark.long
def test_every_engine_runs_quantised_weights(workplace: Path, capsys: Captured) -> None:
    draft = ("--draft", str(workplace / "drafter"), "--precision", "int4,int8")
    assert peers.main([*arguments(workplace, *draft), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    quantising = [engine for engine in installed() if engine != TRANSFORMERS]
    assert [section["precision"] for section in found["precisions"]] == ["int8", "int4"]
    for section in found["precisions"]:
        missing = [(absent["engine"], absent["mode"]) for absent in section["missing"]]
        assert missing == [(engine, None) for engine in PEERS if engine not in quantising]
        modes = {(row["engine"], row["mode"]): row for row in section["rows"]}
        assert set(modes) == {(OURS, mode) for mode in ("none", "ngram", "model")} | {
            (engine, mode) for engine in quantising for mode in PEERS[engine]
        }
        for (engine, _), row in modes.items():
            assert row["runs"] == 4
            assert (row["same_runs"], row["agreement"]) == (4, 1) or engine != OURS
    assert peers.main(arguments(workplace, *draft, "--count", "1")) == 0
    printed = capsys.readouterr().out
    assert printed.index(", int8, greedy") < printed.index(", int4, greedy")
    assert printed.count("plain against plain: none is") == 2 * len(quantising)
    assert printed.count("missing: transformers: has no weights in int") == 2


def test_what_is_missing_is_listed_with_the_reason(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(measure, "check_plan", lambda plan, checkpoint: "fp32")
    assert peers.main([*arguments(workplace, "--plan", str(workplace / "plan"), "--count", "1", "--json")]) == 0
    (found,) = json.loads(capsys.readouterr().out)["precisions"]
    assert [row["mode"] for row in found["rows"]] == ["none", *TOY_DRAFTERS]
    assert (found["ratios"], found["plain"], found["best"], found["best_ratio"]) == ([], [], [], None)
    assert [absent["engine"] for absent in found["missing"]] == list(PEERS)
    for absent, packages in zip(found["missing"], measure._PACKAGES.values(), strict=True):
        assert absent["reason"].startswith(f"{packages[0]} is not installed; run `pip install '.[lab]'`")
    assert peers.main(arguments(workplace, "--plan", str(workplace / "plan"), "--count", "1")) == 0
    text = capsys.readouterr().out
    assert "missing: transformers: transformers is not installed; run" in text
    assert re.search(r"1 prompts \(\d+ tokens\) x 2 runs, 12 new tokens", text)


def test_mistakes_are_sentences(workplace: Path, capsys: Captured) -> None:
    plan = ("--plan", str(workplace / "plan"))
    for more, said in [
        (("--new", "200"), "--new is 200, but the plan's context is 160; pass at most 159."),
        (("--new", "155"), "Prompt 0, counted from 0, has "),
        (("--new", "155"), "tokens, but 1 to 5 fit into the plan's context of 160 beside --new 155"),
        (("--threads", "-1"), "--threads is '-1'; pass a whole number of at least 0"),
        (("--draft", str(workplace / "away")), "away is not a folder; give the folder that holds config.json"),
        (("--task", "chat"), "--task is 'chat', but"),
        (("--precision", "int4"), "is in fp32, which --precision leaves out; leave out that plan as well"),
        (("--precision", "fp32,fp8"), "--precision is 'fp8'; choose from fp32, int8, int4"),
        (plan, "--plan names two plans in fp32"),
    ]:
        assert peers.main(arguments(workplace, *plan, *more)) == 2
        assert said in " ".join(capsys.readouterr().err.split())


def test_a_plan_must_be_of_the_checkpoint(workplace: Path) -> None:
    assert check_plan(workplace / "plan", workplace / "target") == "fp32"
    with pytest.raises(PlanError, match=r"whose files differ from those of .*drafter; pass that one"):
        check_plan(workplace / "plan", workplace / "drafter")
    (workplace / "model.yaml").unlink()
    with pytest.raises(PlanError, match="pass no --plan, and one is built from the checkpoint"):
        check_plan(workplace / "plan", workplace / "target")


def test_a_plan_that_is_built_is_kept_by_its_checkpoints_and_precision(workplace: Path) -> None:
    plan = build_plan(workplace / "target", None, workplace / "build", "fp32")
    assert [drafter.kind for drafter in read_manifest(plan).drafters] == ["ngram"]
    check_plan(plan, workplace / "target")
    written = (plan / "plan.json").stat().st_mtime_ns
    assert build_plan(workplace / "target", None, workplace / "build", "fp32") == plan
    assert (plan / "plan.json").stat().st_mtime_ns == written
    both = build_plan(workplace / "target", workplace / "drafter", workplace / "build", "int8")
    assert both != plan
    assert check_plan(both, workplace / "target") == "int8"
    recipe = source_recipe(both, option="")
    assert [drafter.weights is not None for drafter in recipe.drafters if drafter.kind == "model"] == [True]
    assert [drafter.kind for drafter in read_manifest(both).drafters] == ["ngram", "model"]


def mode(engine: str, name: str, *total_ms: float, first: int = 1) -> Mode:
    """Runs of 11 tokens, of which the first came after half of the time."""
    runs = [Generated(list(range(11)), first, ms / 2, ms) for ms in total_ms]
    return Mode(engine, name, [Generation(index % 2, generated) for index, generated in enumerate(runs)])


def test_ratios_are_of_pairs_and_best_meets_best() -> None:
    modes = [
        mode(OURS, "none", 100, 200, 100, 200),
        mode(OURS, "ngram", 50, 100, 50, 100),
        mode(TRANSFORMERS, "plain", 200, 400, 200, 400),
        mode(TRANSFORMERS, "assisted", 150, 500, 150, 250),
        mode(GENAI, "plain", 100, 400, 50, 400),
    ]
    found = report(modes, ["short", "long"])
    assert [row["speedup"] for row in found["rows"]] == [1, 2, 0.5, pytest.approx(2 / 3), 0.75]
    assert found["rows"][1]["tokens_per_second"] == pytest.approx((10 / 0.025 + 10 / 0.050) / 2)
    ratios = {(r["ours"], r["engine"], r["mode"]): r for r in found["ratios"]}
    assert len(ratios) == 6
    assert ratios["none", TRANSFORMERS, "plain"]["ratio"] == 2
    assert ratios["none", TRANSFORMERS, "plain"]["decode_ratio"] == 2
    assert ratios["none", TRANSFORMERS, "plain"]["ttft_ratio"] == 2
    assert [(b["ours"], b["engine"], b["mode"], b["ratio"]) for b in found["best"]] == [
        ("ngram", TRANSFORMERS, "assisted", 3),
        ("ngram", GENAI, "plain", 3),
    ]
    assert found["best"][1]["by_task"] == {"short": 1.5, "long": 4}
    assert (found["best"][1]["ratio_p10"], found["best"][1]["ratio_p90"]) == (1, 4)
    assert found["best_ratio"] == 3
    assert [(p["ours"], p["engine"], p["mode"], p["ratio"]) for p in found["plain"]] == [
        ("none", TRANSFORMERS, "plain", 2),
        ("none", GENAI, "plain", 1.5),
    ]
    assert found["plain_ratio"] == 1.5


def test_tokens_that_differ_are_told_by_prompt() -> None:
    plain, other = mode(OURS, "none", 1, 1), mode(GENAI, "plain", 1, 1)
    other.runs[1].generated.ids[5] = 99
    ours = SimpleNamespace(part=lambda number, ids, *_: Parting(number, len(ids), 5, 5, 99, 0.25))
    measure._compare([plain, other], ours, [[1], [2, 3]], "fp32")  # type: ignore[arg-type]
    row = report([plain, other], [None, None])["rows"][1]
    (found,) = row["differences"]
    assert [found[key] for key in ("prompt", "prompt_tokens", "index", "margin")] == [1, 2, 5, 0.25]
    assert (row["same_runs"], row["runs"], row["agreement"]) == (1, 2, (1 + 5 / 11) / 2)


def test_tokens_of_others_quantised_weights_are_counted_and_not_examined() -> None:
    modes = [mode(OURS, "none", 1, 1), mode(OURS, "ngram", 1, 1), mode(GENAI, "plain", 1, 1)]
    for other in modes[1:]:
        other.runs[1].generated.ids[5] = 99
    ours = SimpleNamespace(part=lambda number, ids, *_: Parting(number, len(ids), 5, 5, 99, 0.25))
    measure._compare(modes, ours, [[1], [2, 3]], "int4")  # type: ignore[arg-type]
    rows = report(modes, [None, None])["rows"]
    assert [len(row["differences"]) for row in rows] == [0, 1, 0]
    assert rows[2]["same_runs"] == 1


def test_repetitions_of_our_plain_decoding_are_compared_with_each_other() -> None:
    plain, other = mode(OURS, "none", 1, 1, 1, 1), mode(GENAI, "plain", 1, 1, 1, 1)
    plain.runs[3].generated.ids[5] = 99
    ours = SimpleNamespace(part=lambda number, ids, *_: Parting(number, len(ids), 5, 5, 99, 0.25))
    measure._compare([plain, other], ours, [[1], [2, 3]], "fp32")  # type: ignore[arg-type]
    rows = report([plain, other], [None, None])["rows"]
    assert [row["same_runs"] for row in rows] == [3, 4]
    assert [len(row["differences"]) for row in rows] == [1, 0]


def test_a_generation_whose_tokens_came_at_once_has_no_rate() -> None:
    assert mode(OURS, "none", 10, first=11).runs[0].tokens_per_second is None
    clock = Clock()
    clock.count(3)
    clock.count(1)
    found = clock.generated([1, 2, 3, 4], clock.done())
    assert found.first == 3
    assert 0 < found.ttft_ms <= found.total_ms


def test_nothing_is_measured_while_an_idle_process_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    used = iter([0.0, 1000.0, 2000.0, *[2000.0] * 9])  # spins for two glances
    slept = []
    monkeypatch.setattr(process, "sleep", slept.append)
    rest([SimpleNamespace(engine=GENAI, cpu_ms=lambda: next(used))])  # type: ignore[list-item]
    assert len(slept) == 3
    monkeypatch.setattr(process, "_PATIENCE_SECONDS", 0.0)
    spinning = iter(range(0, 10**9, 1000))
    with pytest.raises(LostEngineError, match="the idle process of onnxruntime-genai keeps computing"):
        rest([SimpleNamespace(engine=GENAI, cpu_ms=lambda: float(next(spinning)))])  # type: ignore[list-item]


def test_an_engine_that_cannot_load_is_told_in_its_words(workplace: Path) -> None:
    settings = Settings(str(workplace / "target"), str(workplace / "away"), None, 1, 8)
    with pytest.raises(WorkerError, match=r"^.*away is not a plan"):
        process.Worker(OURS, settings)


def test_a_process_that_dies_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process.sys, "executable", shutil.which("false"))
    with pytest.raises(LostEngineError, match="the process of outrider ended: exit status 1"):
        process.Worker(OURS, Settings("", "", None, 1, 8))


def converter(monkeypatch: pytest.MonkeyPatch, status: int = 0) -> list[Path]:
    """onnxruntime-genai's builder, which writes a file and talks, replaced; gives the folders it was asked for."""
    asked: list[Path] = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        assert options["capture_output"]  # nothing for the terminal
        folder = Path(command[command.index("-o") + 1])
        folder.mkdir()
        (folder / "genai_config.json").write_text("{}")
        asked.append(folder)
        return subprocess.CompletedProcess(command, status, "Reading\n", "Traceback\nValueError: no such model\n")

    monkeypatch.setattr(subprocess, "run", run)
    return asked


def test_a_conversion_is_kept_for_its_checkpoint_alone(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = converter(monkeypatch)
    first = convert(GENAI, workplace / "target", workplace, "int4")
    assert convert(GENAI, workplace / "target", workplace, "int4") == first
    assert len(asked) == 1
    path = workplace / "target" / "config.json"
    path.write_text(path.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    second = convert(GENAI, workplace / "target", workplace, "int4")
    assert second != first
    assert (second / "genai_config.json").is_file()
    assert convert(GENAI, workplace / "target", workplace, "int8") not in (first, second)


def test_a_draft_model_without_a_tokenizer_is_converted_with_the_target_s(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[set[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        seen.append({file.name for file in Path(command[command.index("-i") + 1]).iterdir()})
        Path(command[command.index("-o") + 1]).mkdir()
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    draft = workplace / "draft"
    draft.mkdir()
    (draft / "config.json").write_text("{}", encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (workplace / "target" / name).touch()
    convert(GENAI, draft, workplace, "int4", workplace / "target")
    assert seen == [{"config.json", "tokenizer.json", "tokenizer_config.json"}]
    assert {file.name for file in draft.iterdir()} == {"config.json"}


def test_a_builder_that_fails_is_a_sentence_and_leaves_nothing(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converter(monkeypatch, status=1)
    before = set(workplace.iterdir())
    with pytest.raises(OutriderError, match=r"cannot convert .*target \(ValueError: no such model\)"):
        convert(GENAI, workplace / "target", workplace, "fp32")
    assert set(workplace.iterdir()) == before
