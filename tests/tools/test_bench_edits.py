"""Prompts of the task `edit`: the file, the wish, and the changed file's beginning, made without chance."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from outrider.compiler.held_out import Prompt, read_tasks
from outrider.plans.errors import RequestError
from outrider.plans.tokenizer import Tokenizer
from outrider.tools.bench import __main__ as bench
from outrider.tools.bench.edits import CHARACTERS, make_edits
from outrider.tools.bench.prompts import choose_prompts
from tests.conftest import HELD_OUT

Captured = pytest.CaptureFixture[str]
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


def parts(prompt: Prompt) -> tuple[str, str, str, str]:
    """The file, the name, what it is to be called, and the changed file's beginning."""
    file, name, new, beginning = WISH.split(prompt.text)
    return file, name, new, beginning


def test_a_file_is_asked_for_again_with_its_commonest_name_changed() -> None:
    (prompt,) = make_edits([Prompt(SOURCE, "long")])
    assert prompt.task == "edit"
    beginning = "import os\n\n\ndef new_read(path):\n    return open(path).new_read()\n"
    assert parts(prompt) == (SOURCE, "read", "new_read", beginning)
    assert make_edits([Prompt(SOURCE, "long")]) == [prompt]


def test_every_held_out_file_goes_on_as_it_did_but_for_the_name() -> None:
    files = [prompt for prompt in read_tasks(HELD_OUT) if prompt.task == "long"]
    tokenizer = Tokenizer.load(HELD_OUT.parent / "target")
    for source, prompt in zip(files, make_edits(files), strict=True):
        file, name, new, beginning = parts(prompt)
        assert source.text.startswith(file)
        assert len(file) <= CHARACTERS
        changed = re.sub(rf"\b{name}\b", new, file)
        assert changed.startswith(beginning)
        rest = changed[len(beginning) :]
        assert len(rest) > len(changed) / 3
        assert new in rest
        assert changed.replace(new, name) == file
        assert 400 < len(tokenizer.encode(prompt.text)) < 1200
        assert len(tokenizer.encode(rest)) > 128  # what a benchmark generates by default


def test_a_new_name_is_new_and_only_whole_names_change() -> None:
    (prompt,) = make_edits([Prompt("total = new_total = 1\ntotal += subtotal + total\nprint(total)\n" * 4)])
    _, name, new, beginning = parts(prompt)
    assert (name, new) == ("total", "new_new_total")
    assert beginning.splitlines()[:2] == ["new_new_total = new_total = 1", "new_new_total += subtotal + new_new_total"]


def test_prose_has_a_word_changed_and_what_has_none_is_refused() -> None:
    (prompt,) = make_edits([Prompt("the wolf came home\nand the wolf slept\nin its den\n")])
    assert parts(prompt)[1] == "slept"
    for text in ("1 2 3\n4 5 6\n", "one line without an end", "one line\n"):
        with pytest.raises(RequestError, match="Prompt 1 of the task long, counted from 0, has no name to change"):
            make_edits([prompt, Prompt(text)])


def test_edits_are_measured_only_where_they_are_asked_for(
    toy_recipe: Path, toy_plan: Path, tmp_path: Path, capsys: Captured
) -> None:
    folder = shutil.copytree(toy_recipe.parent, tmp_path / "work")
    path = folder / "tasks.jsonl"
    rows = [{"task": "long", "prompt": "def fun():\n    pass\n"}, {"task": "short", "prompt": "x = 1\n"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert [prompt.task for prompt in choose_prompts(folder / "plan", path)] == ["long", "short"]
    arguments = ["latency", str(folder / "plan"), "--prompts", str(path), "--task", "edit", "--drafters", "ngram"]
    assert bench.main([*arguments, "--new", "8", "--reps", "1", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["drafter"], row["task"], row["prompts"]) for row in rows] == [
        ("none", "edit", 1),
        ("ngram", "edit", 1),
    ]
    assert all(row["same_tokens"] for row in rows)
    with pytest.raises(RequestError, match="pass one of those, or edit, which is made of long"):
        choose_prompts(folder / "plan", path, "chat")
    path.write_text(json.dumps({"task": "edit", "prompt": "own"}) + "\n", encoding="utf-8")
    assert [prompt.text for prompt in choose_prompts(folder / "plan", path, "edit")] == ["own"]
    path.write_text(json.dumps({"task": "short", "prompt": "own"}) + "\n", encoding="utf-8")
    with pytest.raises(RequestError, match=r"--task is 'edit', but .* has the tasks short; pass one of those\."):
        choose_prompts(folder / "plan", path, "edit")
