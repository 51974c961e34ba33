"""The benchmark finds its prompts as `verify` does, tells tasks apart, and refuses in sentences."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from rich.console import Console

from outrider import Runtime, Stats
from outrider.plans.errors import OutriderError, RequestError
from outrider.runtime.options.options import Options
from outrider.tools.bench import __main__ as bench
from outrider.tools.bench.columns import COLUMNS
from outrider.tools.bench.prompts import choose_prompts, cut_prompts
from outrider.tools.bench.rows import _along_context, summary
from outrider.tools.bench.runs import Mode, Run, divergences, first_tokens
from outrider.tools.bench.shapes import Variant
from outrider.tools.bench.tables import print_table
from tests.conftest import TOY_DRAFTERS

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def workplace(toy_recipe: Path, toy_plan: Path, tmp_path: Path) -> Path:
    return shutil.copytree(toy_recipe.parent, tmp_path / "work")


def test_prompts_are_those_of_the_recipe_wherever_they_lie(workplace: Path, tmp_path: Path) -> None:
    recipe = workplace / "model.yaml"
    text = recipe.read_text(encoding="utf-8")
    with pytest.raises(RequestError, match="names no held_out prompts; pass --prompts FILE"):
        choose_prompts(workplace / "plan", None)
    (tmp_path / "far").mkdir()
    (workplace / "held_out.jsonl").rename(tmp_path / "far" / "away.jsonl")
    recipe.write_text(f"held_out: {tmp_path / 'far' / 'away.jsonl'}\n{text}", encoding="utf-8")
    assert choose_prompts(workplace / "plan", None)[0].text == "import os\nimport sys\n"
    recipe.unlink()
    with pytest.raises(OutriderError, match="not there any more; pass --prompts FILE"):
        choose_prompts(workplace / "plan", None)
    assert len(choose_prompts(workplace / "plan", tmp_path / "far" / "away.jsonl")) == 2


@pytest.fixture
def latency(workplace: Path, capsys: Captured):
    """`python -m outrider.tools.bench latency` on the toy plan, a few tokens."""

    def run(*arguments: str) -> int:
        prompts = str(workplace / "held_out.jsonl")
        sizes = ("--count", "2", "--new", "12", "--reps", "1")
        return bench.main(["latency", str(workplace / "plan"), "--prompts", prompts, *sizes, *arguments])

    return run


ROW_KEYS = {
    "git_sha", "identity", "backend", "backend_version", "device", "threads", "weights", "dtype", "sampling", "reps",
    "task", "auto_disable", "form",
    "drafter", "kind", "tree", "nodes", "depth", "acceptance", "otherwise", "synthetic_accept", "prompts",
    "prompts_sha256", "prompt_tokens", "new_tokens",
    "build_seconds", "build_peak_rss_bytes", "plan_bytes", "load_ms", "peak_rss_bytes",
    "speedup", "speedup_p10", "speedup_p90", "decode_speedup", "decode_speedup_p10",
    "decode_speedup_p90", "tokens_per_verify",
    "acceptance_rate",
    "tokens_per_second", "tokens_per_second_p10", "tokens_per_second_p90", "baseline_tokens_per_second",
    "acceptance_by_depth", "drafted", "evaluated", "accepted", "rounds", "plain_rounds", "ttft_ms", "ttft_ms_p10",
    "ttft_ms_p90", "ttft_ms_p99", "itl_ms_p50", "itl_ms_p90", "itl_ms_p99", "samples",
    "tpot_ms_p50", "tpot_ms_p90", "tpot_ms_p99", "e2e_ms", "e2e_ms_p10", "e2e_ms_p90", "round_ms",
    "engine_ms", "host_gap_ms", "stages", "ms_along_context", "same_tokens", "same_runs", "runs", "first_divergence",
    "divergence_margin", "divergence_prompt", "divergence_prompt_tokens", "by_task",
}  # fmt: skip


def test_texts_of_a_form_end_where_it_does(latency, capsys: Captured) -> None:
    assert latency("--json", "--choice", "import", "--choice", "return") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["drafter"] for row in rows] == ["none", *TOY_DRAFTERS]
    for row in rows:
        assert row["form"].startswith("choice ")
        assert row["same_tokens"]
        assert row["new_tokens"] < 12
    assert latency("--choice", "import", "--synthetic-accept", "2") == 2
    assert "--synthetic-accept accepts what no form allows" in capsys.readouterr().err


def test_latency_prints_stable_keys(latency, capsys: Captured) -> None:
    assert latency("--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"machine", "time", "plan", "other_programs", "rows"}
    assert 0 <= found["other_programs"] < 1
    assert datetime.fromisoformat(found["time"]).tzinfo is not None
    assert set(found["machine"]) == {"processor", "cores", "python", "onnxruntime"}
    rows = {row["drafter"]: row for row in found["rows"]}
    assert list(rows) == ["none", *TOY_DRAFTERS]
    assert rows["none"]["kind"] is rows["none"]["acceptance"] is rows["none"]["acceptance_rate"] is None
    assert rows["ngram"]["acceptance"] == rows["head"]["acceptance"] == "coupled"
    assert [rows["bushy"][key] for key in ("kind", "tree", "nodes", "depth")] == ["model", "3/2/9", 9, 3]
    assert [rows["ngram"][key] for key in ("kind", "tree", "nodes", "depth")] == ["ngram", None, 7, 6]
    assert [rows["sure"][key] for key in ("kind", "tree", "nodes", "depth")] == ["model", None, 7, 6]
    assert [rows["none"][key] for key in ("kind", "tree", "nodes", "depth")] == [None, None, 1, 0]
    for row in rows.values():
        assert set(row) == ROW_KEYS
        assert row["same_tokens"]
        assert row["same_runs"] == row["runs"] == 2
        for figure in ("speedup", "decode_speedup", "tokens_per_second", "ttft_ms", "e2e_ms"):
            assert row[f"{figure}_p10"] <= row[figure] <= row[f"{figure}_p90"]
        assert row["tokens_per_verify"] == 24 / row["rounds"]
        assert row["round_ms"] == pytest.approx(row["engine_ms"] + row["host_gap_ms"])
        assert row["host_gap_ms"] > 0
        assert row["accepted"] <= row["drafted"]
        assert 0 < row["tpot_ms_p50"] <= row["tpot_ms_p90"] <= row["tpot_ms_p99"]
        assert row["itl_ms_p50"] <= row["itl_ms_p90"] <= row["itl_ms_p99"]
        assert (
            row["itl_ms_p99"] >= row["tpot_ms_p99"]
        )  # a round's tokens share its time, and a user waits for all of it
        assert row["ttft_ms"] < row["e2e_ms"]
        samples = row["samples"]
        assert row["ttft_ms_p99"] == max(samples["ttft_ms"])
        assert row["itl_ms_p99"] == max(map(max, samples["itl_ms"]))
        assert len(samples["e2e_ms"]) == len(samples["itl_ms"]) == row["runs"]
        assert row["first_divergence"] is row["divergence_margin"] is row["synthetic_accept"] is None
        assert (row["sampling"], row["reps"], row["prompts"], row["new_tokens"]) == ("greedy", 1, 2, 12)
        assert row["threads"] >= 1
        assert (row["task"], row["prompts_sha256"]) == (None, rows["none"]["prompts_sha256"])
        assert row["device"] == found["machine"]["processor"]
        assert row["build_seconds"] > 0
        assert row["peak_rss_bytes"] > row["plan_bytes"]
        along = row["ms_along_context"]
        assert [at["tokens"] for at in along] == sorted(at["tokens"] for at in along)
        assert all(at["ms"] > 0 for at in along)
        assert row["baseline_tokens_per_second"] == rows["none"]["tokens_per_second"]
        assert row["acceptance_by_depth"] == sorted(row["acceptance_by_depth"], reverse=True)
    assert rows["none"]["speedup"] == rows["none"]["tokens_per_verify"] == 1
    assert rows["bushy"]["acceptance_rate"] == rows["bushy"]["accepted"] / rows["bushy"]["drafted"]


def test_latency_lists_the_stages_that_ran(latency, capsys: Captured) -> None:
    assert latency("--drafters", "head,chain", "--keep-drafting", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    plain, head, chain = (row["stages"] for row in found["rows"])
    assert set(plain) == {"BimMask", "target", "Sample"}
    assert {"BimMask", "head", "target", "TreeAccept", "KvGather"} <= set(head)
    assert not {"chain", "bushy", "ngram"} & set(head)
    assert "head" not in chain
    assert all(ms > 0 for row in found["rows"] for ms in row["stages"].values())
    for row in found["rows"]:
        assert sum(row["stages"].values()) < row["round_ms"]


@pytest.mark.parametrize("columns", ["80", "100"])
def test_latency_shows_every_figure_whole(latency, capsys: Captured, columns: str) -> None:
    assert latency("--json") == 0
    screen = io.StringIO()
    print_table(json.loads(capsys.readouterr().out), Console(file=screen, width=int(columns)), stages=True)
    text = screen.getvalue()
    assert all(len(line) <= int(columns) for line in text.splitlines())
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    figures, stages = text.split("milliseconds a round, by stage")
    for part in (
        "speedup",
        "gap",
        "p50/p99",
        "2 prompts x 1 runs, 12 new tokens, sampling greedy",
        "a p99 takes 100",
    ):
        assert part in " ".join(figures.split())
    assert len(re.findall(r"[\d.]+x +[\d.]+ +[\d.]+/[\d.]+ +[\d.]+/[\d.]+ +yes", figures)) == 1 + len(TOY_DRAFTERS)
    assert {"round", "host gap", "target", "Sample", "TreeAccept"} <= {
        line[:12].rstrip() for line in stages.splitlines()
    }
    assert latency("--drafters", "ngram") == 0
    assert "by stage" not in capsys.readouterr().out


def test_latency_as_csv_has_every_figure_of_every_row(latency, capsys: Captured) -> None:
    assert latency("--drafters", "ngram,head", "--csv", "--sampling", "temperature=0.5,seed=3") == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["drafter"] for row in rows] == ["none", "ngram", "head"]
    assert list(rows[0]) == list(COLUMNS)
    stages = [dict(stage.split(":") for stage in row["stages"].split()) for row in rows]
    assert "head" not in stages[0]
    assert float(stages[2]["head"]) > 0
    assert rows[1]["sampling"] == "temperature=0.5,seed=3"
    assert len(rows[1]["ms_along_context"].split()) > 1


def test_latency_as_markdown_is_one_table(latency, capsys: Captured) -> None:
    assert latency("--drafters", "ngram", "--markdown") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(lines) == 4
    assert len({line.count("|") for line in lines}) == 1
    assert lines[2].startswith("| none | ")


def test_prompts_of_one_length_are_made_of_those_there_are(latency, capsys: Captured) -> None:
    assert latency("--prompt-len", "50", "--drafters", "none", "--json") == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["prompt_tokens"] == 50
    assert cut_prompts([[1, 2, 3], [4, 5]], 4, 9) == [[5, 1, 2, 3], [2, 3, 4, 5]]
    assert cut_prompts([[1, 2, 3], [4, 5]], 2, 9) == [[2, 3], [4, 5]]
    with pytest.raises(RequestError, match="--prompt-len is 10; pass 1 to 9"):
        cut_prompts([[1]], 10, 9)


def with_tasks(workplace: Path) -> Path:
    """Two prompts of one task, then one of another, then one of none."""
    rows = [{"task": "short", "prompt": "import os\n"}, {"task": "short", "prompt": "import sys\n"}]
    rows += [{"task": "long", "prompt": "def main() -> None:\n" * 3}, {"prompt": "x = 1\n"}]
    path = workplace / "tasks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_prompts_of_all_tasks_come_in_turn_or_those_of_one(workplace: Path) -> None:
    path = with_tasks(workplace)
    assert [p.task for p in choose_prompts(workplace / "plan", path)] == ["short", "long", None, "short"]
    assert [p.text for p in choose_prompts(workplace / "plan", path, "short")] == ["import os\n", "import sys\n"]
    with pytest.raises(RequestError, match=r"--task is 'chat', but .*tasks\.jsonl has the tasks long, short; pass"):
        choose_prompts(workplace / "plan", path, "chat")
    with pytest.raises(RequestError, match=r"held_out\.jsonl names no tasks; leave it out"):
        choose_prompts(workplace / "plan", workplace / "held_out.jsonl", "chat")


def test_latency_tells_tasks_apart(workplace: Path, capsys: Captured) -> None:
    prompts = ("--prompts", str(with_tasks(workplace)), "--drafters", "ngram", "--new", "12", "--reps", "2")
    assert bench.main(["latency", str(workplace / "plan"), *prompts, "--json"]) == 0
    plain, ngram = json.loads(capsys.readouterr().out)["rows"]
    assert {task: figures["runs"] for task, figures in ngram["by_task"].items()} == {"short": 4, "long": 2}
    assert plain["by_task"]["long"]["speedup"] == plain["by_task"]["long"]["tokens_per_verify"] == 1
    assert ngram["by_task"]["short"]["prompt_tokens"] < ngram["by_task"]["long"]["prompt_tokens"]
    assert bench.main(["latency", str(workplace / "plan"), *prompts]) == 0
    _, table = capsys.readouterr().out.split("speedup (tokens per verify), by task")
    words = [line.split()[0] for line in table.splitlines() if line]
    assert words.index("none") == words.index("ngram") - 1
    assert bench.main(["latency", str(workplace / "plan"), *prompts, "--csv", "--task", "long"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(row["drafter"], row["task"], row["runs"]) for row in rows] == [
        ("none", "long", "2"),
        ("ngram", "long", "2"),
    ]


def test_tokens_that_part_are_shown_with_place_and_margin(toy: Runtime) -> None:
    ids, options = [5, 6, 7], Options(max_new_tokens=6, ignore_eos=True)
    session = toy.session()
    plain = session.generate(ids, drafter="none", **options)
    wrong = replace(plain, token_ids=[*plain.token_ids[:2], 1 + plain.token_ids[2] % 299, *plain.token_ids[3:]])
    runs = [Run(g, 1.0, Stats(), (1.0, 3.0, 2.0)) for g in (plain, wrong)]
    found = divergences(session, [ids], options, first_tokens(runs[:1]), runs[1:])
    assert (found[0].prompt, found[0].prompt_tokens, found[0].index) == (0, 3, 2)
    assert found[0].margin > 0
    row = summary(Mode(Variant("wrong", "wrong", "ngram", None, 7, 6), runs[1:], found), runs[:1])
    assert (row["first_divergence"], row["divergence_margin"]) == (2, found[0].margin)
    assert (row["divergence_prompt"], row["divergence_prompt_tokens"]) == (0, 3)
    assert (row["same_tokens"], row["tpot_ms_p50"], row["tpot_ms_p99"]) == (False, 2.0, 3.0)


def test_times_along_the_context_are_medians_of_equal_stretches(toy: Runtime) -> None:
    plain = toy.session().generate([5, 6, 7], drafter="none", max_new_tokens=4, ignore_eos=True)
    run = Run(plain, 1.0, Stats(), tuple(float(ms) for ms in range(64)))
    assert plain.stats.prompt_tokens + plain.stats.first_span == 4  # where the first token stands that has a time
    along = _along_context([run, replace(run, gaps_ms=(100.0,))])
    assert [at["tokens"] for at in along] == [4 * stretch + 2 for stretch in range(1, 17)]
    assert [at["ms"] for at in along] == [2.0, *(4 * stretch + 1.5 for stretch in range(1, 16))]
    assert _along_context([replace(run, gaps_ms=())]) == []


def test_a_generation_too_short_to_time_its_rounds_is_no_error(workplace: Path, capsys: Captured) -> None:
    prompts = str(workplace / "held_out.jsonl")
    arguments = ["latency", str(workplace / "plan"), "--prompts", prompts, "--new", "1", "--count", "1", "--json"]
    assert bench.main([*arguments, "--drafters", "none"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["stages"], row["rounds"], row["new_tokens"]) == ({}, 3, 1)
    missing = ("round_ms", "engine_ms", "host_gap_ms", "tpot_ms_p50", "tpot_ms_p99", "tokens_per_second")
    missing += ("decode_speedup", "decode_speedup_p10", "baseline_tokens_per_second", "acceptance_rate")
    assert [row[name] for name in missing] == [None] * len(missing)
    assert bench.main([*arguments[:-1], "--drafters", "ngram"]) == 0
    text = capsys.readouterr().out
    cells = next(line.split() for line in text.splitlines() if line.startswith("ngram"))
    assert (cells[3], cells[-2:]) == ("-", ["-", "yes"])  # the rate, and what a user waits between two pieces
    assert bench.main([*arguments[:-1], "--drafters", "none", "--csv"]) == 0
    (line,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert [line[name] for name in missing] == [""] * len(missing)


def test_startup_measures_fresh_processes(toy_plan: Path, capsys: Captured) -> None:
    assert bench.main(["startup", str(toy_plan), "--reps", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"machine", "time", "plan", "identity", "threads", "reps", "figures"}
    assert set(found["figures"]) == {"import_ms", "load_ms", "first_token_ms", "process_ms"}
    for figure in found["figures"].values():
        assert 0 < figure["lowest"] <= figure["median"] <= figure["highest"]
    parts = sum(found["figures"][name]["lowest"] for name in ("import_ms", "load_ms", "first_token_ms"))
    assert parts < found["figures"]["process_ms"]["highest"]


def test_startup_refuses_what_the_runtime_refuses(toy_plan: Path, tmp_path: Path, capsys: Captured) -> None:
    assert bench.main(["startup", str(tmp_path)]) == 2
    assert "is not a plan" in capsys.readouterr().err
    assert bench.main(["startup", str(toy_plan), "--threads", "-1"]) == 2
    assert "--threads is '-1'" in capsys.readouterr().err
    assert bench.main(["startup", str(toy_plan), "--reps", "0"]) == 2
    assert "--reps is '0'; pass a whole number of at least 1; see " in " ".join(capsys.readouterr().err.split())
