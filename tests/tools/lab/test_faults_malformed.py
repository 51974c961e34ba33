"""What bodies that are right by chance are held against."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outrider.plans.errors import RequestError
from outrider.tools.lab.faults.client import Answer
from outrider.tools.lab.faults.figures import Figures
from outrider.tools.lab.faults.malformed import Lucky, judge_lucky

PATH = "/v1/completions"
ASKED: dict[str, Any] = {"prompt": [5], "temperature": 0}


def written(text: str, tokens: int = 3) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "finish_reason": "length", "logprobs": None}
    usage = {"completion_tokens": tokens}
    return {"system_fingerprint": "x", "created": 1, "usage": usage, "choices": [choice]}


class Plain:
    """Answers everything alike, but for prompts of no token."""

    def answer(self, body: dict[str, Any]) -> Answer:
        if not body["prompt"]:
            raise RequestError("The prompt is empty.")
        answer = Answer(200, done=True)
        answer.take(written("abc"))
        return answer


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
    figures = Figures("x", sent=1)
    judge_lucky(figures, Plain(), [Lucky(PATH, json.dumps(ASKED | more).encode(), said)])
    assert getattr(figures, count) == 1
    assert figures.passed == (count == "answered")
