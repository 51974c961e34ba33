"""Questions of a user's files and of the task `edit`: what is read and refused, turns, and figures by category."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from outrider import Runtime
from outrider.compiler.held_out import Prompt, read_tasks
from outrider.plans.errors import RequestError
from outrider.plans.tokenizer import Tokenizer
from outrider.tools.bench import __main__ as bench
from outrider.tools.bench import suite
from outrider.tools.bench.columns import COLUMNS
from outrider.tools.bench.prompts import CHARACTERS, choose_prompts, make_edits
from outrider.tools.bench.questions import Conversation, Question, read_questions
from tests.conftest import HELD_OUT, TOY_DRAFTERS

SPEC_BENCH = [
    {"question_id": 81, "category": "writing", "turns": ["write x", "shorter"], "reference": []},
    {"question_id": 82, "category": "writing", "turns": ["write y", "longer"], "reference": [["a"], None]},
    {"question_id": "m1", "category": "math", "turns": ["1 + 1"], "reference": ["2"]},
    {"question_id": "m2", "category": "math", "turns": ["2 + 2"]},
]
NEW = 10


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    return write(tmp_path / "question.jsonl", SPEC_BENCH)


@pytest.fixture
def run(toy_plan: Path, questions: Path, output: Callable[..., str]) -> Callable[..., str]:
    """`outrider bench suite` on the toy plan, a few tokens."""
    return lambda *more, status=0: output(bench.main, "suite", toy_plan, questions, "--new", NEW, *more, status=status)


def test_lines_of_both_formats_are_read_the_first_ones_of_every_category(questions: Path, tmp_path: Path) -> None:
    questions.write_bytes(b"\xef\xbb\xbf" + questions.read_bytes() + b"\n")  # a byte order mark, and an empty line
    found = read_questions([questions])
    assert [(q.category, q.turns) for q in found] == [(q["category"], tuple(q["turns"])) for q in SPEC_BENCH]
    assert found[2].place == f"{questions}:3"
    separators = "a line\u2028and\x85another"  # lines of text, but not of the file
    math = write(tmp_path / "math.jsonl", [{"turns": ["What is 2?"]}, {"turns": [separators, "And 3?"]}])
    assert [(q.category, q.turns) for q in read_questions([math])] == [
        ("math", ("What is 2?",)), ("math", (separators, "And 3?"))
    ]  # fmt: skip
    assert [(q.category, q.turns[0]) for q in read_questions([questions, math], 1)] == [
        ("writing", "write x"), ("math", "1 + 1")
    ]  # fmt: skip
    assert len(read_questions([questions, math], 3)) == 5


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "the line is not JSON"),
        ('["x"]', "the line is ['x'], which is no JSON object"),
        ('{"prompt": "x"}', "the key 'prompt' is unknown; lines have question_id, category, turns"),
        ("{}", "the key 'turns' is missing"),
        ('{"turns": ["x"], "category": "math"}', "the key 'question_id' is missing"),
        ('{"question_id": 1, "turns": ["x"]}', "the key 'category' is missing"),
        ('{"question_id": true, "category": "math", "turns": ["x"]}', '"question_id" is True; it must be a whole'),
        ('{"question_id": 1, "category": "", "turns": ["x"]}', "\"category\" is ''; it must be a name"),
        ('{"question_id": 1, "category": "overall", "turns": ["x"]}', "the category is 'overall', as tables call all"),
        ('{"turns": []}', '"turns" is []; it must be a list of at least one text'),
        ('{"turns": ["x", " "]}', "\"turns[1]\" is ' '; it must be a text that is not empty"),
    ],
)
def test_a_line_of_another_shape_is_refused_by_its_number_and_key(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text('{"turns": ["fine"]}\n\n' + line + "\n", encoding="utf-8")
    with pytest.raises(RequestError) as caught:
        read_questions([path])
    assert str(caught.value).startswith(f"{path}:3: ")
    assert said in str(caught.value)


def test_files_and_questions_that_cannot_be_run_are_refused_before_anything_runs(
    run: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, "run_in_turn", lambda *_: pytest.fail("that came too early"))
    for name, rows, said in (
        ("none.jsonl", [], "holds no questions"), ("overall.jsonl", [{"turns": ["x"]}], "the category is 'overall'"),
    ):  # fmt: skip
        with pytest.raises(RequestError, match=said):
            read_questions([write(tmp_path / name, rows)])
    with pytest.raises(RequestError, match="cannot be read as UTF-8 text"):
        read_questions([tmp_path / "nowhere.jsonl"])
    said = run("--new", "70", status=2)
    assert "question.jsonl:1: the question has " in said
    assert "tokens in 2 turns, which do not fit into the plan's context of 160 beside answers of --new 70" in said
    assert "--new is 160, but the plan's context is 160" in run("--new", "160", status=2)


def test_turns_follow_the_answers_to_those_before(toy: Runtime) -> None:
    templated = Conversation(toy.tokenizer, toy.manifest.target, templated=True)
    text = toy.tokenizer.decode(templated.encode(["one", "two"], ["ANSWER"]))
    assert text == "user: one\nassistant: ANSWER\nuser: two\nassistant:"
    raw = replace(templated, templated=False)
    assert toy.tokenizer.decode(raw.encode(["one", "two", "three"], [" A", " B"])) == "one A\n\ntwo B\n\nthree"
    sizes = templated.check_room([Question("here:1", "x", ("one", "two"))], 4)
    assert sizes == [[len(templated.encode(["one"], [])), len(templated.encode(["one", "two"], [""]))]]


def test_every_category_and_drafter_has_its_figures(run: Callable[..., str], toy: Runtime) -> None:
    found = json.loads(run("--json", "--reps", "2"))
    assert found["suite"] == {
        "files": found["suite"]["files"], "questions": 4, "questions_by_category": {"writing": 2, "math": 2},
        "turns": 6, "chat_template": True, "most_new_tokens": NEW,
    }  # fmt: skip
    rows = {row["drafter"]: row for row in found["rows"]}
    assert list(rows) == ["none", *TOY_DRAFTERS]
    for row in rows.values():
        parts = row["by_task"]
        assert (row["same_tokens"], row["runs"], row["prompts"], row["task"]) == (True, 12, 6, None)
        assert {category: each["runs"] for category, each in parts.items()} == {"writing": 8, "math": 4}
        for key in ("speedup", "tokens_per_verify", "acceptance_rate"):
            values = [each[key] for each in parts.values()]
            assert (row[key] is None and None in values) or min(values) <= row[key] <= max(values)
    # The second turn is answered after the first one and its answer, as a session would.
    talk = Conversation(toy.tokenizer, toy.manifest.target, templated=True)
    assert rows["none"]["by_task"]["math"]["prompt_tokens"] == len(talk.encode(["1 + 1"], []))
    lengths = []
    for turns in (["write x", "shorter"], ["write y", "longer"]):
        first = talk.encode(turns[:1], [])
        answer = toy.generate(first, max_new_tokens=NEW, drafter="none").text
        lengths += [len(first), len(talk.encode(turns, [answer]))]
    assert rows["none"]["by_task"]["writing"]["prompt_tokens"] == sum(sorted(lengths)[1:3]) / 2


def test_a_second_turn_keeps_what_the_session_has_of_the_first(
    run: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, generate = list[Any](), suite.generate
    monkeypatch.setattr(suite, "generate", lambda *given: seen.append(generate(*given)) or seen[-1])
    run("--drafters", "none", "--count", "1", "--json")
    first, second, third = seen[2:]  # after the warm-up
    assert [each.prompt for each in (first, second, third)] == [0, 1, 2]
    assert second.stats.reused_tokens >= first.stats.prompt_tokens  # and what of its answer is encoded alike
    assert first.stats.reused_tokens == third.stats.reused_tokens == 0


def test_tables_csv_and_markdown_have_a_line_for_every_category(run: Callable[..., str], questions: Path) -> None:
    text = run("--drafters", "chain", "--raw")
    assert "4 questions of writing, math: 6 turns, without a chat template, x 1 runs, at most 10 new tokens" in text
    words = [line.split()[:2] for line in text.split("by category")[1].split("milliseconds")[0].splitlines() if line]
    assert words[2:] == [[*each] for each in product(("writing", "math", "overall"), ("none", "chain"))]
    rows = list(csv.DictReader(io.StringIO(run("--drafters", "chain", "--csv", "--sampling", "temperature=0.8"))))
    assert list(rows[0]) == list(COLUMNS)
    assert [(row["drafter"], row["task"]) for row in rows] == [*product(("none", "chain"), ("", "writing", "math"))]
    write(questions, [SPEC_BENCH[3], {"question_id": 3, "category": "a|b\nc\r\nd", "turns": ["x"]}])
    lines = run("--drafters", "none", "--markdown").splitlines()
    assert [line.split(" | ")[0] for line in lines[-3:]] == ["| math", r"| a\|b c d", "| overall"]
    write(questions, SPEC_BENCH[2:])  # of one category, which is the whole table
    assert run("--drafters", "ngram", "--markdown").count("\n| --- ") == 1


def test_a_plan_without_a_template_is_asked_in_raw_text(
    run: Callable[..., str], toy: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, "CHAT_TEMPLATE_FILE", "a template that the plan has not")
    found = json.loads(run("--drafters", "ngram", "--count", "1", "--json"))
    assert not found["suite"]["chat_template"]
    assert found["rows"][0]["by_task"]["math"]["prompt_tokens"] == len(toy.tokenizer.encode("1 + 1"))
    assert found["rows"][1]["same_tokens"]


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
