"""The table of divergences: there are none of ours, and planted ones are found, with their place and margin."""

from __future__ import annotations

import gc
import io
import json
import platform
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from rich.console import Console

from outrider import Generation, PrefixCacheConfig, Runtime
from outrider.plans.plan import open_plan
from outrider.plans.sampling import Sampling
from outrider.plans.tokenizer import Tokenizer
from outrider.plugins.reference import RaceKey, choice
from outrider.plugins.reference.choice import filtered_weights
from outrider.plugins.schema import FilterOrder, Purpose
from outrider.runtime.options.options import Options
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
from outrider.tools.exactness.measure import print_groups, print_table
from outrider.tools.exactness.requests import Asked, plan_requests
from outrider.tools.exactness.worker import environment, outcome_of, run_job, run_process
from outrider.tools.parting import Logprob, Outcome, Parting, compare, divergence, margin
from outrider.tools.verify.agreement import DrafterCheck, compare_drafters
from tests.conftest import HELD_OUT, REPOSITORY
from tests.inexact import make_target_inexact
from tests.integration.served import listening

PROMPTS = ("--prompts", str(HELD_OUT))
FAKE = Path(__file__).with_name("fake_server.py")


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture
def divergences(output: Callable[..., str]) -> Callable[..., dict[str, Any]]:
    """The report of `outrider exactness`, whose status is 1 where our engine diverges."""
    return lambda *arguments, status=0: json.loads(
        output(exactness.main, *PROMPTS, *arguments, "--json", status=status)
    )


@pytest.mark.long
def test_our_engine_has_no_divergence(branch_plan: Path, divergences: Callable[..., Any]) -> None:
    found = divergences(branch_plan, "--quick", "--new", 12, "--length", 10)
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
        f"drafter {name}" for name in ("classical", "classical-block", "classical-head")
    ]
    whole = [c for each in processes(everything.manifest, kept) for c in each.conditions]
    assert len({(c.group, c.name) for c in whole}) == len(whole)
    assert {c.mode for c in whole} == {None, "in-one-sequence", "batching"}
    assert {c.group for c in whole} >= {"partial KV", "branches", "company", "interrupted"}
    alone = [c for each in processes(toy.manifest, []) for c in each.conditions]
    assert {c.mode for c in alone} == {None}
    assert {c.drafter for c in alone} == {"none"}


@pytest.mark.long
def test_no_divergence_in_any_condition(everything_plan: Path, divergences: Callable[..., Any]) -> None:
    found = divergences(everything_plan, "--requests", 16, "--new", 40)
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
    branch_plan: Path, monkeypatch: pytest.MonkeyPatch, divergences: Callable[..., Any]
) -> None:
    conditions = (Condition("drafters", "ngram", "alone", "ngram"), Condition("company", "all", "company", "mixed"))
    in_this_process(monkeypatch, conditions, {"all": {"seed": 1}})
    report = divergences(branch_plan, "--quick", "--new", 10, "--drafters", "ngram,head", status=1)
    ngram, company = report["rows"]
    assert (ngram["diverged"], ngram["logprobs_diverged"], ngram["first"]) == (0, 0, None)
    assert 0 < company["diverged"] < 8  # greedy requests draw nothing
    first = company["first"]
    assert (first["request"], first["what"]) == ("prompt 0, temperature 0.7", "tokens")
    assert first["expected"] != first["found"]
    assert not [name for name in company["names"] if "greedy" in name or name.endswith("penalties")]
    screen = Console(file=io.StringIO(), width=120)
    print_table(report, screen)
    print_groups(report, screen)
    printed = screen.file.getvalue()  # type: ignore[attr-defined]
    assert printed.count(f"company, all: first with other tokens: {first['text']}") == 2
    assert printed.count("1 of 2 conditions diverge") == 2
    assert re.search(rf"company +1 +8 +{company['diverged']} ", printed)


