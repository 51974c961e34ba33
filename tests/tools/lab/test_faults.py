"""Faults under load, in short forms: nothing is lost, nothing differs, nothing leaks; and failures are told."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from outrider.tools.lab.faults import __main__ as faults
from outrider.tools.lab.faults.client import Answer
from outrider.tools.lab.faults.crowd import Ways, judge
from outrider.tools.lab.faults.figures import Figures
from outrider.tools.lab.faults.questions import Oracle, Question, make_questions
from outrider.tools.lab.faults.scenarios import SCENARIOS
from tests.conftest import HELD_OUT
from tests.integration.test_tools import HERMES
from tests.plans.damage import TEMPLATE, list_again

MINUTES = {
    "disconnects": 0.05,
    "malformed": 0.25,
    "slow-clients": 0.1,
    "clock": 0.1,
    "full-disk": 0.05,
    "replaced-plan": 0.1,
    "out-of-memory": 0.1,
    "killed": 0.4,
    "starved-replica": 0.2,
}


@pytest.fixture(scope="module")
def plan(branch_plan: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy's plan, with a chat template that knows tools."""
    plan = shutil.copytree(branch_plan, branch_plan.with_name(f"{branch_plan.name}-of-faults"), dirs_exist_ok=True)
    (plan / TEMPLATE).write_text(HERMES, encoding="utf-8")
    list_again(plan)
    return plan


def run(plan: Path, name: str, minutes: float, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    own = ["--prompts", str(HELD_OUT), "--questions", "26", "--new", "24", "--clients", "12"]
    status = faults.main([str(plan), "--only", name, "--minutes", str(minutes), *own, "--json"])
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["wrong"] == []
    assert status == 0
    return dict(row)


@pytest.mark.long
@pytest.mark.parametrize("name", SCENARIOS)
def test_nothing_is_lost_or_different_or_leaks(plan: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    row = run(plan, name, MINUTES[name], capsys)
    assert row["faults"] > 0
    assert row["answered"] > 20
    assert row["lost"] == row["different"] == 0


def test_questions_are_of_every_kind_and_answers_what_the_runtime_generates(plan: Path) -> None:
    questions = make_questions(plan, 26, 1, 12, HELD_OUT, 1)
    bodies = [question.body for question in questions]
    for key in ("tools", "structured_outputs", "response_format", "logprobs", "n", "stop", "messages", "drafter"):
        assert any(key in body for body in bodies), key
    oracle, checked = Oracle(plan, 1).runtime, 0
    for question in questions:
        body = question.body
        if set(body) <= {"model", "seed", "max_tokens", "temperature", "drafter", "prompt", "ignore_eos"}:
            if isinstance(body["prompt"][0], list):
                continue
            more = {key: body[key] for key in ("seed", "temperature", "ignore_eos") if key in body}
            alone = oracle.generate(body["prompt"], drafter="none", max_new_tokens=body["max_tokens"], **more)
            assert question.expected.choices[0].text == alone.text
            assert question.expected.tokens == len(alone.token_ids)
            checked += 1
    assert checked


def answer_of(text: str, **own: Any) -> Answer:
    answer = Answer(200, done=True)
    body = {"system_fingerprint": "x", "created": 1, "usage": {"completion_tokens": 3}}
    answer.take({**body, "choices": [{"index": 0, "text": text, "finish_reason": "length", "logprobs": None}]})
    for name, value in own.items():
        setattr(answer, name, value)
    return answer


@pytest.mark.parametrize(
    ("found", "more", "count"),
    [
        (answer_of("abc"), {}, "answered"),
        (answer_of("abd"), {}, "different"),
        (answer_of("abc", tokens=4), {}, "different"),
        (answer_of("ab"), {}, "different"),
        (answer_of("ab"), {"may_end": True}, "cut"),
        (answer_of("xb"), {"may_end": True}, "different"),
        (answer_of("ab\ufffd", done=False), {"left": True}, "cut"),
        (answer_of("ab", done=False), {}, "lost"),
        (answer_of("ab", error={"message": "x"}), {}, "lost"),
        (answer_of("xb", error={"message": "x"}), {}, "different"),
        (Answer(503, error={"message": "x"}, done=True), {}, "lost"),
        (Answer(500, done=True), {}, "lost"),
    ],
)
def test_what_an_answer_counts_as(found: Answer, more: dict[str, bool], count: str) -> None:
    figures = Figures("x", sent=1)
    judge(found, Question({}, answer_of("abc")), figures, Ways(), {}, **more)
    assert getattr(figures, count) == 1
    assert figures.passed == (count in ("answered", "cut"))
    figures.sent += 1  # of which nothing was heard
    assert not figures.passed


def test_a_failure_is_told(plan: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def run(_: object, figures: Figures) -> None:
        figures.sent = 1
        figures.differ("Other tokens.")

    monkeypatch.setattr("outrider.tools.lab.faults.disconnects.run", run)
    own = ["--prompts", str(HELD_OUT), "--questions", "1", "--new", "4"]
    assert faults.main([str(plan), "--only", "disconnects", *own]) == 1
    printed = capsys.readouterr().out
    assert "disconnects failed: Other tokens." in printed
    assert faults.main([str(plan), "--only", "nothing", *own]) == 2
    assert "--only names 'nothing'; choose from killed," in capsys.readouterr().err
