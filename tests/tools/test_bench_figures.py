"""What runs amount to, on hand-made runs whose figures are known: which way round a speedup is, what is paired, and
what is left out; and accept lengths by force."""

from __future__ import annotations

import csv
import io
import json
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from outrider import Generation, Runtime, Session, Stats
from outrider.compiler.build import build
from outrider.compiler.recipe import load_recipe
from outrider.runtime.generation import FinishReason
from outrider.runtime.options.options import Options
from outrider.runtime.trace import RoundTrace
from outrider.tools.bench import __main__ as bench
from outrider.tools.bench import runs as bench_runs
from outrider.tools.bench.latency import forced_session
from outrider.tools.bench.prompts import Prompts
from outrider.tools.bench.rows import _along_context, by_task, speedup, summary, variant_columns
from outrider.tools.bench.runs import Mode, Run, compare, divergences, first_tokens, mode_of
from outrider.tools.bench.shapes import PLAIN_DECODING, Variant
from outrider.tools.bench.tables import MAIN, same
from tests.conftest import TOY_DRAFTERS

DRAFTER = Variant("ngram.1", "ngram", "ngram", None, 7, 6, "coupled")
TOKENS = list(range(11))


def run(prompt: int, total_ms: float, *, first_span: int = 1, tokens: list[int] = TOKENS, **counts: Any) -> Run:
    """A generation whose first tokens came after half of the time; 11 rounds of one token, but for `counts`."""
    stats = Stats(
        prompt_tokens=100 * (prompt + 1), new_tokens=len(tokens), first_span=first_span, ttft_ms=total_ms / 2,
        total_ms=total_ms, **{"rounds": 11} | counts,
    )  # fmt: skip
    return Run(Generation("", tokens, FinishReason.LENGTH, stats), total_ms / 4, Stats(), (2.0,), prompt)


def test_a_speedup_is_the_time_of_plain_decoding_over_that_of_the_drafter_pair_by_pair() -> None:
    """Of three pairs, whose times differ much more from prompt to prompt than within a pair."""
    plain = [run(0, 100), run(1, 1000), run(2, 10)]
    faster = Mode(DRAFTER, [run(0, 50), run(1, 250), run(2, 9)])
    row = summary(faster, plain)
    assert (row["speedup"], row["speedup_p10"], row["speedup_p90"]) == (2, 10 / 9, 4)
    assert row["decode_speedup"] == pytest.approx(2)
    assert row["tokens_per_second"] == pytest.approx(10 / 0.025)  # after the first token, of the run of 50 ms
    assert row["baseline_tokens_per_second"] == pytest.approx(10 / 0.050)
    assert (row["ttft_ms"], row["e2e_ms"]) == (25, 50)
    slower = Mode(DRAFTER, [run(0, 200), run(1, 1250), run(2, 100)])
    assert summary(slower, plain)["speedup"] == 0.5
    assert speedup(run(0, 100, tokens=[5] * 22), run(0, 100)) == 2  # by the token, where texts have other lengths


def test_counts_are_those_of_all_runs() -> None:
    counts = {"rounds": 5, "drafted": 30, "left_out": 7, "accepted": 6, "plain_rounds": 1}
    runs = [run(0, 1, **counts), run(1, 1, rounds=6, drafted=10, accepted=2)]
    row = summary(Mode(DRAFTER, runs), [run(0, 1), run(1, 1)])
    assert (row["drafted"], row["evaluated"], row["accepted"], row["plain_rounds"]) == (47, 40, 8, 1)
    assert (row["acceptance_rate"], row["tokens_per_verify"]) == (0.2, 2)


def test_rates_that_there_are_not_count_in_no_median() -> None:
    """A run whose tokens came at once has no rate, and a pair with it no ratio of rates."""
    plain = [run(0, 100), run(1, 100, first_span=11), run(2, 100)]
    mode = Mode(DRAFTER, [run(0, 50), run(1, 50), run(2, 25, first_span=11)])
    row = summary(mode, plain)
    assert row["decode_speedup"] == row["decode_speedup_p10"] == pytest.approx(2)
    assert row["tokens_per_second_p10"] == pytest.approx(10 / 0.025)
    assert row["speedup"] == 2  # of all three
    none = summary(Mode(DRAFTER, [run(0, 50, first_span=11)]), plain[:1])
    figures = ("decode_speedup", "decode_speedup_p90", "tokens_per_second", "acceptance_rate")
    assert [none[name] for name in figures] == [None] * 4


def test_repetitions_of_plain_decoding_are_compared_with_each_other() -> None:
    other = [*TOKENS[:-1], 99]
    plain = [run(0, 1), run(1, 1), run(0, 1, tokens=other), run(1, 1)]
    assert [summary(Mode(PLAIN_DECODING, plain), plain)[key] for key in ("same_tokens", "same_runs")] == [False, 3]
    drafted = Mode(DRAFTER, [run(0, 1), run(1, 1), run(0, 1), run(1, 1, tokens=other)])
    assert summary(drafted, plain)["same_runs"] == 3  # as plain decoding was first


