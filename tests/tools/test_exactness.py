"""The table of divergences: there are none of ours, and those that are planted are found."""

from __future__ import annotations

import gc
import json
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from outrider import PrefixCacheConfig, Runtime
from outrider.plans.plan import open_plan
from outrider.plans.tokenizer import Tokenizer
from outrider.tools.exactness import __main__ as exactness
from outrider.tools.exactness import measure
from outrider.tools.exactness.conditions import (
    INSTRUCTION_SETS,
    REFERENCE,
    Condition,
    Process,
    processes,
    usable_drafters,
)
from outrider.tools.exactness.requests import Asked, plan_requests
from outrider.tools.exactness.server import Server
from outrider.tools.exactness.ways import outcome_of
from outrider.tools.exactness.worker import environment, run_job, run_process
from outrider.tools.parting import Logprob, Outcome, compare, divergence
from tests.conftest import HELD_OUT, REPOSITORY
from tests.inexact import make_target_inexact
from tests.integration.served import listening

PROMPTS = ("--prompts", str(HELD_OUT))
FAKE = Path(__file__).with_name("fake_server.py")


def report(capsys: pytest.CaptureFixture[str], status: int, *arguments: str) -> dict[str, Any]:
    assert exactness.main([*arguments, "--json"]) == status
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


# Our engine.


@pytest.mark.long
def test_our_engine_has_no_divergence(branch_plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, 0, str(branch_plan), "--quick", "--new", "12", "--length", "10", *PROMPTS)
    assert found["diverged"] == 0
    rows = {row["condition"]: row for row in found["rows"]}
    assert {row["requests"] for row in rows.values()} == {8}
    assert {row["group"] for row in rows.values()} == {
        "drafters", "draft options", "sessions", "branches", "company", "prefix cache", "interrupted", "restart",
        "partial KV", "threads", "instructions",
    }  # fmt: skip
    for drafter in found["drafters"]:
        assert rows[drafter]["witness"]["accepted"] > 0, drafter
    for name, row in rows.items():  # each was what it says
        witness = row["witness"]
        assert bool(witness["resumed"]) == (row["group"] == "interrupted"), name
        warm = "holds" in name or "loaded" in name or row["group"] in ("sessions", "branches")
        assert bool(witness["reused"]) == warm, name
        if row["group"] in ("company", "branches"):
            assert witness["tokens"] > 2 * witness["passes"], name


def test_every_condition_of_a_plan_without_branches_and_of_one_with_everything(
    toy: Runtime, everything: Runtime
) -> None:
    kept, left_out = usable_drafters(everything.manifest)
    assert [each.what for each in left_out] == [
        f"drafter {name}" for name in ("classical", "classical-egag", "classical-block", "classical-head")
    ]
    whole = [c for each in processes(everything.manifest, kept) for c in each.conditions]
    assert len({(c.group, c.name) for c in whole}) == len(whole)
    assert {c.mode for c in whole} == {None, "in-one-sequence", "batching"}
    assert {c.group for c in whole} >= {"partial KV", "branches", "company", "interrupted"}
    assert any(c.options.get("gamma_max") for c in whole)
    alone = [c for each in processes(toy.manifest, []) for c in each.conditions]
    assert {c.mode for c in alone} == {None}
    assert {c.drafter for c in alone} == {"none"}


@pytest.mark.long
def test_no_divergence_in_any_condition(everything_plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, 0, str(everything_plan), "--requests", "16", "--new", "40", *PROMPTS)
    assert found["diverged"] == 0
    assert "partial KV" in {row["group"] for row in found["rows"]}


def in_this_process(
    monkeypatch: pytest.MonkeyPatch, conditions: tuple[Condition, ...], planted: dict[str, dict[str, Any]] | None = None
) -> None:
    """Run these conditions alone, in this process; with options of their own where some are planted."""

    def run(job: dict[str, Any], isa: str | None, without: Sequence[str]) -> Iterator[dict[str, Any]]:
        for condition in job["conditions"]:
            more = (planted or {}).get(condition["name"], {})
            asked = [each | {"options": each["options"] | more} for each in job["asked"]]
            yield from run_job(job | {"asked": asked, "conditions": [condition]})

    monkeypatch.setattr(measure, "run_process", run)
    monkeypatch.setattr(measure, "processes", lambda *_, **__: [Process(conditions)])
    monkeypatch.setattr(gc, "collect", lambda: 0)  # a worker's has little to go over, this process's much


