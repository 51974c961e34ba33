"""Faults under load, in short forms: nothing is lost, nothing differs, nothing leaks; and failures are reported."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider.plans.errors import RequestError
from outrider.tools.lab.faults import __main__ as faults
from outrider.tools.lab.faults.client import Answer
from outrider.tools.lab.faults.crowd import Ways, judge
from outrider.tools.lab.faults.figures import Figures
from outrider.tools.lab.faults.malformed import Lucky, judge_lucky
from outrider.tools.lab.faults.questions import Oracle, Question, make_questions
from tests.conftest import HELD_OUT
from tests.integration.test_tools import HERMES
from tests.plans.damage import TEMPLATE, list_again

MINUTES = {
    "disconnects": 0.05, "malformed": 0.25, "slow-clients": 0.1, "clock": 0.1, "full-disk": 0.05, "replaced-plan": 0.1,
    "out-of-memory": 0.1, "killed": 0.4, "starved-replica": 0.2,
}  # fmt: skip


@pytest.fixture(scope="module")
def plan(branch_plan: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy's plan, with a chat template that knows tools."""
    plan = shutil.copytree(branch_plan, branch_plan.with_name(f"{branch_plan.name}-of-faults"), dirs_exist_ok=True)
    (plan / TEMPLATE).write_text(HERMES, encoding="utf-8")
    list_again(plan)
    return plan


@pytest.mark.long
@pytest.mark.parametrize("name", faults.SCENARIOS)
def test_nothing_is_lost_or_different_or_leaks(plan: Path, name: str, report: Callable[..., Any]) -> None:
    own = ("--prompts", HELD_OUT, "--questions", 26, "--new", 24, "--clients", 12)
    (row,) = report(faults.main, plan, "--only", name, "--minutes", MINUTES[name], *own)["rows"]
    assert row["wrong"] == []
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


def written(text: str, tokens: int = 3) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "finish_reason": "length", "logprobs": None}
    usage = {"completion_tokens": tokens}
    return {"system_fingerprint": "x", "created": 1, "usage": usage, "choices": [choice]}


def answer_of(text: str, **own: Any) -> Answer:
    answer = Answer(200, done=True)
    answer.take(written(text))
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


class Plain:
    """Answers everything alike, but for prompts of no token."""

    def answer(self, body: dict[str, Any]) -> Answer:
        if not body["prompt"]:
            raise RequestError("The prompt is empty.")
        return answer_of("abc")


def whole(text: str, tokens: int = 3) -> bytes:
    return json.dumps(written(text, tokens)).encode()


def stream(text: str) -> bytes:
    return b"data: " + whole(text) + b"\n\ndata: [DONE]\n\n"


@pytest.mark.parametrize(
    ("more", "said", "count"),
    [
        ({}, whole("abc"), "answered"),
        ({}, whole("abd"), "different"),
        ({}, whole("abc", tokens=4), "different"),
        ({"prompt": []}, whole("abc"), "different"),
        ({"temperature": 1}, whole("abd"), "answered"),
        ({"temperature": 1, "seed": 3}, whole("abd"), "different"),
        ({"deadline": 0.1}, whole("ab"), "answered"),
        ({}, stream("abc"), "answered"),
        ({}, stream("abd"), "different"),
        ({}, stream("abc")[:-20], "lost"),
        ({}, b"no JSON", "lost"),
        ({}, b"{}", "lost"),
        ({}, b'data: {"error": {}}\n\ndata: [DONE]\n\n', "lost"),
    ],
)
def test_an_answer_by_chance_is_that_of_plain_decoding(more: dict[str, Any], said: bytes, count: str) -> None:
    figures, asked = Figures("x", sent=1), {"prompt": [5], "temperature": 0} | more
    judge_lucky(figures, Plain(), [Lucky("/v1/completions", json.dumps(asked).encode(), said)])
    assert getattr(figures, count) == 1
    assert figures.passed == (count == "answered")


def test_a_failure_is_reported(plan: Path, output: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    def disconnect(_: object, figures: Figures) -> None:
        figures.sent = 1
        figures.differ("Other tokens.")

    monkeypatch.setattr("outrider.tools.lab.faults.slow_clients.disconnect", disconnect)
    own = ("--prompts", HELD_OUT, "--questions", 1, "--new", 4)
    printed = output(faults.main, plan, "--only", "disconnects", *own, status=1)
    assert "disconnects failed: Other tokens." in printed
    said = output(faults.main, plan, "--only", "nothing", *own, status=2)
    assert "--only names 'nothing'; choose from killed," in said
