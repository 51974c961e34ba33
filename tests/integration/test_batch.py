"""Offline batches in one process: what goes in, what comes out, and that a run that was ended continues."""

from __future__ import annotations

import json
import re
import resource
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from outrider import Runtime
from outrider.plans.chat_template import ChatTemplate
from outrider.plans.errors import PlanError, RequestError
from outrider.runtime.__main__ import main
from outrider.runtime.batch import OutriderPredictor
from outrider.runtime.batch import answering as answering_module
from outrider.runtime.batch.answering import Answering
from outrider.runtime.batch.body import asked_of
from outrider.runtime.batch.folder import block_bounds
from outrider.runtime.batch.loading import load_for_batches
from outrider.runtime.batch.predictor import _request, _rows
from outrider.runtime.batch.reading import read_requests, rows_of_table
from outrider.runtime.batch.requests import BatchRequest, id_order, parse, working_order
from outrider.runtime.files import locked
from outrider.runtime.server.generation_request import CompletionRequest
from outrider.runtime.server.stamps import DerivedStamps
from outrider.runtime.step_loop import StepLoop
from tests.conftest import call_before
from tests.integration.batches import line, mixed, read, run, write
from tests.integration.test_tools import ASK, HERMES, TOOLS

Patch = pytest.MonkeyPatch
Captured = pytest.CaptureFixture[str]
COMMAND = [sys.executable, "-m", "outrider.runtime", "batch"]


@pytest.fixture(scope="module")
def requests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("batch") / "requests.jsonl", mixed(40))


@pytest.fixture(scope="module")
def results(branch_plan: Path, requests: Path) -> bytes:
    return run(branch_plan, requests, requests.parent / "results")


@pytest.fixture(scope="module")
def answering(branch_plan: Path) -> Answering:
    return Answering(load_for_batches(branch_plan, threads=1, share_memory=False), None, 0)


def answer(answering: Answering, *lines: dict[str, Any]) -> list[dict[str, Any]]:
    asked = [BatchRequest(each["custom_id"], json.dumps(each)) for each in lines]
    return [each.result for each in sorted(answering.answer(asked), key=lambda each: each.number)]


def refusals(capsys: Captured, *arguments: object) -> str:
    assert main(["batch", *map(str, arguments)]) == 2
    return " ".join(capsys.readouterr().err.split())


def table_of(rows: Sequence[dict[str, Any]]) -> pa.Table:
    """A table with a column for every key of any row."""
    names = dict.fromkeys(key for row in rows for key in row)
    return pa.table({name: [row.get(name) for row in rows] for name in names})


def test_results_are_those_of_plain_decoding_alone(requests: Path, results: bytes, branch_plan: Path) -> None:
    alone = Runtime.load(branch_plan, threads=1)
    asked = {each["custom_id"]: each for each in map(json.loads, requests.read_text().splitlines())}
    found = read(results)
    assert [each["custom_id"] for each in found] == [f"request-{number}" for number in range(1, 41)]
    for each in found:
        body, response = asked[each["custom_id"]]["body"], each["response"]
        chat = "messages" in body
        prompt = {"messages": body["messages"]} if chat else {"prompt": body["prompt"]}
        seed = body.get("seed", DerivedStamps(each["custom_id"], 0).seed)
        for place, choice in enumerate(response["body"]["choices"]):
            expected = alone.generate(
                **prompt, max_new_tokens=body["max_tokens"], temperature=body["temperature"], seed=seed,
                stream_id=place, drafter="none",
            )  # fmt: skip
            assert (choice["message"]["content"] if chat else choice["text"]) == expected.text
            assert choice["finish_reason"] == expected.finish_reason.value
        assert len(response["body"]["choices"]) == body.get("n", 1)
        assert (response["status_code"], response["body"]["created"], each["error"]) == (200, 0, None)
        assert response["body"]["usage"].keys() == {"prompt_tokens", "completion_tokens", "total_tokens"}
    responses = [each["response"] for each in found]
    ids = [each["id"] for each in [*found, *(each["body"] for each in responses)]]
    assert len({*ids, *(each["request_id"] for each in responses)}) == 120


