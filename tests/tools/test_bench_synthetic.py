"""Accept lengths by force: exactly the length asked for, by stages that all run, and never in another session."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from outrider import Runtime, Session
from outrider.compiler.build import build
from outrider.compiler.recipe import load_recipe
from outrider.runtime.options.options import Options
from outrider.runtime.trace import RoundTrace
from outrider.tools.bench import __main__ as bench
from outrider.tools.bench.latency import forced_session
from tests.conftest import TOY_DRAFTERS

SAMPLED = Options(temperature=0.9, top_k=20, top_p=0.9, seed=5)
PROMPT = list(range(40, 70)) * 2  # longer than a chunk, and it repeats itself: n-grams have something to draft


def rounds(session: Session, drafter: str, options: Options) -> list[RoundTrace]:
    seen: list[RoundTrace] = []
    always = Options(max_new_tokens=40, ignore_eos=True, auto_disable=False, on_round=seen.append, drafter=drafter)
    session.reset()
    session.generate(PROMPT, **(options | always))
    return seen


@pytest.mark.parametrize("drafter", TOY_DRAFTERS)
@pytest.mark.parametrize(("options", "length"), [(Options(), 0), (SAMPLED, 2), (Options(), 5)])
def test_every_draft_is_accepted_to_that_length(toy: Runtime, drafter: str, options: Options, length: int) -> None:
    seen = rounds(forced_session(toy, length), drafter, options)
    drafted = [r for r in seen[:-1] if r.nodes]  # the last one is cut at the limit
    assert drafted
    for r in drafted:
        accepted = sum(node.accepted for node in r.nodes)
        assert (accepted, len(r.committed)) == (min(length, max(node.depth for node in r.nodes)), 1 + accepted)
    assert all(after.position == before.position + len(before.committed) for before, after in pairwise(seen))


def test_rejection_is_forced_too(toy_recipe: Path, tmp_path: Path) -> None:
    drafter = "{name: classical, kind: model, checkpoint: drafter, gamma: 3, acceptance: rejection}"
    build(load_recipe(toy_recipe, [f"drafters=[{drafter}]"]), toy_recipe, tmp_path / "plan")
    session = forced_session(Runtime.load(tmp_path / "plan", threads=1), 2)
    seen = rounds(session, "classical", SAMPLED)
    assert {sum(node.accepted for node in r.nodes) for r in seen[:-1] if r.nodes} == {2}


def test_the_runtime_and_plain_decoding_stay_as_they_are(toy: Runtime) -> None:
    options = Options(max_new_tokens=30, ignore_eos=True, auto_disable=False)
    expected = toy.generate(PROMPT, drafter="none", **options).token_ids
    forced = forced_session(toy, 3)
    assert forced.generate(PROMPT, drafter="bushy", **options).token_ids != expected
    forced.reset()
    assert forced.generate(PROMPT, drafter="none", **options).token_ids == expected
    assert toy.generate(PROMPT, drafter="bushy", **options).token_ids == expected
    assert toy.session().generate(PROMPT, drafter="bushy", **options).token_ids == expected


def test_every_form_of_output_says_that_it_is_synthetic(toy_plan: Path, output: Callable[..., str]) -> None:
    sizes = ("--count", 2, "--new", 25, "--reps", 1, "--drafters", "chain,bushy", "--synthetic-accept", 3)
    asked = ("latency", toy_plan, "--prompts", toy_plan.parent / "held_out.jsonl", *sizes)
    plain, *forced = json.loads(output(bench.main, *asked, "--json"))["rows"]
    assert forced[0]["tokens_per_verify"] == 25 / 7  # one for the prompt, and six rounds of 3 and the correction
    assert forced[0]["acceptance_by_depth"] == [1.0, 1.0, 1.0]
    assert (plain["synthetic_accept"], plain["same_tokens"]) == (None, True)
    for row in forced:
        assert row["same_tokens"] is row["same_runs"] is row["first_divergence"] is None
        assert (row["synthetic_accept"], row["auto_disable"]) == (3, False)
        assert {"BimMask", "target", "TreeAccept", "KvGather", row["drafter"]} <= set(row["stages"])
    rows = list(csv.DictReader(io.StringIO(output(bench.main, *asked, "--csv"))))
    assert [(row["synthetic_accept"], row["same_tokens"]) for row in rows] == [("", "True"), ("3", ""), ("3", "")]
    for form in ((), ("--markdown",)):
        text = output(bench.main, *asked, *form)
        assert (text.count("synthetic:3"), "n/a" in text) == (2, True)
