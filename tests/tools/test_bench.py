"""`outrider bench latency` and `startup`: figures of a row, every form of output, refusals before anything runs."""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from rich.console import Console

from outrider.plans.errors import OutriderError, RequestError
from outrider.plans.plan import read_manifest
from outrider.plans.tokenizer import Tokenizer
from outrider.tools import identity
from outrider.tools.bench import __main__ as bench
from outrider.tools.bench import latency as measuring
from outrider.tools.bench import variants
from outrider.tools.bench.columns import COLUMNS
from outrider.tools.bench.prompts import Prompts, choose_prompts, cut_prompts, encode_prompts
from outrider.tools.bench.tables import print_table
from outrider.tools.identity import threads_used
from tests.conftest import TOY_DRAFTERS
from tests.cpu_session import cpu_session

CONTEXT = 160  # the toy's
OF_JSON = {"by_task", "samples"}
OF_CSV = {"time", "machine_processor", "machine_cores", "machine_python", "machine_onnxruntime"}


@pytest.fixture
def tasks(workplace: Path) -> Path:
    """Prompts of two tasks and of none; the last of the task `long` is the longest."""
    rows = [("short", "import os\n"), ("short", "import sys\n"), ("long", "x = 1\n"), ("long", "y = 22\n" * 15)]
    path = workplace / "tasks.jsonl"
    path.write_text("".join(json.dumps({"task": t, "prompt": p}) + "\n" for t, p in rows), encoding="utf-8")
    return path


@pytest.fixture
def latency(workplace: Path, output: Callable[..., str]) -> Callable[..., str]:
    """`outrider bench latency` on the toy plan, a few tokens."""
    sizes = ("--prompts", workplace / "held_out.jsonl", "--count", 2, "--new", 12, "--reps", 1)
    return lambda *more, status=0: output(bench.main, "latency", workplace / "plan", *sizes, *more, status=status)


def test_prompts_are_those_of_the_recipe_in_any_folder(workplace: Path, tmp_path: Path) -> None:
    recipe = workplace / "model.yaml"
    text = recipe.read_text(encoding="utf-8")
    with pytest.raises(RequestError, match="names no held_out prompts; pass --prompts FILE"):
        choose_prompts(workplace / "plan", None)
    (tmp_path / "far").mkdir()
    away = (workplace / "held_out.jsonl").rename(tmp_path / "far" / "away.jsonl")
    recipe.write_text(f"held_out: {away}\n{text}", encoding="utf-8")
    assert choose_prompts(workplace / "plan", None)[0].text == "import os\nimport sys\n"
    recipe.unlink()
    with pytest.raises(OutriderError, match="not there any more; pass --prompts FILE"):
        choose_prompts(workplace / "plan", None)


def test_prompts_of_all_tasks_come_in_turn_or_those_of_one(workplace: Path, tasks: Path) -> None:
    plan = workplace / "plan"
    assert [p.task for p in choose_prompts(plan, tasks)] == ["short", "long", "short", "long"]
    assert [p.text for p in choose_prompts(plan, tasks, "short")] == ["import os\n", "import sys\n"]
    with pytest.raises(RequestError, match=r"--task is 'chat', but .*tasks\.jsonl has the tasks long, short; pass"):
        choose_prompts(plan, tasks, "chat")
    with pytest.raises(RequestError, match=r"held_out\.jsonl names no tasks; leave it out"):
        choose_prompts(plan, workplace / "held_out.jsonl", "chat")


def test_prompts_leave_room_for_new_tokens_and_may_be_of_one_length(workplace: Path, tasks: Path) -> None:
    chosen = choose_prompts(workplace / "plan", tasks)
    tokenizer = Tokenizer.load(workplace / "plan" / "tokenizer")
    longest = max(len(tokenizer.encode(prompt.text)) for prompt in chosen)
    assert encode_prompts(chosen, tokenizer, CONTEXT, CONTEXT - longest).tasks == ["short", "long", "short", "long"]
    with pytest.raises(RequestError, match=rf"Prompt 3 \(task long\), counted from 0, has {longest} tokens, but 1 to"):
        encode_prompts(chosen, tokenizer, CONTEXT, CONTEXT - longest + 1)
    with pytest.raises(RequestError, match=r"has 10 tokens, but 1 to 2 fit .*, and 3 more do not fit; lower"):
        encode_prompts([replace(chosen[3], text="q" * 10)] * 4, tokenizer, CONTEXT, CONTEXT - 2)
    unasked = Mock(wraps=tokenizer, encode=Mock(side_effect=AssertionError))
    with pytest.raises(RequestError, match=r"Prompt 1, counted from 0, has at least \d+ tokens, but 1 to 2 fit into"):
        encode_prompts([chosen[0], replace(chosen[3], text="q" * 10**6)], unasked, CONTEXT, CONTEXT - 2)
    assert cut_prompts([[1, 2, 3], [4, 5]], 4, 9) == [[5, 1, 2, 3], [2, 3, 4, 5]]
    assert cut_prompts([[1, 2, 3], [4, 5]], 2, 9) == [[2, 3], [4, 5]]
    digests = [Prompts(ids, [None] * len(ids)).sha256 for ids in ([[1, 2], [3]], [[1], [2, 3]], [[3], [1, 2]])]
    assert len(set(digests)) == 3