def test_results_do_not_depend_on_company_blocks_cache_and_order(
    branch_plan: Path, requests: Path, results: bytes, tmp_path: Path
) -> None:
    turned, lines = tmp_path / "turned.jsonl", requests.read_text().splitlines(keepends=True)
    turned.write_text("".join(reversed(lines)).rstrip("\n") + "\n\n", encoding="utf-8-sig")
    assert run(branch_plan, turned, tmp_path / "turned", "--max-running", "1") == results
    options = ("--max-running", "5", "--no-prefix-cache", "--block-size", "3")
    assert run(branch_plan, requests, tmp_path / "out", *options) == results


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")
def test_a_run_that_is_killed_continues_and_gives_the_same_bytes(branch_plan: Path, tmp_path: Path) -> None:
    lines = write(tmp_path / "requests.jsonl", mixed(160))
    expected = run(branch_plan, lines, tmp_path / "whole", "--block-size", "8")
    out = tmp_path / "out"
    command = [*COMMAND, str(branch_plan), str(lines), "--out", str(out), "--threads", "1"]
    command += ["--block-size", "8", "--max-running", "1", "--json"]
    kept: dict[Path, int] = {}
    for least in (2, 6):
        killed = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        until = time.monotonic() + 60
        while len(parts := list((out / "parts").glob("*.jsonl"))) < least:
            assert time.monotonic() < until
            assert killed.poll() is None
            time.sleep(0.002)
        killed.kill()
        killed.wait()
        assert not (out / "results.jsonl").exists()
        assert {part: part.stat().st_mtime_ns for part in kept} == kept  # what was written is not computed again
        kept = {part: part.stat().st_mtime_ns for part in parts}
    report, again = (json.loads(subprocess.check_output(command, timeout=120)) for _ in range(2))
    assert report["succeeded"] == 160
    assert 0 < report["computed"] < 160 - 6 * 4
    assert (out / "results.jsonl").read_bytes() == expected
    assert sorted(each.name for each in out.iterdir()) == ["batch.json", "lock", "results.jsonl"]
    counts = ("succeeded", "failed", "prompt_tokens", "completion_tokens")
    assert [again[name] for name in counts] == [report[name] for name in counts]
    assert again["computed"] == again["new_tokens"] == 0


