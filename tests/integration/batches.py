"""Batches that tests share: requests of the toy, and how they are written and run."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from outrider.runtime.__main__ import main

PROMPTS = ("import os\nimport sys\n", "def main() -> None:\n    return", "def main(x): return", "x")


def line(custom_id: str, body: dict[str, Any], url: str = "/v1/completions") -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "toy", **body}}


def mixed(count: int, seed: int = 3) -> list[dict[str, Any]]:
    """Completions and chats, greedy and drawn, with seeds and without, of one choice and of two, in no order."""
    draw = random.Random(seed)
    lines = []
    for number in range(1, count + 1):
        prompt = draw.choice(PROMPTS)[: draw.randint(1, 24)]
        body: dict[str, Any] = {"max_tokens": draw.randint(1, 24), "temperature": draw.choice([0, 0.8])}
        body |= {"seed": 5} if draw.random() < 0.3 else {}
        if draw.random() < 0.5:
            lines.append(line(f"request-{number}", body | {"prompt": prompt}))
        else:
            asked = {"messages": [{"role": "user", "content": prompt}], "n": draw.choice([1, 2])}
            lines.append(line(f"request-{number}", body | asked, "/v1/chat/completions"))
    draw.shuffle(lines)
    return lines


def write(path: Path, lines: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in lines), encoding="utf-8")
    return path


def run(plan: Path, requests: Path, out: Path, *options: str) -> bytes:
    """The results of a batch that the command has run."""
    assert main(["batch", str(plan), str(requests), "--out", str(out), "--threads", "1", "--quiet", *options]) == 0
    return (out / "results.jsonl").read_bytes()


def read(results: bytes) -> list[dict[str, Any]]:
    return [json.loads(each) for each in results.splitlines()]
