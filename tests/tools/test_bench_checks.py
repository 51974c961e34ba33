"""What can be refused is refused before anything is built or measured, and progress messages are true."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import onnx
import pytest

from outrider.plans.errors import RequestError
from outrider.plans.plan import read_manifest
from outrider.plans.tokenizer import Tokenizer
from outrider.tools import identity
from outrider.tools.bench import __main__ as bench
from outrider.tools.bench import latency, variants
from outrider.tools.bench.prompts import Prompts, choose_prompts, encode_prompts
from outrider.tools.bench.runs import cost_of
from outrider.tools.identity import threads_used
from tests.cpu_session import cpu_session

Captured = pytest.CaptureFixture[str]
CONTEXT = 160  # the toy's


@pytest.fixture
def workplace(toy_recipe: Path, toy_plan: Path, tmp_path: Path) -> Path:
    """The toy, with prompts of two tasks: the second of the task `long` has more tokens than the others."""
    folder = shutil.copytree(toy_recipe.parent, tmp_path / "work")
    texts = [("short", "import os\n"), ("short", "import sys\n"), ("long", "x = 1\n"), ("long", "y = 22\n" * 15)]
    lines = [json.dumps({"task": task, "prompt": text}) + "\n" for task, text in texts]
    (folder / "tasks.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise AssertionError("that came too early")

    monkeypatch.setattr(variants, "_run", fail)  # the compiler
    monkeypatch.setattr(latency, "run_in_turn", fail)


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl cannot be read as UTF-8 text"),
        (["--task", "chat"], "--task is 'chat', but"),
        (["--backend", "tensorrt"], "tensorrt"),
        (["--threads", "-3"], "--threads is '-3'; pass a whole number of at least 0"),
        (["--new", "160"], "--new is 160, but the plan's context is 160; pass at most 159."),
        (["--new", "100"], "Prompt 3 (task long), counted from 0, has "),
        (["--new", "100"], "tokens, but 1 to 60 fit into the plan's context of 160 beside --new 100"),
        (["--new", "100"], "lower --new, choose other prompts with --task, --count or --prompts, or build the plan"),
        (["--new", "100", "--prompt-len", "61"], "--prompt-len is 61; pass 1 to 60"),
    ],
)
def test_what_cannot_be_measured_is_said_before_a_plan_is_built(
    workplace: Path, arguments: list[str], said: str, capsys: Captured
) -> None:
    given = ["--prompts", str(workplace / "tasks.jsonl"), "--tree", "2/1/4", "--drafters", "head", *arguments]
    assert bench.main(["latency", str(workplace / "plan"), *given]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.usefixtures("nothing_runs")
def test_synthetic_acceptance_is_refused_before_a_plan_is_built(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(latency, "choose_backend", lambda *_: argparse.Namespace(backend="tensorrt"))
    arguments = ["--prompts", str(workplace / "tasks.jsonl"), "--tree", "2/1/4", "--synthetic-accept", "1"]
    assert bench.main(["latency", str(workplace / "plan"), *arguments]) == 2
    assert "--synthetic-accept changes logits on the host" in capsys.readouterr().err


@pytest.mark.usefixtures("nothing_runs")
def test_a_broken_record_of_the_build_is_said_before_anything_is_measured(workplace: Path, capsys: Captured) -> None:
    (workplace / "plan" / "build.json").write_text("{", encoding="utf-8")
    arguments = ["--prompts", str(workplace / "tasks.jsonl"), "--new", "8"]
    assert bench.main(["latency", str(workplace / "plan"), *arguments]) == 2
    assert "build.json is no record of a build; remove it" in " ".join(capsys.readouterr().err.split())


def test_prompts_must_leave_room_and_all_are_looked_at(workplace: Path) -> None:
    chosen = choose_prompts(workplace / "plan", workplace / "tasks.jsonl")
    tokenizer = Tokenizer.load(workplace / "plan" / "tokenizer")
    lengths = [len(tokenizer.encode(prompt.text)) for prompt in chosen]
    longest = max(lengths)
    found = encode_prompts(chosen, tokenizer, CONTEXT, CONTEXT - longest)
    assert [len(ids) for ids in found.ids] == lengths
    assert found.tasks == ["short", "long", "short", "long"]
    with pytest.raises(RequestError, match=rf"Prompt 3 \(task long\), counted from 0, has {longest} tokens, but 1 to"):
        encode_prompts(chosen, tokenizer, CONTEXT, CONTEXT - longest + 1)
    with pytest.raises(RequestError, match=r"has 10 tokens, but 1 to 2 fit .*, and 3 more do not fit; lower"):
        encode_prompts([replace(chosen[3], text="q" * 10)] * 4, tokenizer, CONTEXT, CONTEXT - 2)
    encoded = Mock(wraps=tokenizer, encode=Mock(side_effect=AssertionError))
    with pytest.raises(RequestError, match=r"Prompt 1, counted from 0, has at least \d+ tokens, but 1 to 2 fit into"):
        encode_prompts([chosen[0], replace(chosen[3], text="q" * 10**6)], encoded, CONTEXT, CONTEXT - 2)


def test_tokens_to_the_last_one_of_the_context_are_generated(workplace: Path, capsys: Captured) -> None:
    """Where a prompt just fits, rows say how many tokens came."""
    new = CONTEXT - 60
    arguments = ["--prompts", str(workplace / "tasks.jsonl"), "--prompt-len", "60", "--new", str(new), "--json"]
    sizes = ["--count", "1", "--reps", "1", "--drafters", "chain"]
    assert bench.main(["latency", str(workplace / "plan"), *arguments, *sizes]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["prompt_tokens"], row["new_tokens"]) for row in rows] == [(60, new)] * 2
    assert all(row["same_tokens"] for row in rows)


def test_a_digest_tells_prompts_apart() -> None:
    digests = [Prompts(ids, [None] * len(ids)).sha256 for ids in ([[1, 2], [3]], [[1], [2, 3]], [[3], [1, 2]])]
    assert len(set(digests)) == 3
    assert digests[0] == Prompts([[1, 2], [3]], ["a", "b"]).sha256


@pytest.mark.long
def test_progress_of_a_build_is_passed_on(workplace: Path, capsys: Captured) -> None:
    """Where standard error is no terminal, as here, by lines."""
    arguments = ["--prompts", str(workplace / "tasks.jsonl"), "--new", "8", "--count", "1", "--reps", "1", "--csv"]
    shapes = ["--tree", "2/1/4", "--drafters", "head"]
    assert bench.main(["latency", str(workplace / "plan"), *arguments, *shapes]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("building a plan of 1 drafts, ")]
    assert len(lines) > 1
    assert lines[0].startswith("building a plan of 1 drafts, 0 of ")


def test_threads_that_the_backend_chose_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert threads_used("onnxruntime-cpu", 3) == 3
    assert threads_used("tensorrt", 3) is None
    counts = iter([10, 17])
    monkeypatch.setattr(identity, "_running", lambda: next(counts))
    assert threads_used("onnxruntime-cpu", 0) == 8
    monkeypatch.setattr(identity, "_running", lambda: None)
    assert threads_used("onnxruntime-cpu", 0) == identity.available_cores()
    onnx.checker.check_model(onnx.load_model_from_string(identity._IDENTITY))


@pytest.mark.skipif(not identity._TASKS.is_dir(), reason="the system lists no threads")
def test_a_session_has_as_many_threads_as_are_counted(toy_plan: Path) -> None:
    before = len(os.listdir(identity._TASKS))
    engine = read_manifest(toy_plan).backends["onnxruntime-cpu"].engines["target"]
    session = cpu_session(toy_plan / engine.file, threads=0)
    assert session.get_inputs()
    assert threads_used("onnxruntime-cpu", 0) == 1 + len(os.listdir(identity._TASKS)) - before


def test_long_prompts_are_more_work() -> None:
    assert cost_of(1500, 128) > 1.5 * cost_of(30, 128)


def test_every_run_is_in_the_plan_of_the_time_left(workplace: Path, capsys: Captured) -> None:
    arguments = ["--prompts", str(workplace / "tasks.jsonl"), "--prompt-len", "20,30", "--new", "8", "--csv"]
    sizes = ["--count", "2", "--reps", "2", "--drafters", "ngram", "--depth", "own"]
    assert bench.main(["sweep", str(workplace / "plan"), *arguments, *sizes]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("measuring: ")]
    assert all(" of 20, " in line for line in lines)  # 2 lengths, 2 modes: one run to warm up, 2 of each of 2 prompts
    assert "prompt 1, ngram" in lines[-1] or "prompt 1, none" in lines[-1]