@pytest.mark.skipif(sys.platform == "win32", reason="no limit of files' sizes")
def test_a_disk_that_is_full_ends_the_run_and_loses_nothing(
    branch_plan: Path, requests: Path, results: bytes, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    command = [*COMMAND, str(branch_plan), str(requests), "--out", str(out), "--threads", "1", "--block-size", "4"]
    assert max(len(part) for part in results.splitlines()) * 4 < 8192 < len(results)

    def small() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))  # parts are smaller, and all results are not

    ended = subprocess.run(command, preexec_fn=small, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert re.search("File too large.*run the same command again", " ".join(ended.stderr.split()))
    assert len(list((out / "parts").glob("*.jsonl"))) == len(block_bounds(40, 4))
    assert not (out / "results.jsonl").exists()
    assert run(branch_plan, requests, out) == results


def test_an_interrupted_run_says_how_to_continue(
    branch_plan: Path, requests: Path, tmp_path: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    monkeypatch.setattr("outrider.runtime.batch.run._work", Mock(side_effect=KeyboardInterrupt))
    assert main(["batch", str(branch_plan), str(requests), "--out", str(tmp_path / "out")]) == 130
    assert "run the same command again" in " ".join(capsys.readouterr().err.split())


def test_faults_that_no_result_could_hold_are_found_before_anything_runs(
    toy_plan: Path, tmp_path: Path, capsys: Captured
) -> None:
    good = json.dumps(line("a", {"prompt": "x"}))
    path, out = tmp_path / "requests.jsonl", tmp_path / "out"
    faulty = [good, good, '{"custom_id": "b"', "[1]", '{"body": {}}', '{"custom_id": 7}', '{"custom_id": "\\ud800"}']
    path.write_text("\n".join(faulty) + "\n{NaN}\n", encoding="utf-8")
    assert re.search(
        "line 2 has the custom_id 'a' of line 1.* line 3 is no JSON.* line 4 is no object.* line 5 has no custom_id.* "
        "line 6 has a custom_id that is no text.* and 2 more",
        refusals(capsys, toy_plan, path, "--out", out),
    )
    assert not out.exists()
    path.write_bytes(b'{"custom_id": "\xff"}')
    assert "line 1 is no JSON" in refusals(capsys, toy_plan, path, "--out", out)
    assert "line 1 is longer than 67,108,864 bytes" in refusals(capsys, toy_plan, Path("/dev/zero"), "--out", out)
    path.write_text("\n \n")
    assert "has no request" in refusals(capsys, toy_plan, path, "--out", out)
    assert "cannot be read" in refusals(capsys, toy_plan, tmp_path / "none", "--out", out)


def test_requests_that_are_wrong_get_results_that_say_why(answering: Answering) -> None:
    def with_(**own: Any) -> dict[str, Any]:
        return line("a", {"prompt": "x", "max_tokens": 2}) | own

    wrong = [
        (with_(method="GET"), "method"),
        (with_(url="/v1/embeddings"), "/v1/chat/completions"),
        (with_(more=1), "more is no key"),
        ({"custom_id": "a"}, "body is missing"),
        (with_(body=3), "The body is 3"),
        (line("a", {"prompt": "x", "model": "gpt"}), "There is no model 'gpt'"),
        (line("a", {"prompt": "x", "stream": True}), "a batch has no streams"),
        (line("a", {"prompt": "x", "deadline": 3.0}), "deadline"),
        (line("a", {"prompt": "x", "logit_bias": {"5": 10**400}}), "logit_bias[5] is 1000"),
        ({"custom_id": "a", "prompt": "x", "messages": []}, "both given"),
    ]
    *found, last = answer(answering, *(each for each, _ in wrong), line("a", {"prompt": "x", "max_tokens": 2}))
    for (_, substance), result in zip(wrong, found, strict=True):
        error = result["response"]["body"]["error"]
        assert result["response"]["status_code"] == (404 if error["code"] == "model_not_found" else 400)
        assert substance in error["message"]
        assert result["error"] is None
    assert last["response"]["status_code"] == 200


def test_a_fault_that_nobody_foresaw_costs_its_request_alone(answering: Answering, monkeypatch: Patch) -> None:
    asked_of = answering_module.asked_of

    def failing(text: str, model: str) -> Any:
        return {}["no"] if "boom" in text else asked_of(text, model)

    monkeypatch.setattr(answering_module, "asked_of", failing)
    good = [line(each, {"prompt": "x", "max_tokens": 2}) for each in "ac"]
    found = answer(answering, good[0], line("b", {"prompt": "boom"}), good[1])
    assert [each["response"]["status_code"] for each in found] == [200, 500, 200]
    assert "KeyError" in found[1]["response"]["body"]["error"]["message"]


def test_a_request_at_which_the_runtime_fails_costs_no_other(answering: Answering, monkeypatch: Patch) -> None:
    """Requests that shared its pass are repeated and answered. If all requests fail, the run ends."""
    failing = answering.runtime.tokenizer.encode("zzz")[0]

    def fail(_: StepLoop, sequences: Any, *given: Any) -> None:
        if any(each.tokens[0] == failing for each in sequences):
            raise RuntimeError("the test says so")

    call_before(monkeypatch, StepLoop, "step", fail)
    lines = [line(each, {"prompt": "zzz" if each == "b" else "x", "max_tokens": 8}) for each in "abcd"]
    found = answer(answering, *lines)
    assert [each["response"]["status_code"] for each in found] == [200, 500, 200, 200]
    assert "the test says so" in found[1]["response"]["body"]["error"]["message"]
    assert answer(answering, lines[0])[0]["response"]["body"] == found[0]["response"]["body"]
    assert answer(answering, lines[1])[0]["response"] == found[1]["response"]
    monkeypatch.setattr(StepLoop, "step", Mock(side_effect=RuntimeError("the test says so")))
    with pytest.raises(PlanError, match=r"The request 'b' cannot be answered: .*the test says so"):
        answer(answering, lines[1])


def test_the_largest_requests_of_two_blocks_at_once_find_room(answering: Answering) -> None:
    small = [{"prompt": "x", "max_tokens": 100 if number else 1, "ignore_eos": True} for number in range(31)]
    bodies = [*small, {"prompt": ["x"] * 1024, "max_tokens": 1}]
    asked = [BatchRequest(f"a-{number}", json.dumps(line("a", body))) for number, body in enumerate(bodies)]
    answers = [answering.answer(asked) for _ in range(2)]
    try:
        assert [next(each).result["response"]["status_code"] for each in answers] == [200, 200]
    finally:
        for each in answers:
            each.close()


def test_drafters_by_rejection_are_refused_and_not_chosen(everything_plan: Path) -> None:
    answering = Answering(load_for_batches(everything_plan, threads=1, share_memory=False), None, 0)
    refused, lossy, good = answer(
        answering,
        line("a", {"prompt": "x", "drafter": "classical"}),
        line("b", {"prompt": "x", "partial_kv": "lossy"}),
        line("c", {"prompt": "x", "max_tokens": 2}),
    )
    assert "accepted by rejection" in refused["response"]["body"]["error"]["message"]
    assert "lossy" in lossy["response"]["body"]["error"]["message"]
    assert good["response"]["status_code"] == 200


def test_ids_of_tool_calls_are_derived_and_differ(answering: Answering, monkeypatch: Patch) -> None:
    template = ChatTemplate(HERMES, source="the test's")
    monkeypatch.setattr(answering.runtime.tokenizer, "_chat_template", template)
    body = {"messages": ASK, "tools": TOOLS, "tool_choice": "required", "max_tokens": 100, "n": 2}
    asked = [line(each, body, "/v1/chat/completions") for each in ("a", "b")]
    found = answer(answering, *asked)
    assert answer(answering, *asked) == found
    choices = [choice for each in found for choice in each["response"]["body"]["choices"]]
    calls = [call["id"] for choice in choices for call in choice["message"]["tool_calls"]]
    assert len(calls) >= 4
    assert len(set(calls)) == len(calls)


def test_a_folder_with_other_results_is_refused(
    branch_plan: Path, toy_plan: Path, requests: Path, tmp_path: Path, capsys: Captured, monkeypatch: Patch
) -> None:
    out, other = tmp_path / "out", write(tmp_path / "other.jsonl", mixed(3, seed=1))
    few = write(tmp_path / "few.jsonl", mixed(3))
    run(branch_plan, few, out)
    for plan, lines, options, said in (
        (branch_plan, other, (), "the requests are others"),
        (toy_plan, few, (), "they are of the plan"),
        (branch_plan, few, ("--model-name", "m"), "they name the model 'toy'"),
    ):
        assert said in refusals(capsys, plan, lines, "--out", out, *options)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    assert "SOURCE_DATE_EPOCH" in refusals(capsys, branch_plan, few, "--out", out)
    found = read(run(branch_plan, few, tmp_path / "dated"))
    assert {each["response"]["body"]["created"] for each in found} == {1700000000}
    assert "holds no batch" in refusals(capsys, branch_plan, other, "--out", requests.parent)


def test_settings_that_cannot_be_served_end_the_run(
    branch_plan: Path, requests: Path, tmp_path: Path, capsys: Captured
) -> None:
    command = [branch_plan, requests, "--out", tmp_path / "out"]
    assert "max_running is 17; the plan serves at most 16" in refusals(capsys, *command, "--max-running", "17")
    assert not (tmp_path / "out" / "results.jsonl").exists()
    assert "add --ray ADDRESS" in refusals(capsys, *command, "--actors", "2")
    with locked(tmp_path / "out" / "lock"):
        assert "Another run writes" in refusals(capsys, *command)


def test_a_plan_that_was_replaced_meanwhile_is_refused(
    branch_plan: Path, toy_plan: Path, requests: Path, tmp_path: Path, capsys: Captured, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(
        "outrider.runtime.batch.run.load_for_batches", lambda _, **options: load_for_batches(toy_plan, **options)
    )
    assert "is another plan on" in refusals(capsys, branch_plan, requests, "--out", tmp_path / "out", "--quiet")
    assert not list((tmp_path / "out" / "parts").iterdir())


def test_parts_that_were_changed_are_refused(branch_plan: Path, tmp_path: Path, capsys: Captured) -> None:
    lines, out = write(tmp_path / "requests.jsonl", mixed(6)), tmp_path / "out"
    expected = run(branch_plan, lines, out)
    (out / "results.jsonl").write_bytes(expected[: len(expected) // 2])
    assert "delete it" in refusals(capsys, branch_plan, lines, "--out", out)
    (out / "results.jsonl").unlink()
    (out / "parts" / "000000.jsonl").write_bytes(expected.splitlines(keepends=True)[-1] * 2)
    assert "000000.jsonl does not have the results" in refusals(capsys, branch_plan, lines, "--out", out)
    (out / "parts" / "000000.jsonl").unlink()
    assert run(branch_plan, lines, out) == expected


@pytest.mark.parametrize("form", ["lines, their bodies as text", "lines", "fields"])
def test_parquet_gives_the_results_of_lines(
    form: str, branch_plan: Path, requests: Path, results: bytes, tmp_path: Path
) -> None:
    rows = [json.loads(each) for each in requests.read_text().splitlines()]
    if form == "fields":
        rows = [{"custom_id": row["custom_id"], **row["body"]} for row in rows]
    elif form != "lines":
        rows = [row | {"body": json.dumps(row["body"])} for row in rows]
    path = tmp_path / "requests.parquet"
    pq.write_table(table_of(rows), path)
    assert run(branch_plan, path, tmp_path / "out") == results


def test_columns_that_no_request_has_are_refused(toy_plan: Path, tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "requests.parquet"
    for columns, substance in (
        ({"custom_id": ["a"], "prompt": ["x"], "promt_id": ["y"]}, "'promt_id'"),
        ({"custom_id": ["a"], "body": ["{}"], "seed": [1]}, "'seed' beside body"),
        ({"custom_id": ["a"], "seed": [1]}, "none of the columns body, prompt and messages"),
        ({"custom_id": ["a", "a"], "prompt": ["x", "y"]}, "row 2 has the custom_id 'a' of row 1"),
        ({"custom_id": ["a"], "prompt": [b"x"]}, "row 1 is no JSON (Object of type bytes"),
    ):
        pq.write_table(pa.table(columns), path)
        assert substance in refusals(capsys, toy_plan, path, "--out", tmp_path / "out")
    path.write_text("{}")
    assert "is no parquet" in refusals(capsys, toy_plan, path, "--out", tmp_path / "out")


def test_the_predictor_answers_arrays_and_tables(branch_plan: Path, requests: Path, results: bytes) -> None:
    predictor = OutriderPredictor(branch_plan, threads=1, keep=["origin"])
    rows = [json.loads(each) for each in requests.read_text().splitlines()]
    of_id = {each["custom_id"]: each for each in read(results)}
    table = table_of([{"custom_id": row["custom_id"], "origin": "o", **row["body"]} for row in rows])
    found = predictor(table)
    assert found.column("custom_id").to_pylist() == [row["custom_id"] for row in rows]
    assert [*map(json.loads, found.column("result").to_pylist())] == [of_id[row["custom_id"]] for row in rows]
    batch = {name: np.array(column, object) for name, column in table.to_pydict().items()}
    batch["seed"] = np.array([np.nan if each is None else each for each in batch["seed"]])  # as pandas would have it
    arrays = predictor(batch)
    assert list(arrays["result"]) == found.column("result").to_pylist()
    assert arrays["status_code"].dtype == np.int64
    assert list(arrays["origin"]) == ["o"] * len(rows)
    assert list(predictor(arrays)["text"]) == list(arrays["text"])  # its own columns are no fields


def test_the_predictor_names_requests_without_ids_and_refuses_columns(branch_plan: Path) -> None:
    predictor = OutriderPredictor(branch_plan, threads=1)
    asked = {"prompt": np.array(["import os", "x", ""]), "max_tokens": np.array([9, 9, 9])}
    found = predictor(asked)
    turned = predictor({name: column[::-1] for name, column in asked.items()})
    assert list(found["text"]) == list(turned["text"][::-1])
    assert list(found["custom_id"]) == list(turned["custom_id"][::-1])
    assert list(found["status_code"]) == [200, 200, 400]
    assert "prompt is empty" in found["error"][2]
    assert found["text"][2] == found["finish_reason"][2] == ""
    columns = {"prompt": ["x"], "text": ["mine"]}
    for batch in (pa.table(columns), {name: np.array(column) for name, column in columns.items()}):
        with pytest.raises(RequestError, match="a column 'text', which no request has"):
            predictor(batch)
    with pytest.raises(RequestError, match="Row 1 of the batch is no JSON"):
        predictor({"prompt": np.array(["x", "x"]), "temperature": np.array([1.0, np.inf])})
    with pytest.raises(RequestError, match="does not see"):
        OutriderPredictor("no/where")
    with pytest.raises(RequestError, match="keep has 'text', a column that answers are written to"):
        OutriderPredictor(branch_plan, keep=["origin", "text"])


@pytest.mark.parametrize("beside", [0.5, np.nan])
def test_a_row_of_the_predictor_does_not_depend_on_others(beside: float) -> None:
    columns = {"prompt": np.array(["a", "b"], object), "temperature": np.array([1.0, beside])}
    alone = _request(_rows({name: column[:1] for name, column in columns.items()})[0], 0)
    assert _request(_rows(columns)[0], 0) == _request(rows_of_table(pa.table(columns))[0], 0) == alone


def test_batches_need_no_extra(branch_plan: Path, requests: Path, tmp_path: Path) -> None:
    program = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("fastapi", "starlette", "prometheus_client", "uvicorn", "ray", "pyarrow"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
from outrider.runtime.__main__ import main
sys.exit(main(sys.argv[1:]))
"""
    command = [sys.executable, "-c", program, "batch", str(branch_plan), "--out", str(tmp_path / "out")]
    subprocess.run([*command, str(requests)], check=True, capture_output=True, timeout=120)
    for arguments, who in ((["x.parquet"], "parquet"), ([str(requests), "--ray", "auto"], "cluster")):
        ended = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=120)
        assert ended.returncode == 2
        assert re.search(rf"{who}.*\[ray\]", " ".join(ended.stderr.split()))


def test_the_orders_of_results_and_of_work() -> None:
    ids = ["b", "a-10-x", "a-2-y", "a-2", "a-02", "10", "9", "a", "a-" + "9" * 5000]
    assert sorted(ids, key=id_order) == ["9", "10", "a", "a-02", "a-2", "a-2-y", "a-10-x", "a-" + "9" * 5000, "b"]
    assert sorted(["job1", "job", "job-1", "job10", "job2"], key=id_order) == ["job", "job1", "job2", "job10", "job-1"]
    asked = [BatchRequest(str(n), json.dumps(line(str(n), {"prompt": f"{n % 2} and {n}"}))) for n in range(9, 0, -1)]
    assert [each.custom_id for each in working_order(asked)] == ["2", "4", "6", "8", "1", "3", "5", "7", "9"]


def test_missing_and_whole_floats_of_a_table_are_left_out_and_ints(tmp_path: Path) -> None:
    path, nan = tmp_path / "requests.parquet", float("nan")
    floats = {"max_tokens": [2.0, None, 3.0], "temperature": [nan, 1.0, 0.5]}
    pq.write_table(pa.table({"custom_id": ["a", "b", "c"], "prompt": ["x"] * 3} | floats), path)
    asked = [asked_of(each.text, "toy") for each in working_order(read_requests(path))]
    assert [each.max_tokens for each in asked if isinstance(each, CompletionRequest)] == [2, 16, 3]
    assert [each.temperature for each in asked] == [1.0, 1.0, 0.5]


@pytest.mark.parametrize("calls", [0, 500])
def test_how_deep_json_may_be_does_not_depend_on_who_reads_it(calls: int) -> None:
    def calling(more: int, depth: int) -> Any:
        return calling(more - 1, depth) if more else parse("[" * depth + "]" * depth)

    assert calling(calls, 256)
    for depth in (257, 700, 990, 100_000):
        with pytest.raises(ValueError, match="nested too deeply: more than 256"):
            calling(calls, depth)
    assert parse(json.dumps([[]] * 1000)) == [[]] * 1000  # many, and not deep


def test_reading_keeps_texts_and_not_what_they_were_parsed_to(tmp_path: Path) -> None:
    lines = write(tmp_path / "requests.jsonl", ({"custom_id": str(n), "prompt": [7] * 1000} for n in range(500)))
    tracemalloc.start()
    try:
        kept = read_requests(lines)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(kept) == 500
    assert most < 2 * lines.stat().st_size