def test_an_engine_whose_rows_depend_on_each_other_is_found(
    branch_plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, divergences: Callable[..., Any]
) -> None:
    """A real fault: one scale for all rows of a product."""
    plan = shutil.copytree(branch_plan, tmp_path / "plan")
    make_target_inexact(plan)
    ways = (("none", "alone", "none"), ("chain", "alone", "chain"), ("all", "company", "none"))
    in_this_process(monkeypatch, tuple(Condition("drafters", *way) for way in ways))
    rows = divergences(plan, "--quick", "--new", 10, "--exactness", "unchecked", status=1)["rows"]
    assert [row["diverged"] + row["logprobs_diverged"] > 0 for row in rows] == [False, True, True]


def test_a_process_that_ends_is_a_divergence_and_missing_instructions_are_left_out(
    toy_plan: Path, monkeypatch: pytest.MonkeyPatch, divergences: Callable[..., Any]
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
    found = divergences(toy_plan, "--requests", 2, "--new", 4, status=1)
    assert [row["diverged"] for row in found["rows"]] == [2] * 4  # the second condition of each was never run
    for row, words in zip(found["rows"], ["nowhere"] * 2 + ["its process ended: KeyError: 'asked'"] * 2, strict=True):
        assert words in row["first"]["found"]
    assert [each["what"] for each in found["left_out"]] == [f"OUTRIDER_ISA={lacking}"]


def test_every_sampling_meets_both_choices_of_logprobs_every_drafter_and_both_cuts(toy_plan: Path) -> None:
    tokenizer = Tokenizer.load(toy_plan / "tokenizer", open_plan(toy_plan).manifest.text.special_tokens)
    asked = plan_requests(["import os\n", "def main():\n", "return 1\n", "class A:\n"], tokenizer, 160, 32, 8, 8)
    halves = ["logprobs" in each.options for each in measure._half_with_logprobs(asked)]
    both = (False, True)
    assert {*zip((each.sampling for each in asked), halves, strict=True)} == {*product(range(8), both)}
    assert {(each.sampling, each.in_half(4)) for each in asked} == {*product(range(8), both)}
    for count in (2, 3, 4):
        turns = [each.turn % count for each in asked]
        assert {*zip((each.sampling for each in asked), turns, strict=True)} == {*product(range(8), range(count))}
        assert {*zip(turns, halves, strict=True)} == {*product(range(count), both)}


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


LOGPROBS = (Logprob(5, -0.5, ((5, -0.5), (6, -1.0))), Logprob(7, -0.25, ((7, -0.25), (8, -0.375))))
WHOLE = Outcome((5, 7), "ab", "length", LOGPROBS)
NEAR = (LOGPROBS[0], Logprob(7, -0.25, ((7, -0.25), (8, -0.3750001))))


@pytest.mark.parametrize(
    ("found", "what", "place"),
    [
        (WHOLE, None, None),
        (Outcome((5, 7), "ab", "length"), None, None),  # not asked for log-probabilities
        (Outcome((5, 7), "ab", "length", LOGPROBS[1:], 1), None, None),  # continued after one token
        (Outcome((5, 7), "ab", "length", ()), "log-probabilities", 0),  # asked for, and lost: all, or the first
        (Outcome((5, 7), "ab", "length", LOGPROBS[1:]), "log-probabilities", 0),
        (Outcome((5, 7), "ab", "length", NEAR), "log-probabilities", 1),
        (Outcome((5, 7), "ab", "stop", LOGPROBS), "finish reason", None),
        (Outcome((), "aX", "length"), "text", 1),
        (Outcome((5, 8), "ac", "stop", LOGPROBS), "tokens", 1),
        (Outcome((5,), "a", "stop"), "tokens", 1),
        (Outcome(error="status 500"), "error", None),
    ],
)
def test_outcomes_part_in_tokens_then_texts_then_reasons_then_logprobs(
    found: Outcome, what: str | None, place: int | None
) -> None:
    parted = divergence("r", WHOLE, found)
    assert (parted and parted.what, parted and parted.index) == (what, place)


def test_a_divergence_is_a_sentence_with_the_margin_and_counted_by_kind() -> None:
    other = Outcome((5, 8), "ac", "length", LOGPROBS)
    (parted,) = filter(None, [divergence("r", WHOLE, other)])
    assert (parted.margin, parted.text) == (0.125, "r, token 1: 8 in place of 7 (+0.12 nats)")
    failed = compare(["r", "s"], [WHOLE, WHOLE], [Outcome(error="status 500"), WHOLE])
    assert (failed.diverged, failed.logprobs_diverged, failed.by_what) == (1, 0, {"error": 1})


def test_outcomes_keep_every_bit_as_json() -> None:
    whole = Outcome((5,), "é", "stop", (Logprob(5, -0.1 - 1e-17, ((5, float("-inf")),)),), 3)
    assert Outcome.from_json(json.loads(json.dumps(asdict(whole)))) == whole


def test_our_server_has_no_divergence(branch_plan: Path, divergences: Callable[..., Any]) -> None:
    runtime = Runtime.load(branch_plan, threads=1, prefix_cache=PrefixCacheConfig(max_cached_tokens=4096))
    with listening(runtime) as address:
        bodies = ("--body", '{"drafter": "none"}', "--drafting-body", '{"drafter": "head"}')
        sizes = ("--requests", 6, "--new", 8, "--characters", 60, "--at-once", 4)
        found = divergences("--against", address, *bodies, *sizes)
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


def against(port: int, *options: str) -> tuple[str, ...]:
    """Arguments that compare a fake server, which the tool starts."""
    return (
        "--against",
        f"http://127.0.0.1:{port}",
        "--start",
        shlex.join([sys.executable, str(FAKE), str(port), *options]),
    )


@pytest.mark.parametrize("changes", [False, True])
def test_a_server_that_answers_otherwise_in_company_is_found_and_no_fault_of_ours(
    changes: bool, port: int, divergences: Callable[..., Any]
) -> None:
    company = ["--company"] if changes else []
    found = divergences(*against(port, *company), "--requests", 5, "--new", 8, "--at-once", 5)
    assert not found["ours"]
    for row in found["rows"]:
        assert bool(row["diverged"]) == ("at once" in row["condition"] and changes), row
        if row["diverged"]:
            assert row["first"]["what"] == "text"
            assert row["first"]["text"].endswith(": ' ...' in place of ''")
    assert "restart" in {row["group"] for row in found["rows"]}
    assert [each["what"] for each in found["left_out"]] == ["log-probabilities", "rows with drafts"]
    with socket.socket() as gone:  # the tool has ended what it started
        assert gone.connect_ex(("127.0.0.1", port)) != 0


def test_a_server_of_ours_that_refuses_requests_is_at_fault_and_one_that_answers_nothing_is_refused(
    port: int, output: Callable[..., str]
) -> None:
    said = output(exactness.main, *PROMPTS, *against(port, "--fails"), "--requests", 2, status=2)
    assert f":{port}/v1 answers no request: status 500" in said
    ours = against(port, "--ours", "--refuses-penalties")
    printed = output(exactness.main, *PROMPTS, *ours, "--requests", 5, "--quick", status=1)
    assert "of the first answers, 1 of 5 were errors" in printed.splitlines()[-1]


def test_what_cannot_be_compared_is_refused(toy_plan: Path, port: int, output: Callable[..., str]) -> None:
    nowhere = f"http://127.0.0.1:{port}"
    for arguments, words in (
        ((), "pass a PLAN, or --against URL"),
        ((toy_plan, "--start", "x"), "--start is about a server; pass --against URL too"),
        ((toy_plan, "--drafters", "oracle", *PROMPTS), "--drafters names 'oracle'"),
        ((toy_plan, "--new", "160", *PROMPTS), "--new is 160, which leaves no room"),
        ((toy_plan, "--body", "[1]"), "--body is '[1]'; pass a JSON object"),
        (("--against", nowhere), "pass a PLAN, whose recipe names some, or --prompts FILE"),
        ((*PROMPTS, "--against", nowhere), f"No server answers at {nowhere}/v1"),
        ((*PROMPTS, "--against", nowhere, "--start", f"{sys.executable} -c 1"), "ended: it said nothing"),
        ((*PROMPTS, "--against", nowhere, "--start", "/no/such/program"), "cannot be started"),
        ((*PROMPTS, "--against", "here"), "'here' is no address of a server"),
        ((*PROMPTS, "--against", nowhere, "--requests", "1000"), "there are 88 different prompts; lower it"),
    ):
        assert words in output(exactness.main, *arguments, status=2)


LOGITS = st.lists(st.integers(-400, 400).map(lambda hundredths: hundredths / 100), min_size=5, max_size=5, unique=True)
SAMPLINGS = st.builds(
    Sampling, st.sampled_from([0.0, 0.7, 1.5]), st.sampled_from([0, 3]), st.sampled_from([1.0, 0.6]),
    st.sampled_from([0.0, 0.2]), st.sampled_from(FilterOrder), st.sampled_from([0.0, 0.0, 1.0]),
)  # fmt: skip
DISTURBANCES = np.array(list(product([-1, 1], repeat=5)))


@given(logits=LOGITS, sampling=SAMPLINGS, seed=st.integers(0, 2**64 - 1))
def test_the_margin_is_twice_the_least_disturbance_that_changes_anything(
    logits: list[float], sampling: Sampling, seed: int
) -> None:
    row = np.array(logits, np.float32)
    key = RaceKey(seed, 0, 7, Purpose.TARGET)
    found = margin(row, sampling, key)
    assume(1e-3 < found < 8)

    def changes(by: float) -> bool:
        disturbed = (row + by * DISTURBANCES).astype(np.float32)
        kept = filtered_weights(row, sampling) > 0
        return any(
            choice(other, sampling, key) != choice(row, sampling, key)
            or ((filtered_weights(other, sampling) > 0) != kept).any()
            for other in disturbed
        )

    assert not changes(0.499 * found)
    assert changes(0.501 * found) or sampling.top_n_sigma


def test_a_run_that_parts_is_found_with_its_margin(toy: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the tolerance it is a near tie, which an exact target does not have."""
    session, prompt = toy.session(), [5, 6, 7, 8] * 5
    generate = session.generate

    def other_seed(ids: list[int], **options: Any) -> Generation:
        return generate(ids, **options | {"seed": 9} if options["drafter"] == "bushy" else options)

    monkeypatch.setattr(session, "generate", other_seed)
    plain, drafted = (generate(prompt, whole=True, temperature=1.0, seed=seed).token_ids for seed in (8, 9))
    first = next(i for i in range(len(plain)) if plain[i] != drafted[i])
    options = Options(temperature=1.0, seed=8, max_new_tokens=first + 5)
    for tolerance, exact in ((1e-4, False), (np.inf, False), (np.inf, True)):
        checks = compare_drafters(session, [prompt], ["bushy", "chain"], options, tolerance, exact=exact)
        assert (checks["chain"].equal_runs, checks["chain"].partings) == (1, [])
        (parting,) = checks["bushy"].partings
        assert (parting.index, parting.expected, parting.found) == (first, plain[first], drafted[first])
        assert parting.margin > 1e-4
        assert parting.near_tie == checks["bushy"].passed == (tolerance > 1 and not exact)


def test_tokens_per_verify() -> None:
    parting = Parting(0, 20, 1, 2, 3, 0.5)
    check = DrafterCheck(tokens=9, rounds=3, partings=[parting])
    assert (check.tokens_per_verify, check.passed, DrafterCheck().tokens_per_verify) == (3.0, False, 0.0)
    assert check.to_json()["tokens_per_verify"] == 3.0
