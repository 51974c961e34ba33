"""Prompts of the task `edit`: the file, the wish, and the changed file's beginning, made without chance."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider.compiler.held_out import Prompt, read_tasks
from outrider.plans.errors import RequestError
from outrider.plans.tokenizer import Tokenizer
from outrider.tools.bench import __main__ as bench
from outrider.tools.bench.prompts import CHARACTERS, choose_prompts, make_edits
from tests.conftest import HELD_OUT

SOURCE = """\
import os


def read(path):
    return open(path).read()


def write(path, text):
    shown = read(path)
    if shown != text and len(shown) == 0:
        print(read, shown)
"""
WISH = re.compile(r"\n\n# The same file, with (\w+) renamed to (\w+):\n\n")


def test_a_file_is_asked_for_again_with_its_commonest_name_changed() -> None:
    beginning = "import os\n\n\ndef new_read(path):\n    return open(path).new_read()\n"
    (prompt,) = make_edits([Prompt(SOURCE, "long")])
    assert (prompt.task, *WISH.split(prompt.text)) == ("edit", SOURCE, "read", "new_read", beginning)
    (prompt,) = make_edits([Prompt("total = new_total = 1\ntotal += subtotal + total\nprint(total)\n" * 4)])
    _, name, new, beginning = WISH.split(prompt.text)
    assert (name, new) == ("total", "new_new_total")  # new, and only whole names change
    assert beginning.splitlines()[:2] == ["new_new_total = new_total = 1", "new_new_total += subtotal + new_new_total"]
    (prompt,) = make_edits([Prompt("the wolf came home\nand the wolf slept\nin its den\n")])
    assert WISH.split(prompt.text)[1] == "slept"
    for text in ("1 2 3\n4 5 6\n", "one line without an end", "one line\n"):
        with pytest.raises(RequestError, match="Prompt 1 of the task long, counted from 0, has no name to change"):
            make_edits([prompt, Prompt(text)])


def test_every_held_out_file_continues_as_it_did_but_for_the_name() -> None:
    files = [prompt for prompt in read_tasks(HELD_OUT) if prompt.task == "long"]
    tokenizer = Tokenizer.load(HELD_OUT.parent / "target")
    for source, prompt in zip(files, make_edits(files), strict=True):
        file, name, new, beginning = WISH.split(prompt.text)
        assert source.text.startswith(file)
        assert len(file) <= CHARACTERS
        changed = re.sub(rf"\b{name}\b", new, file)
        assert changed.replace(new, name) == file
        assert changed.startswith(beginning)
        rest = changed[len(beginning) :]
        assert new in rest
        assert 400 < len(tokenizer.encode(prompt.text)) < 1200
        assert len(tokenizer.encode(rest)) > 128  # what a benchmark generates by default


def test_edits_are_measured_only_where_they_are_asked_for(workplace: Path, report: Callable[..., Any]) -> None:
    plan, path = workplace / "plan", workplace / "tasks.jsonl"

    def write(*rows: tuple[str, str]) -> None:
        path.write_text("".join(json.dumps({"task": t, "prompt": p}) + "\n" for t, p in rows), encoding="utf-8")

    write(("long", "def fun():\n    pass\n"), ("short", "x = 1\n"))
    assert [prompt.task for prompt in choose_prompts(plan, path)] == ["long", "short"]
    asked = ("latency", plan, "--prompts", path, "--task", "edit", "--drafters", "ngram", "--new", 8, "--reps", 1)
    rows = report(bench.main, *asked)["rows"]
    assert [(row["drafter"], row["task"], row["prompts"]) for row in rows] == [
        ("none", "edit", 1),
        ("ngram", "edit", 1),
    ]
    with pytest.raises(RequestError, match="pass one of those, or edit, which is made of long"):
        choose_prompts(plan, path, "chat")
    write(("edit", "own"))
    assert [prompt.text for prompt in choose_prompts(plan, path, "edit")] == ["own"]