def test_a_report_has_every_figure_and_a_terminal_of_80_columns_shows_it_whole(latency: Callable[..., str]) -> None:
    found = json.loads(latency("--json"))
    assert set(found) == {"machine", "time", "plan", "other_programs", "rows"}
    assert datetime.fromisoformat(found["time"]).tzinfo is not None
    rows = {row["drafter"]: row for row in found["rows"]}
    assert list(rows) == ["none", *TOY_DRAFTERS]
    shapes = {name: tuple(row[key] for key in ("kind", "tree", "nodes", "depth")) for name, row in rows.items()}
    assert (shapes["bushy"], shapes["none"]) == (("model", "3/2/9", 9, 3), (None, None, 1, 0))
    assert (shapes["ngram"], shapes["chain"]) == (("ngram", None, 7, 6), ("model", "1/3/5", 5, 4))
    for row in rows.values():
        assert row.keys() == ({*COLUMNS} - OF_CSV) | OF_JSON
        assert row["same_tokens"]
        assert row["same_runs"] == row["runs"] == 2
        for figure in ("speedup", "decode_speedup", "tokens_per_second", "ttft_ms", "e2e_ms"):
            assert row[f"{figure}_p10"] <= row[figure] <= row[f"{figure}_p90"]
        assert row["tokens_per_verify"] == 24 / row["rounds"]
        assert row["round_ms"] == pytest.approx(row["engine_ms"] + row["host_gap_ms"])
        assert 0 < sum(row["stages"].values()) < row["round_ms"]
        assert 0 < row["tpot_ms_p50"] <= row["tpot_ms_p99"] <= row["itl_ms_p99"]  # a user waits for a whole round
        assert row["itl_ms_p99"] == max(map(max, row["samples"]["itl_ms"]))
        assert (row["sampling"], row["prompts"], row["new_tokens"]) == ("greedy", 2, 12)
        assert row["peak_rss_bytes"] > row["plan_bytes"]
        assert [at["tokens"] for at in row["ms_along_context"]] == sorted(
            at["tokens"] for at in row["ms_along_context"]
        )
        assert row["acceptance_by_depth"] == sorted(row["acceptance_by_depth"], reverse=True)
    assert rows["none"]["speedup"] == rows["none"]["tokens_per_verify"] == 1
    assert {"BimMask", "head", "target", "TreeAccept", "KvGather"} <= rows["head"]["stages"].keys()
    screen = io.StringIO()
    print_table(found, Console(file=screen, width=80), stages=True)
    assert all(len(line) <= 80 and "\N{HORIZONTAL ELLIPSIS}" not in line for line in screen.getvalue().splitlines())
    figures, stages = screen.getvalue().split("milliseconds a round, by stage")
    assert len(re.findall(r"[\d.]+x +[\d.]+ +[\d.]+/[\d.]+ +[\d.]+/[\d.]+ +yes", figures)) == 1 + len(TOY_DRAFTERS)
    assert {"round", "host gap", "target", "TreeAccept"} <= {line[:12].rstrip() for line in stages.splitlines()}


def test_csv_and_markdown_have_the_figures_of_every_row_and_task(workplace: Path, tasks: Path, latency: Any) -> None:
    options = ("--prompts", tasks, "--count", 3, "--drafters", "ngram,head", "--sampling", "temperature=0.5,seed=3")
    rows = list(csv.DictReader(io.StringIO(latency(*options, "--csv"))))
    of_tasks = (("", "3"), ("short", "2"), ("long", "1"))
    assert [(row["drafter"], (row["task"], row["runs"])) for row in rows] == [
        *product(("none", "ngram", "head"), of_tasks)
    ]
    assert list(rows[0]) == list(COLUMNS)
    assert rows[3]["sampling"] == "temperature=0.5,seed=3"
    assert "head:" in rows[6]["stages"]
    assert len(rows[3]["ms_along_context"].split()) > 1
    lines = [line for line in latency("--drafters", "ngram", "--markdown").splitlines() if line.startswith("|")]
    assert (len(lines), len({line.count("|") for line in lines}), lines[2][:8]) == (4, 1, "| none |")
    table = latency("--prompts", tasks, "--count", 3, "--drafters", "ngram").split("by task")[1]
    assert re.search(r"\bnone .*\n.*\bngram ", table)