def test_tokens_by_rejection_at_a_temperature_are_not_expected_to_be_plain_decodings() -> None:
    def mode(acceptance: str, temperature: float, forced: int | None = None) -> Mode:
        variant = Variant("classical", "classical", "model", "1/1/3", 3, 2, acceptance)
        sampling = {"temperature": temperature}
        return mode_of(variant, Namespace(synthetic_accept=forced, sampling=sampling))

    assert [mode("rejection", t).promised for t in (0.0, 0.7)] == [True, False]
    assert [mode("coupled", t).promised for t in (0.0, 0.7)] == [True, True]
    assert not mode("coupled", 0.0, forced=2).promised
    rejecting = mode("rejection", 0.7)
    rejecting.runs = [run(0, 1, tokens=[99] * 11)]
    row = summary(rejecting, [run(0, 1)])
    assert row["same_tokens"] is row["same_runs"] is row["first_divergence"] is None
    assert same(row) == "n/a"


def test_figures_of_a_task_are_of_its_prompts_alone() -> None:
    prompts = Prompts([[1], [2, 3], [4]], ["short", "long", "short"])
    plain = [run(index, 100) for index in (0, 1, 2, 0, 1, 2)]
    times = (50, 400, 25, 20, 200, 100)
    runs = [run(index, ms, rounds=5) for index, ms in zip((0, 1, 2, 0, 1, 2), times, strict=True)]
    found = by_task(runs, plain, prompts)
    assert list(found) == ["short", "long"]
    assert found["short"]["speedup"] == 3  # the middle of 1, 2, 4 and 5
    assert found["long"]["speedup"] == 0.375
    assert [found[task]["runs"] for task in found] == [4, 2]
    assert [found[task]["prompts"] for task in found] == [2, 1]
    assert found["short"]["prompts_sha256"] == Prompts([[1], [4]], [None, None]).sha256 != prompts.sha256
    assert found["long"]["prompt_tokens"] == 200
    assert found["long"]["tokens_per_verify"] == 2.2
    at_once = by_task([run(0, 50, first_span=11)], [run(0, 100)], Prompts([[1]], ["short"]))
    assert (at_once["short"]["speedup"], at_once["short"]["tokens_per_second"]) == (2, None)


FORCED = Mode(Variant("head", "head", "eagle3", "2/1/4", 4, 2, "coupled"), synthetic=2, promised=False)


def test_what_was_forced_is_compared_with_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[Any] = []
    monkeypatch.setattr(bench_runs, "divergences", lambda *arguments: compared.append(arguments[-1]) or [])
    modes = [Mode(PLAIN_DECODING, [run(0, 1)]), Mode(DRAFTER, [run(0, 2)]), replace(FORCED, runs=[run(0, 3)])]
    compare(None, modes, [[0]], Options())  # type: ignore[arg-type]
    assert compared == [modes[0].runs, modes[1].runs]


def test_cells_of_figures_that_there_are_not_say_so() -> None:
    mode = Mode(DRAFTER, [run(0, 50, first_span=11)])
    row = {"synthetic_accept": None} | variant_columns(mode) | summary(mode, [run(0, 100)])
    assert tuple(column.cell(row) for column in MAIN) == (
        "ngram", "6 nodes", "100", "-", "2.00x", "2.00-2.00", "-", "1.00", "-", "0%", "25.0/25.0", "-", "yes",
    )  # fmt: skip


def test_tokens_that_part_are_shown_with_place_and_margin(toy: Runtime) -> None:
    ids, options = [5, 6, 7], Options(max_new_tokens=6, ignore_eos=True)
    session = toy.session()
    plain = session.generate(ids, drafter="none", **options)
    wrong = replace(plain, token_ids=[*plain.token_ids[:2], 1 + plain.token_ids[2] % 299, *plain.token_ids[3:]])
    runs = [Run(g, 1.0, Stats(), (1.0, 3.0, 2.0)) for g in (plain, wrong)]
    (found,) = divergences(session, [ids], options, first_tokens(runs[:1]), runs[1:])
    assert (found.prompt, found.prompt_tokens, found.index) == (0, 3, 2)
    assert found.margin > 0
    row = summary(Mode(DRAFTER, runs[1:], [found]), runs[:1])
    parted = [row[f"divergence_{key}"] for key in ("prompt", "prompt_tokens", "margin")]
    assert (row["first_divergence"], *parted, row["same_tokens"]) == (2, 0, 3, found.margin, False)


def test_times_along_the_context_are_medians_of_equal_stretches(toy: Runtime) -> None:
    plain = toy.session().generate([5, 6, 7], drafter="none", max_new_tokens=4, ignore_eos=True)
    timed = Run(plain, 1.0, Stats(), tuple(float(ms) for ms in range(64)))
    assert plain.stats.prompt_tokens + plain.stats.first_span == 4  # where the first token stands that has a time
    along = _along_context([timed, replace(timed, gaps_ms=(100.0,))])
    assert [at["tokens"] for at in along] == [4 * stretch + 2 for stretch in range(1, 17)]
    assert [at["ms"] for at in along] == [2.0, *(4 * stretch + 1.5 for stretch in range(1, 16))]
    assert _along_context([replace(timed, gaps_ms=())]) == []


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
