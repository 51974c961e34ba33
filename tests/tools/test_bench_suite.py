"""A user's question files: what is read and what is refused, turns that follow answers, and figures by category."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider import Runtime
from outrider.plans.errors import RequestError
from outrider.tools.bench import __main__ as bench
from outrider.tools.bench import suite
from outrider.tools.bench.columns import COLUMNS
from outrider.tools.bench.questions import Conversation, Question, read_questions
from tests.conftest import TOY_DRAFTERS

Captured = pytest.CaptureFixture[str]
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
def run(toy_plan: Path, questions: Path):
    """`python -m outrider.tools.bench suite` on the toy plan, a few tokens."""

    def run(*arguments: str, plan: Path = toy_plan) -> int:
        return bench.main(["suite", str(plan), str(questions), "--new", str(NEW), *arguments])

    return run


def test_lines_of_both_formats_are_read(questions: Path, tmp_path: Path) -> None:
    with questions.open("a") as file:
        file.write("\n")  # an empty line is none
    found = read_questions([questions])
    assert [(q.category, q.turns) for q in found] == [
        ("writing", ("write x", "shorter")), ("writing", ("write y", "longer")),
        ("math", ("1 + 1",)), ("math", ("2 + 2",)),
    ]  # fmt: skip
    assert found[2].place == f"{questions}:3"
    separators = "a line\u2028and\x85another"  # lines of text, but not of the file
    gsm8k = write(tmp_path / "gsm8k.jsonl", [{"turns": ["What is 2?"]}, {"turns": [separators, "And 3?"]}])
    assert [(q.category, q.turns) for q in read_questions([gsm8k])] == [
        ("gsm8k", ("What is 2?",)), ("gsm8k", (separators, "And 3?"))
    ]  # fmt: skip


def test_a_byte_order_mark_is_not_read(questions: Path) -> None:
    found = read_questions([questions])
    questions.write_bytes(b"\xef\xbb\xbf" + questions.read_bytes())
    assert read_questions([questions]) == found


def test_of_every_category_the_first_ones_are_taken_whichever_file_has_them(questions: Path, tmp_path: Path) -> None:
    more = write(tmp_path / "math.jsonl", [{"turns": ["3 + 3"]}])
    found = [(q.category, q.turns[0]) for q in read_questions([questions, more], 1)]
    assert found == [("writing", "write x"), ("math", "1 + 1")]
    assert len(read_questions([questions, more], 3)) == len(read_questions([questions, more])) == 5


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "the line is not JSON"),
        ('["x"]', "the line is ['x'], which is no JSON object"),
        ('{"prompt": "x"}', "the key 'prompt' is unknown; lines have question_id, category, turns"),
        ('{"turns": ["x"], "id": 3}', "the key 'id' is unknown"),
        ("{}", "the key 'turns' is missing"),
        ('{"turns": ["x"], "category": "math"}', "the key 'question_id' is missing"),
        ('{"turns": ["x"], "reference": ["y"]}', "the key 'question_id' is missing"),
        ('{"question_id": 1, "turns": ["x"]}', "the key 'category' is missing"),
        ('{"question_id": 1.5, "category": "math", "turns": ["x"]}', '"question_id" is 1.5; it must be a whole number'),
        ('{"question_id": true, "category": "math", "turns": ["x"]}', '"question_id" is True'),
        ('{"question_id": 1, "category": "", "turns": ["x"]}', "\"category\" is ''; it must be a name"),
        (
            '{"question_id": 1, "category": "overall", "turns": ["x"]}',
            "the category is 'overall', as tables call all together; give it another name",
        ),
        ('{"turns": "x"}', "\"turns\" is 'x'; it must be a list of at least one text"),
        ('{"turns": []}', '"turns" is []; it must be'),
        ('{"turns": ["x", 3]}', '"turns[1]" is 3; it must be a text that is not empty'),
        ('{"turns": [" "]}', "\"turns[0]\" is ' '; it must be a text that is not empty"),
    ],
)
def test_a_line_of_another_shape_is_refused_by_its_number_and_key(
    toy_plan: Path, tmp_path: Path, capsys: Captured, line: str, said: str
) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text('{"turns": ["fine"]}\n\n' + line + "\n", encoding="utf-8")
    assert bench.main(["suite", str(toy_plan), str(path)]) == 2
    error = capsys.readouterr().err
    assert f"{path}:3: " in error
    assert said in error


def test_a_file_s_name_is_a_category_too(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"overall.jsonl:1: the category is 'overall'"):
        read_questions([write(tmp_path / "overall.jsonl", [{"turns": ["x"]}])])


def test_files_without_questions_are_refused(toy_plan: Path, tmp_path: Path, capsys: Captured) -> None:
    assert bench.main(["suite", str(toy_plan), str(write(tmp_path / "none.jsonl", []))]) == 2
    assert "holds no questions" in capsys.readouterr().err
    assert bench.main(["suite", str(toy_plan), str(tmp_path / "nowhere.jsonl")]) == 2
    assert "cannot be read as UTF-8 text" in capsys.readouterr().err


def test_a_question_without_room_is_refused_before_anything_runs(
    run, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(suite, "run_in_turn", lambda *_: pytest.fail("that came too early"))
    assert run("--new", "70") == 2
    error = capsys.readouterr().err
    assert "question.jsonl:1: the question has " in error
    assert "tokens in 2 turns, which do not fit into the plan's context of 160 beside answers of --new 70" in error
    assert run("--new", "160") == 2
    assert "--new is 160, but the plan's context is 160" in capsys.readouterr().err
    assert run("--tree", "2/1/4", "--depth", "2") == 2
    assert "--tree and --depth both say" in capsys.readouterr().err


def test_turns_follow_the_answers_to_those_before(toy: Runtime) -> None:
    templated = Conversation(toy.tokenizer, toy.manifest.target, templated=True)
    text = toy.tokenizer.decode(templated.encode(["one", "two"], ["ANSWER"]))
    assert text == "user: one\nassistant: ANSWER\nuser: two\nassistant:"
    raw = replace(templated, templated=False)
    assert toy.tokenizer.decode(raw.encode(["one", "two", "three"], [" A", " B"])) == "one A\n\ntwo B\n\nthree"
    sizes = templated.check_room([Question("here:1", "x", ("one", "two"))], 4)
    assert sizes == [[len(templated.encode(["one"], [])), len(templated.encode(["one", "two"], [""]))]]


def test_every_category_and_drafter_has_its_figures(run, toy: Runtime, capsys: Captured) -> None:
    assert run("--json", "--reps", "2") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["suite"] == {
        "files": found["suite"]["files"], "questions": 4, "questions_by_category": {"writing": 2, "math": 2},
        "turns": 6, "chat_template": True, "most_new_tokens": NEW,
    }  # fmt: skip
    rows = {row["drafter"]: row for row in found["rows"]}
    assert list(rows) == ["none", *TOY_DRAFTERS]
    for name, row in rows.items():
        assert (row["same_tokens"], row["runs"], row["prompts"], row["task"]) == (True, 12, 6, None)
        assert {category: c["runs"] for category, c in row["by_task"].items()} == {"writing": 8, "math": 4}
        parts = row["by_task"].values()
        assert min(c["speedup"] for c in parts) <= row["speedup"] <= max(c["speedup"] for c in parts)
        assert min(c["tokens_per_verify"] for c in parts) <= row["tokens_per_verify"]
        if name == "none":
            assert row["tokens_per_verify"] == row["by_task"]["math"]["tokens_per_verify"] == 1
            assert row["by_task"]["math"]["acceptance_rate"] is None
    rates = [c["acceptance_rate"] for c in rows["chain"]["by_task"].values()]
    assert min(rates) <= rows["chain"]["acceptance_rate"] <= max(rates)
    # The second turn is answered after the first one and its answer, as a session would.
    talk = Conversation(toy.tokenizer, toy.manifest.target, templated=True)
    expected = len(talk.encode(["1 + 1"], []))
    assert rows["none"]["by_task"]["math"]["prompt_tokens"] == expected
    answers = [
        toy.generate(talk.encode([q], []), max_new_tokens=NEW, drafter="none").text for q in ("write x", "write y")
    ]
    lengths = [len(talk.encode([q], [])) for q in ("write x", "write y")]
    lengths += [
        len(talk.encode(turns, [answer]))
        for turns, answer in zip((["write x", "shorter"], ["write y", "longer"]), answers, strict=True)
    ]
    assert rows["none"]["by_task"]["writing"]["prompt_tokens"] == sum(sorted(lengths)[1:3]) / 2


def test_a_second_turn_keeps_what_the_session_has_of_the_first(
    run, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    seen = []
    generate = suite.generate

    def watched(*arguments: Any) -> Any:
        found = generate(*arguments)
        seen.append((found.prompt, found.stats.reused_tokens, found.stats.prompt_tokens))
        return found

    monkeypatch.setattr(suite, "generate", watched)
    assert run("--drafters", "none", "--count", "1", "--json") == 0
    capsys.readouterr()
    measured = seen[2:]  # after the warm-up
    assert [prompt for prompt, _, _ in measured] == [0, 1, 2]
    assert [reused > 0 for _, reused, _ in measured] == [False, True, False]
    first, second = measured[0], measured[1]
    assert second[1] >= first[2]  # all of the first turn, and what of its answer is encoded alike


def test_the_table_says_what_was_asked_and_lists_categories(run, capsys: Captured) -> None:
    assert run("--drafters", "ngram,chain", "--raw") == 0
    text = capsys.readouterr().out
    assert "4 questions of writing, math: 6 turns, without a chat template, x 1 runs, at most 10 new tokens" in text
    _, table = text.split("by category")
    words = [line.split()[:2] for line in table.split("milliseconds a round")[0].splitlines() if line][2:]
    assert words == [[c, d] for c in ("writing", "math", "overall") for d in ("none", "ngram", "chain")]


def test_one_category_alone_is_the_whole_table(run, questions: Path, capsys: Captured) -> None:
    write(questions, SPEC_BENCH[2:])
    assert run("--drafters", "ngram", "--markdown") == 0
    text = capsys.readouterr().out
    assert text.count("| ---") == len(text.splitlines()[2].split("|")) - 2  # one table
    assert run("--drafters", "ngram", "--csv") == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(row["drafter"], row["task"]) for row in rows] == [("none", "math"), ("ngram", "math")]


def test_csv_and_markdown_have_a_line_for_every_category(run, capsys: Captured) -> None:
    assert run("--drafters", "chain", "--csv", "--sampling", "temperature=0.8,seed=4") == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert list(rows[0]) == list(COLUMNS)
    assert [(row["drafter"], row["task"]) for row in rows] == [
        (drafter, task) for drafter in ("none", "chain") for task in ("", "writing", "math")
    ]
    assert all(row["acceptance_rate"] for row in rows[3:])
    assert {row["same_tokens"] for row in rows if not row["task"]} == {"True"}
    assert run("--drafters", "chain", "--markdown") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert [line.split("|")[1].strip() for line in lines[4:]] == [
        "category", "---", "writing", "writing", "math", "math", "overall", "overall"
    ]  # fmt: skip


def test_cells_of_markdown_hold_any_category(run, questions: Path, capsys: Captured) -> None:
    odd = {"question_id": 3, "category": "a|b\nc\r\nd", "turns": ["x"]}
    write(questions, [SPEC_BENCH[3], odd])
    assert run("--drafters", "none", "--markdown") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines[-3:]] == ["| math", r"| a\|b c d", "| overall"]


def test_a_plan_without_a_template_is_asked_in_raw_text(
    run, toy: Runtime, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(suite, "CHAT_TEMPLATE_FILE", "a template that the plan has not")
    assert run("--drafters", "ngram", "--count", "1", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert not found["suite"]["chat_template"]
    assert found["rows"][0]["by_task"]["math"]["prompt_tokens"] == len(toy.tokenizer.encode("1 + 1"))
    assert found["rows"][1]["same_tokens"]