def test_another_seed_is_found_where_it_was_planted(
    branch_plan: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    conditions = (Condition("drafters", "ngram", "alone", "ngram"), Condition("company", "all", "company", "mixed"))
    in_this_process(monkeypatch, conditions, {"all": {"seed": 1}})
    measured, measure_once = list[dict[str, Any]](), exactness.measure

    def kept(options: Any) -> dict[str, Any]:  # what is printed in three ways is measured once
        measured.extend([] if measured else [measure_once(options)])
        return measured[0]

    monkeypatch.setattr(exactness, "measure", kept)
    arguments = (str(branch_plan), "--quick", "--new", "10", "--drafters", "ngram,head", *PROMPTS)
    ngram, company = report(capsys, 1, *arguments)["rows"]
    assert (ngram["diverged"], ngram["logprobs_diverged"], ngram["first"]) == (0, 0, None)
    assert 0 < company["diverged"] < 8  # greedy requests draw nothing
    first = company["first"]
    assert first["request"] == "prompt 0, temperature 0.7"
    assert first["what"] == "tokens"
    assert first["expected"] != first["found"]
    assert not [name for name in company["names"] if "greedy" in name or name.endswith("penalties")]
    assert exactness.main(list(arguments)) == 1
    printed = capsys.readouterr().out
    assert f"company, all: first with other tokens: {first['text']}" in printed
    assert "1 of 2 conditions diverge" in printed
    assert exactness.main([*arguments, "--groups"]) == 1
    assert re.search(rf"company +1 +8 +{company['diverged']} ", capsys.readouterr().out)


def test_an_engine_whose_rows_depend_on_each_other_is_found(
    branch_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real fault: one scale for all rows of a product."""
    plan = shutil.copytree(branch_plan, tmp_path / "plan")
    make_target_inexact(plan)
    conditions = (
        Condition("drafters", "none", "alone"),
        Condition("drafters", "chain", "alone", "chain"),
        Condition("company", "all", "company"),
    )
    in_this_process(monkeypatch, conditions)
    arguments = (str(plan), "--quick", "--new", "10", "--exactness", "unchecked", *PROMPTS)
    plain, drafted, company = report(capsys, 1, *arguments)["rows"]
    assert (plain["diverged"], plain["logprobs_diverged"]) == (0, 0)
    assert drafted["diverged"] + drafted["logprobs_diverged"] > 0
    assert company["diverged"] + company["logprobs_diverged"] > 0


def test_a_process_that_ends_is_a_divergence_and_missing_instructions_are_left_out(
    toy_plan: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    two = (Condition("threads", "one", "alone"), Condition("threads", "other", "alone"))

    def run(job: dict[str, Any], isa: str | None, without: Sequence[str]) -> Iterator[dict[str, Any]]:
        if job["conditions"] == [asdict(REFERENCE.conditions[0])]:
            yield from run_job(job)
        elif isa == "gone":
            yield from run_process(job | {"plan": "nowhere"}, None)
        elif isa == "died":
            yield from run_process({"conditions": job["conditions"]}, None)
        else:
            yield from run_process(job, isa)

    monkeypatch.setattr(measure, "run_process", run)
    lacking = "avx2" if platform.machine() in ("aarch64", "arm64") else "neon"
    todo = [Process(two, isa="gone"), Process(two, isa="died"), Process(two, isa=lacking)]
    monkeypatch.setattr(measure, "processes", lambda *_, **__: todo)
    found = report(capsys, 1, str(toy_plan), "--requests", "2", "--new", "4", *PROMPTS)
    assert [row["diverged"] for row in found["rows"]] == [2] * 4  # the second condition of each was never run
    for row in found["rows"][:2]:
        assert "nowhere" in row["first"]["found"]
    for row in found["rows"][2:]:
        assert "its process ended: KeyError: 'asked'" in row["first"]["found"]
    assert [each["what"] for each in found["left_out"]] == [f"OUTRIDER_ISA={lacking}"]


def test_every_sampling_meets_both_choices_of_logprobs_every_drafter_and_both_cuts(toy_plan: Path) -> None:
    tokenizer = Tokenizer.load(toy_plan / "tokenizer", open_plan(toy_plan).manifest.text.special_tokens)
    asked = plan_requests(["import os\n", "def main():\n", "return 1\n", "class A:\n"], tokenizer, 160, 32, 8, 8)
    chosen = ["logprobs" in each.options for each in measure._half_with_logprobs(asked)]
    assert {(each.sampling, told) for each, told in zip(asked, chosen, strict=True)} == set(
        product(range(8), (False, True))
    )
    assert {(each.sampling, each.in_half(4)) for each in asked} == set(product(range(8), (False, True)))
    for count in (2, 3, 4):
        met = {(each.sampling, each.turn % count) for each in asked}
        assert met == set(product(range(8), range(count)))
        told_by = {(each.turn % count, told) for each, told in zip(asked, chosen, strict=True)}
        assert told_by == set(product(range(count), (False, True)))


def test_log_probabilities_that_an_engine_loses_are_missed(toy: Runtime) -> None:
    options = {"max_new_tokens": 4, "logprobs": 2, "drafter": "none"}
    asked, found = Asked("r", [1, 2], options), toy.generate([1, 2], ignore_eos=True, **options)
    whole = outcome_of(found, asked)
    assert whole.logprobs is not None
    assert len(whole.logprobs) == len(whole.tokens) == 4
    for kept in (found.logprobs[3:], []):
        parted = divergence("r", whole, outcome_of(replace(found, logprobs=kept), asked))
        assert parted is not None
        assert parted.what == "log-probabilities"


def test_numpy_does_without_what_a_process_disables(toy: Runtime) -> None:
    features = {name for each in processes(toy.manifest, [], quick=True) for name in each.without}
    if not features:
        pytest.skip("NumPy has no kernels here beyond those that it always runs")
    program = "from numpy._core._multiarray_umath import __cpu_features__ as f; print(*(n for n in f if f[n]))"
    command, variables = [sys.executable, "-W", "error", "-c", program], environment(None, sorted(features))
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert done.stdout.strip()
    assert not features & set(done.stdout.split())


def test_the_instruction_sets_are_those_of_the_kernels() -> None:
    source = (REPOSITORY / "plugins" / "csrc" / "onnxruntime" / "isa.cc").read_text(encoding="utf-8")
    listed = re.search(r"kNames\[\] = \{(.*?)\}", source)
    assert listed is not None
    assert tuple(re.findall(r'"(\w+)"', listed[1])) == INSTRUCTION_SETS


# Comparing.


def test_outcomes_part_in_tokens_then_texts_then_reasons_then_logprobs() -> None:
    logprobs = (Logprob(5, -0.5, ((5, -0.5), (6, -1.0))), Logprob(7, -0.25, ((7, -0.25), (8, -0.375))))
    whole = Outcome((5, 7), "ab", "length", logprobs)
    assert divergence("r", whole, whole) is None
    assert divergence("r", whole, Outcome((5, 7), "ab", "length")) is None  # not asked for log-probabilities
    for told, place in (((), 0), (logprobs[1:], 0)):  # asked for, and lost: all, or the first
        lost = divergence("r", whole, Outcome((5, 7), "ab", "length", told))
        assert lost is not None
        assert (lost.what, lost.index) == ("log-probabilities", place)
    assert divergence("r", whole, Outcome((5, 7), "ab", "length", logprobs[1:], 1)) is None  # continued after one token
    parted = divergence("r", whole, Outcome((5, 8), "ac", "length", logprobs))
    assert parted is not None
    assert (parted.what, parted.index, parted.margin) == ("tokens", 1, 0.125)
    assert parted.text == "r, token 1: 8 in place of 7 (+0.12 nats)"
    shorter = divergence("r", whole, Outcome((5,), "a", "stop"))
    assert shorter is not None
    assert shorter.text == "r, token 1: the end in place of 7"
    texts = divergence("r", Outcome((), "abc", "length"), Outcome((), "abd", "length"))
    assert texts is not None
    assert texts.text == "r, character 2: 'd' in place of 'c'"
    reasons = divergence("r", whole, Outcome((5, 7), "ab", "stop", logprobs))
    assert reasons is not None
    assert reasons.what == "finish reason"
    near = (logprobs[0], Logprob(7, -0.25, ((7, -0.25), (8, -0.3750001))))
    last = divergence("r", whole, Outcome((5, 7), "ab", "length", near))
    assert last is not None
    assert (last.what, last.index) == ("log-probabilities", 1)
    failed = compare(["r", "s"], [whole, whole], [Outcome(error="status 500"), whole])
    assert (failed.diverged, failed.logprobs_diverged, failed.by_what) == (1, 0, {"error": 1})


def test_outcomes_keep_every_bit_as_json() -> None:
    whole = Outcome((5,), "é", "stop", (Logprob(5, -0.1 - 1e-17, ((5, float("-inf")),)),), 3)
    assert Outcome.from_json(json.loads(json.dumps(asdict(whole)))) == whole


# Servers.


def test_our_server_has_no_divergence(branch_plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runtime = Runtime.load(branch_plan, threads=1, prefix_cache=PrefixCacheConfig(max_cached_tokens=4096))
    with listening(runtime) as address:
        bodies = ("--body", '{"drafter": "none"}', "--drafting-body", '{"drafter": "head"}')
        sizes = ("--requests", "6", "--new", "8", "--characters", "60", "--at-once", "4")
        found = report(capsys, 0, *PROMPTS, "--against", address, *bodies, *sizes)
    assert found["ours"]
    assert found["diverged"] == found["failed_at_first"] == 0
    rows = {(row["group"], row["condition"]): row["witness"] for row in found["rows"]}
    assert rows["drafting head", "alone"]["accepted"] > 0  # each was what it says
    assert rows["alone", "again, in the same order"]["accepted"] == 0
    assert rows["warm prompt", "each twice in a row, the second"]["reused"] > 0
    assert [row["group"] for row in found["rows"]] == [
        "alone", "alone", "alone", "warm prompt", "warm prompt", "company", "company", *["drafting head"] * 3
    ]  # fmt: skip
    assert [row["condition"] for row in found["rows"] if row["without_logprobs"]] == ["streamed"]
    assert [each["what"] for each in found["left_out"]] == ["rows of a restart"]


@pytest.mark.parametrize("changes", [False, True])
def test_a_server_that_answers_otherwise_in_company_is_found_and_no_fault_of_ours(
    changes: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    start = f"{sys.executable} {FAKE} {port} {'--company' if changes else ''}"
    sizes = ("--requests", "5", "--new", "8", "--at-once", "5")
    address = f"http://127.0.0.1:{port}"
    found = report(capsys, 0, *PROMPTS, "--against", f"{address}/v1", "--start", start, *sizes)
    assert not found["ours"]
    for row in found["rows"]:
        shares = "at once" in row["condition"]
        assert bool(row["diverged"]) == (shares and changes), row
        if row["diverged"]:
            assert row["first"]["what"] == "text"
            assert row["first"]["text"].endswith(": ' ...' in place of ''")
    assert "restart" in {row["group"] for row in found["rows"]}
    assert [each["what"] for each in found["left_out"]] == ["log-probabilities", "rows with drafts"]
    with socket.socket() as gone:  # the tool has ended what it started
        assert gone.connect_ex(("127.0.0.1", port)) != 0


def test_a_server_that_answers_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    start = f"{sys.executable} {FAKE} {port} --fails"
    assert exactness.main([*PROMPTS, "--against", address, "--start", start, "--requests", "2"]) == 2
    assert f"{address}/v1 answers no request: status 500" in capsys.readouterr().err


def test_a_server_of_ours_that_refuses_some_requests_is_at_fault(capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    start = f"{sys.executable} {FAKE} {port} --ours --refuses-penalties"
    arguments = (*PROMPTS, "--against", f"http://127.0.0.1:{port}", "--start", start, "--requests", "5", "--quick")
    assert exactness.main(list(arguments)) == 1
    assert "of the first answers, 1 of 5 were errors" in capsys.readouterr().out.splitlines()[-1]


def test_a_drafting_body_is_in_addition_to_the_body(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, ask = list[dict[str, Any]](), Server.ask

    def noting(self: Server, asked: Asked, more: dict[str, Any], *, stream: bool = False) -> Outcome:
        sent.append(more)
        return ask(self, asked, more, stream=stream)

    monkeypatch.setattr(Server, "ask", noting)
    port = free_port()
    start = f"{sys.executable} {FAKE} {port}"
    bodies = ("--body", '{"user": "x"}', "--drafting-body", '{"drafter": "d"}')
    sizes = ("--requests", "1", "--quick")
    report(capsys, 0, *PROMPTS, "--against", f"http://127.0.0.1:{port}", "--start", start, *bodies, *sizes)
    assert {"user": "x", "drafter": "d"} in sent
    assert all(more["user"] == "x" for more in sent)


def test_what_cannot_be_compared_is_refused(toy_plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    for arguments, words in (
        ((), "pass a PLAN, or --against URL"),
        ((str(toy_plan), "--start", "x"), "--start is about a server; pass --against URL too"),
        ((str(toy_plan), "--drafters", "oracle", *PROMPTS), "--drafters names 'oracle'"),
        ((str(toy_plan), "--new", "160", *PROMPTS), "--new is 160, which leaves no room"),
        ((str(toy_plan), "--body", "[1]"), "--body is '[1]'; pass a JSON object"),
        (("--against", nowhere), "pass a PLAN, whose recipe names some, or --prompts FILE"),
        ((*PROMPTS, "--against", nowhere), f"No server answers at {nowhere}/v1"),
        ((*PROMPTS, "--against", nowhere, "--start", f"{sys.executable} -c 1"), "ended: it said nothing"),
        ((*PROMPTS, "--against", nowhere, "--start", "/no/such/program"), "cannot be started"),
        ((*PROMPTS, "--against", "here"), "'here' is no address of a server"),
        ((*PROMPTS, "--against", nowhere, "--requests", "1000"), "there are 88 different prompts; lower it"),
    ):
        assert exactness.main(list(arguments)) == 2, arguments
        assert words in capsys.readouterr().err
