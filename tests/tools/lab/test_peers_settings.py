"""What each engine is started with: threads, and an end token that ends nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider import Runtime
from outrider.compiler import __main__ as compiler
from outrider.tools.lab import child
from outrider.tools.lab.peers import __main__ as peers
from outrider.tools.lab.peers import measure
from outrider.tools.lab.peers.engine import ENGINES, GENAI, OURS, TRANSFORMERS, Settings, choose_end_token
from outrider.tools.lab.peers.process import Worker, WorkerError
from tests.conftest import TOY_DRAFTERS

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def workplace(toy_recipe: Path, toy_plan: Path, tmp_path: Path) -> Path:
    return shutil.copytree(toy_recipe.parent, tmp_path / "work")


def test_the_end_token_is_the_last_one_that_was_not_generated() -> None:
    assert choose_end_token({1: 1, 8: 1, 9: 1}, 10) == 7
    assert choose_end_token({1: 1}, 10) == 9
    assert choose_end_token({0: 1, 1: 2, 2: 2}, 3) == 0  # all were: the rarest


def rename_token(checkpoint: Path, token: int, other: int) -> None:
    """Swap the embeddings of two tokens, so that the model chooses one wherever it chose the other."""
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    table = tensors["model.embed_tokens.weight"]
    table[[token, other]] = table[[other, token]]
    save_file(tensors, path, metadata={"format": "pt"})


def test_random_checkpoints_that_choose_the_last_id_of_the_vocabulary_run_to_the_end(
    workplace: Path, toy: Runtime, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """No id is safe for an engine that must have an end token: random models choose any."""
    genai = pytest.importorskip("onnxruntime_genai")
    monkeypatch.setattr(measure, "_PACKAGES", {GENAI: measure._PACKAGES[GENAI]})
    chosen = toy.generate("import os\nimport sys\n", drafter="none", max_new_tokens=12, ignore_eos=True).token_ids
    prompts = [line["prompt"] for line in map(json.loads, (workplace / "held_out.jsonl").read_text().splitlines())]
    prompted = {token for text in prompts for token in toy.tokenizer.encode(text)}
    often = next(token for token in chosen[1:] if token not in prompted)
    last = toy.manifest.target.vocab_size - 1
    assert last not in prompted
    for folder in ("target", "drafter"):
        rename_token(workplace / folder, often, last)
    given = ["--prompts", str(workplace / "held_out.jsonl"), "--work", str(workplace / "build"), "--threads", "1"]
    given += ["--draft", str(workplace / "drafter"), "--new", "12", "--reps", "1", "--json"]
    assert peers.main([str(workplace / "target"), *given]) == 0
    found = json.loads(capsys.readouterr().out)
    (section,) = found["precisions"]
    assert genai.__version__ in section["versions"][GENAI]
    assert section["missing"] == []
    assert {row["mode"] for row in section["rows"] if row["engine"] == GENAI} > {"plain", "ngram", "draft"}
    for row in section["rows"]:
        assert (row["same_runs"], row["runs"]) == (2, 2)
    (plan,) = (workplace / "build").glob("peers-*/plan")
    assert last in Runtime.load(plan, threads=1).generate(prompts[0], drafter="none", max_new_tokens=12).token_ids


def test_models_of_other_precisions_are_not_compared(workplace: Path, capsys: Captured) -> None:
    recipe = str(workplace / "model.yaml")
    sections = [{"name": "model", "kind": "model", "checkpoint": "drafter", "weights": {"type": "int8"}}]
    given = ["--set", "target.weights={type: int4}", "--set", f"drafters={sections}"]
    assert compiler.main(["build", recipe, "--out", str(workplace / "mixed"), *given]) == 0
    capsys.readouterr()
    given = ["--plan", str(workplace / "mixed"), "--prompts", str(workplace / "held_out.jsonl")]
    assert peers.main([str(workplace / "target"), *given]) == 2
    assert "a target in int4 and a draft model (model) in int8" in " ".join(capsys.readouterr().err.split())


def test_integers_are_not_compared(workplace: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "stores_integers", lambda folder: True)
    assert peers.main([str(workplace / "target")]) == 2
    assert "target stores weights as integers" in " ".join(capsys.readouterr().err.split())


class Recorder(Worker):
    """Starts nothing; fails with what it was to be started with."""

    def __init__(self, engine: str, settings: Settings) -> None:
        raise WorkerError(f"{engine} with {settings.threads} threads")


def test_threads_of_the_command_line_reach_every_worker(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    given = [str(workplace / "target"), "--plan", str(workplace / "plan"), "--work", str(workplace / "build")]
    given += ["--prompts", str(workplace / "held_out.jsonl"), "--new", "4", "--count", "1", "--reps", "1"]
    monkeypatch.setattr(measure, "Worker", Recorder)
    assert peers.main([*given, "--threads", "3"]) == 2
    assert "outrider with 3 threads" in capsys.readouterr().err
    monkeypatch.setattr(measure, "available_cores", lambda: 7)
    assert peers.main(given) == 2
    assert "outrider with 7 threads" in capsys.readouterr().err
    monkeypatch.setattr(measure, "convert", lambda engine, checkpoint, work, precision: checkpoint)
    monkeypatch.setattr(measure.importlib.util, "find_spec", lambda name: object())  # type: ignore[attr-defined]
    monkeypatch.setattr(measure, "Worker", lambda e, s: Worker(e, s) if e == OURS else Recorder(e, s))
    assert peers.main([*given, "--threads", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (section,) = found["precisions"]
    assert [absent["reason"] for absent in section["missing"]] == [f"{engine} with 2 threads" for engine in ENGINES[1:]]
    assert found["threads"] == 2
    assert [row["mode"] for row in section["rows"]] == ["none", *TOY_DRAFTERS]


def test_a_worker_is_started_with_its_threads_for_every_library(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    popen = child.subprocess.Popen

    def start(command: list[str], **options: Any) -> Any:
        asked.update(options["env"])
        return popen(["cat"], **options)  # says the settings again, which are no answer

    monkeypatch.setattr(child.subprocess, "Popen", start)
    with pytest.raises(KeyError):
        Worker(TRANSFORMERS, Settings("", "", None, 3, 8))
    assert (asked["OMP_NUM_THREADS"], asked["MKL_NUM_THREADS"]) == ("3", "3")


class Loaded(Exception):  # noqa: N818
    """What a library was told, raised in place of loading."""


def tell(*arguments: Any, **options: Any) -> None:
    raise Loaded(arguments, options)


def test_every_engine_hands_its_threads_to_its_library(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.tools.lab.peers import with_outrider, with_transformers

    settings = Settings(str(workplace / "target"), "plan", None, 3, 8, converted="away")
    monkeypatch.setattr(with_outrider.Runtime, "load", tell)
    with pytest.raises(Loaded) as told:
        with_outrider.Outrider(settings)
    assert told.value.args[1]["threads"] == 3
    monkeypatch.setattr(torch, "set_num_threads", tell)
    with pytest.raises(Loaded) as told:
        with_transformers.Transformers(settings)
    assert told.value.args[0] == (3,)


def test_onnxruntime_genai_is_given_threads_and_the_end_token(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime_genai")
    from outrider.tools.lab.peers import with_genai

    overlays: list[dict[str, Any]] = []

    class Config:
        def __init__(self, folder: str) -> None:
            pass

        def overlay(self, text: str) -> None:
            overlays.append(json.loads(text)["model"])

    monkeypatch.setattr(with_genai.genai, "Config", Config)
    monkeypatch.setattr(with_genai.genai, "Model", lambda config: config)
    own = {"model": {"vocab_size": 300, "decoder": {"session_options": {"log_id": "x"}, "filename": "model.onnx"}}}
    for name in ("a", "b"):
        (workplace / name).mkdir()
        (workplace / name / "genai_config.json").write_text(json.dumps(own), encoding="utf-8")
    folders = {"converted": str(workplace / "a"), "converted_draft": str(workplace / "b")}
    with_genai.Genai(Settings("", "", "", 3, 8, **folders))
    threads = [found["decoder"]["session_options"]["intra_op_num_threads"] for found in overlays]
    assert threads == [3, 3]
    assert [found["eos_token_id"] for found in overlays] == [299, 299]
    assert overlays[1]["draft"]["session_options"] == {"log_id": "x", "intra_op_num_threads": 3}
