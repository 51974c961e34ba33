"""The benchmark finds its prompts as `verify` does, keeps conversions apart, and refuses in sentences."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from plans.errors import OutriderError, RequestError
from tools.bench import __main__ as bench
from tools.bench import against
from tools.bench.latency import choose_prompts

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def workplace(toy_recipe: Path, toy_plan: Path, tmp_path: Path) -> Path:
    return shutil.copytree(toy_recipe.parent, tmp_path / "work")


def test_prompts_are_those_of_the_recipe_wherever_they_lie(workplace: Path, tmp_path: Path) -> None:
    recipe = workplace / "model.yaml"
    text = recipe.read_text(encoding="utf-8")
    with pytest.raises(RequestError, match="names no held_out prompts; pass --prompts FILE"):
        choose_prompts(workplace / "plan", None)
    (tmp_path / "far").mkdir()
    (workplace / "held_out.jsonl").rename(tmp_path / "far" / "away.jsonl")
    recipe.write_text(f"held_out: {tmp_path / 'far' / 'away.jsonl'}\n{text}", encoding="utf-8")
    assert choose_prompts(workplace / "plan", None)[0] == "import os\nimport sys\n"
    recipe.unlink()
    with pytest.raises(OutriderError, match="not there any more; pass --prompts FILE"):
        choose_prompts(workplace / "plan", None)
    assert len(choose_prompts(workplace / "plan", tmp_path / "far" / "away.jsonl")) == 2


def test_latency_prints_stable_keys(workplace: Path, capsys: Captured) -> None:
    arguments = ["latency", str(workplace / "plan"), "--prompts", str(workplace / "held_out.jsonl")]
    assert bench.main([*arguments, "--count", "1", "--new", "8", "--reps", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["modes"]) == {"none", "ngram", "short", "chain", "bushy", "head"}
    assert all(mode["same_tokens"] for mode in found["modes"].values())
    assert found["load_ms"] > 0


def test_startup_measures_fresh_processes(toy_plan: Path, capsys: Captured) -> None:
    assert bench.main(["startup", str(toy_plan), "--reps", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"machine", "plan", "identity", "reps", "figures"}
    assert set(found["figures"]) == {"import_ms", "load_ms", "first_token_ms", "process_ms"}
    for figure in found["figures"].values():
        assert 0 < figure["lowest"] <= figure["median"] <= figure["highest"]
    parts = sum(found["figures"][name]["lowest"] for name in ("import_ms", "load_ms", "first_token_ms"))
    assert parts < found["figures"]["process_ms"]["highest"]


def test_startup_refuses_what_the_runtime_refuses(toy_plan: Path, tmp_path: Path, capsys: Captured) -> None:
    assert bench.main(["startup", str(tmp_path)]) == 2
    assert "is not a plan" in capsys.readouterr().err
    assert bench.main(["startup", str(toy_plan), "--threads", "-1"]) == 2
    assert "threads is -1" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        bench.main(["startup", str(toy_plan), "--reps", "0"])


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
    first = against.convert_for_genai(workplace / "target", workplace)
    assert against.convert_for_genai(workplace / "target", workplace) == first
    assert len(asked) == 1
    path = workplace / "target" / "config.json"
    path.write_text(path.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    second = against.convert_for_genai(workplace / "target", workplace)
    assert second != first
    assert (second / "genai_config.json").is_file()


def test_a_builder_that_fails_is_a_sentence_and_leaves_nothing(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converter(monkeypatch, status=1)
    before = set(workplace.iterdir())
    with pytest.raises(OutriderError, match=r"cannot convert .*target \(ValueError: no such model\)"):
        against.convert_for_genai(workplace / "target", workplace)
    assert set(workplace.iterdir()) == before
