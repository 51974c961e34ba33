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

from plans.errors import OutriderError, PlanError
from plans.plan import read_manifest
from runtime import Runtime
from tests.conftest import TOY_DRAFTERS
from tools.peers import __main__ as peers
from tools.peers import measure, process
from tools.peers.conversion import convert_for_genai
from tools.peers.engine import GENAI, OURS, TRANSFORMERS, Clock, Generated, Settings
from tools.peers.figures import Generation, Mode, report
from tools.peers.plan import build_plan, check_plan
from tools.peers.process import LostEngineError, WorkerError, rest

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def workplace(toy_recipe: Path, toy_plan: Path, tmp_path: Path) -> Path:
    return shutil.copytree(toy_recipe.parent, tmp_path / "work")


def arguments(workplace: Path, *more: str) -> list[str]:
    prompts = ("--prompts", str(workplace / "held_out.jsonl"), "--work", str(workplace / "build"))
    return [str(workplace / "target"), *prompts, "--new", "12", "--reps", "2", "--threads", "1", *more]


def set_end_token(checkpoint: Path, token: int) -> None:
    for name in ("config.json", "generation_config.json"):
        path = checkpoint / name
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [0, token]}))


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
    modes = {(row["engine"], row["mode"]): row for row in found["rows"]}
    expected = {(OURS, mode) for mode in ("none", "ngram", "model")}
    expected |= {(TRANSFORMERS, mode) for mode in ("plain", "prompt-lookup", "assisted")}
    if importlib.util.find_spec("onnxruntime_genai"):
        expected |= {(GENAI, mode) for mode in ("plain", "ngram", "ngram-adaptive", "ngram-16", "draft")}
        assert found["missing"] == []
    else:
        assert [(absent["engine"], absent["mode"]) for absent in found["missing"]] == [(GENAI, None)]
    assert set(modes) == expected
    for row in modes.values():
        assert (row["same_runs"], row["runs"], row["differences"]) == (4, 4, [])
        assert 0 < row["ttft_ms"] < row["e2e_ms"]
        assert row["tokens_per_second_p10"] <= row["tokens_per_second"] <= row["tokens_per_second_p90"]
    assert modes[OURS, "none"]["speedup"] == 1
    assert found["idle_share"] < 0.5
    assert {ratio["ours"] for ratio in found["ratios"]} == {"none", "ngram", "model"}
    assert found["best_ratio"] == min(best["best_ratio"] for best in found["best"])
    assert (found["threads"], found["dtype"], found["prompts"]) == (1, "float32", 2)
    assert (len(found["prompts_sha256"]), found["new_tokens"]) == (64, 12)
    assert datetime.fromisoformat(found["time"]).tzinfo is not None


def test_what_is_missing_is_listed_with_the_reason(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(measure, "check_plan", lambda plan, checkpoint: None)
    assert peers.main([*arguments(workplace, "--plan", str(workplace / "plan"), "--count", "1", "--json")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["mode"] for row in found["rows"]] == ["none", *TOY_DRAFTERS]
    assert (found["ratios"], found["best"], found["best_ratio"]) == ([], [], None)
    assert found["missing"] == [
        {"engine": TRANSFORMERS, "mode": None, "reason": "not installed; run `pip install transformers`"},
        {"engine": GENAI, "mode": None, "reason": "not installed; run `pip install onnxruntime-genai`"},
    ]
    assert peers.main(arguments(workplace, "--plan", str(workplace / "plan"), "--count", "1")) == 0
    text = capsys.readouterr().out
    assert "missing: transformers: not installed; run `pip install transformers`" in text
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
    ]:
        assert peers.main(arguments(workplace, *plan, *more)) == 2
        assert said in " ".join(capsys.readouterr().err.split())


def test_a_plan_must_be_of_the_checkpoint(workplace: Path) -> None:
    check_plan(workplace / "plan", workplace / "target")
    with pytest.raises(PlanError, match=r"whose files differ from those of .*drafter; pass that one"):
        check_plan(workplace / "plan", workplace / "drafter")
    (workplace / "model.yaml").unlink()
    with pytest.raises(PlanError, match="pass no --plan, and one is built from the checkpoint"):
        check_plan(workplace / "plan", workplace / "target")


def test_a_plan_that_is_built_is_kept_by_its_checkpoints(workplace: Path) -> None:
    plan = build_plan(workplace / "target", None, workplace / "build")
    assert [drafter.kind for drafter in read_manifest(plan).drafters] == ["ngram"]
    check_plan(plan, workplace / "target")
    written = (plan / "plan.json").stat().st_mtime_ns
    assert build_plan(workplace / "target", None, workplace / "build") == plan
    assert (plan / "plan.json").stat().st_mtime_ns == written
    both = build_plan(workplace / "target", workplace / "drafter", workplace / "build")
    assert both != plan
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
    assert [(b["ours"], b["engine"], b["mode"], b["best_ratio"]) for b in found["best"]] == [
        ("ngram", TRANSFORMERS, "assisted", 3),
        ("ngram", GENAI, "plain", 3),
    ]
    assert found["best"][1]["by_task"] == {"short": 1.5, "long": 4}
    assert (found["best"][1]["best_ratio_p10"], found["best"][1]["best_ratio_p90"]) == (1, 4)
    assert found["best_ratio"] == 3


def test_tokens_that_differ_are_told_by_prompt() -> None:
    plain, other = mode(OURS, "none", 1, 1), mode(GENAI, "plain", 1, 1)
    other.runs[1].generated.ids[5] = 99
    ours = SimpleNamespace(part=lambda ids, first, second: (5, 0.25))
    measure._compare([plain, other], ours, [[1], [2, 3]])  # type: ignore[arg-type]
    row = report([plain, other], [None, None])["rows"][1]
    assert row["differences"] == [{"prompt": 1, "prompt_tokens": 2, "index": 5, "margin": 0.25}]
    assert (row["same_runs"], row["runs"]) == (1, 2)


def test_repetitions_of_our_plain_decoding_are_compared_with_each_other() -> None:
    plain, other = mode(OURS, "none", 1, 1, 1, 1), mode(GENAI, "plain", 1, 1, 1, 1)
    plain.runs[3].generated.ids[5] = 99
    ours = SimpleNamespace(part=lambda ids, first, second: (5, 0.25))
    measure._compare([plain, other], ours, [[1], [2, 3]])  # type: ignore[arg-type]
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
    settings = Settings(str(workplace / "target"), str(workplace / "away"), None, 1)
    with pytest.raises(WorkerError, match=r"^.*away is not a plan"):
        process.Worker(OURS, settings)


def test_a_process_that_dies_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process.sys, "executable", shutil.which("false"))
    with pytest.raises(LostEngineError, match="the process of outrider ended: exit status 1"):
        process.Worker(OURS, Settings("", "", None, 1))


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
    first = convert_for_genai(workplace / "target", workplace)
    assert convert_for_genai(workplace / "target", workplace) == first
    assert len(asked) == 1
    path = workplace / "target" / "config.json"
    path.write_text(path.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    second = convert_for_genai(workplace / "target", workplace)
    assert second != first
    assert (second / "genai_config.json").is_file()


def test_a_builder_that_fails_is_a_sentence_and_leaves_nothing(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converter(monkeypatch, status=1)
    before = set(workplace.iterdir())
    with pytest.raises(OutriderError, match=r"cannot convert .*target \(ValueError: no such model\)"):
        convert_for_genai(workplace / "target", workplace)
    assert set(workplace.iterdir()) == before