def test_texts_of_a_form_end_where_it_does(latency: Callable[..., str]) -> None:
    rows = json.loads(latency("--json", "--choice", "import", "--choice", "return", "--drafters", "ngram,head"))["rows"]
    assert all(row["form"].startswith("choice ") and row["same_tokens"] and row["new_tokens"] < 12 for row in rows)


def test_the_shortest_and_the_longest_generations_are_no_error(latency: Callable[..., str]) -> None:
    (row,) = json.loads(latency("--new", 1, "--count", 1, "--drafters", "none", "--json"))["rows"]
    missing = ("round_ms", "host_gap_ms", "tpot_ms_p50", "tokens_per_second", "decode_speedup", "acceptance_rate")
    assert [row[name] for name in missing] == [None] * len(missing)
    text = latency("--new", 1, "--count", 1, "--drafters", "ngram")
    assert next(line.split() for line in text.splitlines() if line.startswith("ngram"))[-2:] == ["-", "yes"]
    sizes = ("--prompt-len", 60, "--new", CONTEXT - 60, "--count", 1, "--drafters", "chain", "--json")
    rows = json.loads(latency(*sizes))["rows"]
    assert [(row["prompt_tokens"], row["new_tokens"], row["same_tokens"]) for row in rows] == [(60, 100, True)] * 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl cannot be read as UTF-8 text"),
        (["--task", "chat"], "--task is 'chat', but"),
        (["--backend", "tensorrt"], "tensorrt"),
        (["--new", "160"], "--new is 160, but the plan's context is 160; pass at most 159."),
        (["--new", "100"], "tokens, but 1 to 60 fit into the plan's context of 160 beside --new 100"),
        (["--new", "100", "--prompt-len", "61"], "--prompt-len is 61; pass 1 to 60"),
        (["--choice", "import", "--synthetic-accept", "2"], "--synthetic-accept accepts what no form allows"),
        (["--synthetic-accept", "1"], "--synthetic-accept changes logits on the host"),
        (["--tree", "own", "--depth", "3"], "--tree and --depth both say what is drafted; pass one of them"),
        (["--drafters", "ngram"], "--tree is for drafters that draft trees, and of ngram (ngram)"),
        (["--set", "capacity.context=140"], "capacity.context is 160 in the plan and 140 in the"),
        (["--recipe", "nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_a_plan_is_built(
    latency: Any, tasks: Path, arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if arguments[0] == "--synthetic-accept":
        monkeypatch.setattr(measuring, "choose_backend", lambda *_: argparse.Namespace(backend="tensorrt"))
    monkeypatch.setattr(variants, "_run", Mock(side_effect=AssertionError("the compiler came too early")))
    monkeypatch.setattr(measuring, "run_in_turn", Mock(side_effect=AssertionError("that came too early")))
    given = ("--prompts", tasks, "--count", 4, "--tree", "2/1/4", "--drafters", "head")
    assert said in latency(*given, *arguments, status=2)


def test_a_broken_record_of_the_build_is_reported(workplace: Path, latency: Callable[..., str]) -> None:
    (workplace / "plan" / "build.json").write_text("{", encoding="utf-8")
    assert "build.json is no record of a build; remove it" in latency(status=2)


def test_threads_are_counted_where_the_backend_chooses(toy_plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if identity._TASKS.is_dir():
        before = len(os.listdir(identity._TASKS))
        engine = read_manifest(toy_plan).backends["onnxruntime-cpu"].engines["target"]
        session = cpu_session(toy_plan / engine.file, threads=0)
        assert threads_used("onnxruntime-cpu", 0) == 1 + len(os.listdir(identity._TASKS)) - before
        del session
    assert (threads_used("onnxruntime-cpu", 3), threads_used("tensorrt", 3)) == (3, None)
    monkeypatch.setattr(identity, "_running", lambda: None)
    assert threads_used("onnxruntime-cpu", 0) == identity.available_cores()


def test_startup_measures_fresh_processes(toy_plan: Path, tmp_path: Path, output: Any, report: Any) -> None:
    found = report(bench.main, "startup", toy_plan, "--reps", 2)
    assert set(found) == {"machine", "time", "plan", "identity", "threads", "reps", "figures"}
    assert set(found["figures"]) == {"import_ms", "load_ms", "first_token_ms", "process_ms"}
    for figure in found["figures"].values():
        assert 0 < figure["lowest"] <= figure["median"] <= figure["highest"]
    assert "is not a plan" in output(bench.main, "startup", tmp_path, status=2)
    assert "--reps is '0'; pass a whole number of at least 1; see " in output(
        bench.main, "startup", toy_plan, "--reps", "0", status=2
    )
