"""The project's strongest promise: the same seed gives the same tokens, however they were come by."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers.processors import TemplateProcessing

from outrider import Runtime
from outrider.compiler.build import build
from outrider.compiler.held_out import read_prompts
from outrider.compiler.recipe import load_recipe
from outrider.runtime.options.options import Options
from outrider.runtime.trace import Round
from outrider.tools.verify.agreement import compare_drafters
from outrider.tools.verify.verification import LOGIT_BOUND
from tests.conftest import HELD_OUT, TOY_DRAFTERS, drafting_never_pays, forget_what_drafting_cost

SAMPLINGS = (
    Options(temperature=0.0),
    Options(temperature=0.7, seed=11),
    Options(temperature=1.0, top_p=0.9, seed=2**63 + 5),
    Options(temperature=1.3, top_k=40, top_p=0.95, seed=3, stream_id=2, filter_order="temperature_last"),
)
TOKENS = st.lists(st.integers(1, 299), min_size=1, max_size=60)
SAMPLING = st.builds(
    lambda temperature, top_k, top_p, seed: Options(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed),
    st.sampled_from([0.0, 0.0, 0.3, 1.0, 2.5]),
    st.sampled_from([0, 1, 5, 50]),
    st.sampled_from([1.0, 0.9, 0.2]),
    st.integers(0, 2**64 - 1),
)
RELAXED = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@RELAXED
@given(prompt=TOKENS, sampling=SAMPLING, repeat=st.integers(1, 3))
def test_every_drafter_gives_the_tokens_of_plain_decoding(
    toy: Runtime, prompt: list[int], sampling: Options, repeat: int
) -> None:
    prompt = (prompt * repeat)[:100]
    plain = toy.generate(prompt, drafter="none", max_new_tokens=48, **sampling)
    for drafter in TOY_DRAFTERS:
        drafted = toy.generate(prompt, drafter=drafter, auto_disable=False, max_new_tokens=48, **sampling)
        assert drafted.token_ids == plain.token_ids
        assert drafted.text == plain.text
        assert drafted.finish_reason == plain.finish_reason


@RELAXED
@given(
    prompt=TOKENS,
    sampling=SAMPLING,
    cuts=st.lists(st.tuples(st.integers(1, 20), st.sampled_from(["none", *TOY_DRAFTERS])), min_size=1, max_size=5),
)
def test_going_on_after_any_cut_equals_never_having_been_cut(
    toy: Runtime, prompt: list[int], sampling: Options, cuts: list[tuple[int, str]]
) -> None:
    """With whatever drafter: each finds its KV cache and its features where the others left them, or does without."""
    total = sum(cut for cut, _ in cuts)
    whole = toy.generate(prompt, max_new_tokens=total, ignore_eos=True, drafter="none", **sampling)
    session = toy.session()
    pieces: list[int] = []
    for index, (cut, drafter) in enumerate(cuts):
        given = prompt if index == 0 else []
        pieces += session.generate(given, max_new_tokens=cut, ignore_eos=True, drafter=drafter, **sampling).token_ids
    assert pieces == whole.token_ids
    assert session.token_ids == [*prompt, *pieces]


@RELAXED
@given(first=TOKENS, second=TOKENS, sampling=SAMPLING, drafters=st.tuples(*[st.sampled_from(TOY_DRAFTERS)] * 2))
def test_a_reused_prefix_gives_the_tokens_of_a_fresh_session(
    toy: Runtime, first: list[int], second: list[int], sampling: Options, drafters: tuple[str, str]
) -> None:
    session = toy.session()
    session.generate(first, max_new_tokens=10, drafter=drafters[0], **sampling)
    prompt = first[: len(first) // 2] + second
    reused = session.generate(prompt, whole=True, max_new_tokens=20, drafter=drafters[1], **sampling)
    assert reused.token_ids == toy.generate(prompt, max_new_tokens=20, drafter="none", **sampling).token_ids


def test_what_a_drafter_knows_survives_cuts_and_other_drafters(toy: Runtime) -> None:
    """After a generation that was cut, a drafter accepts as much as if it had never been cut."""
    prompt = [(37 * i) % 299 + 1 for i in range(50)]  # several chunks
    options = Options(max_new_tokens=30, ignore_eos=True, auto_disable=False)
    for drafter in ("chain", "bushy"):
        whole = toy.generate(prompt, drafter=drafter, auto_disable=False, max_new_tokens=60, ignore_eos=True)
        session = toy.session()
        pieces = [session.generate(prompt, drafter=drafter, **options), session.generate(drafter=drafter, **options)]
        accepted = sum(piece.stats.accepted for piece in pieces)
        assert accepted > 0
        assert abs(accepted - whole.stats.accepted) <= 4  # the cut itself costs at most a draft


@pytest.mark.parametrize("drafter", ["ngram", "chain", "head"])
def test_drafting_that_does_not_pay_is_put_aside_and_tried_again(
    toy: Runtime, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the clock says: here, that it never pays."""
    forget_what_drafting_cost(toy)
    drafting_never_pays(monkeypatch, 5)
    options = Options(max_new_tokens=100, temperature=1.0, seed=4, ignore_eos=True)
    plain = toy.generate([5, 6, 7] * 9, drafter="none", **options)
    drafted = toy.session().generate([5, 6, 7] * 9, drafter=drafter, **options)
    assert drafted.token_ids == plain.token_ids
    assert 0 < drafted.stats.plain_rounds < drafted.stats.rounds
    assert drafted.stats.drafted > 0


def test_what_a_gate_has_learned_is_forgotten_with_another_sampling(
    toy: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_what_drafting_cost(toy)
    drafting_never_pays(monkeypatch, 500)
    session, options = toy.session(), Options(drafter="chain", ignore_eos=True)
    session.generate([5, 6, 7], temperature=1.0, seed=5, max_new_tokens=60, **options)
    disabled = session.generate(temperature=1.0, seed=5, max_new_tokens=20, **options).stats
    assert disabled.plain_rounds == disabled.rounds
    assert session.generate(temperature=0.0, max_new_tokens=20, **options).stats.drafted > 0


def test_a_head_that_rests_costs_no_recomputing(toy: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_what_drafting_cost(toy)
    drafting_never_pays(monkeypatch, 500)
    session, options = toy.session(), Options(drafter="head", ignore_eos=True)
    session.generate([5, 6, 7], max_new_tokens=60, **options)
    again = session.generate([8, 9], max_new_tokens=5, **options).stats
    assert again.plain_rounds == again.rounds
    assert again.reused_tokens == 3 + 60 - 1


def test_rounds_can_be_watched(toy: Runtime) -> None:
    seen: list[Round] = []
    prompt = [(37 * i) % 299 + 1 for i in range(50)]
    options = Options(max_new_tokens=40, ignore_eos=True, auto_disable=False)
    for drafter in ("ngram", "chain", "bushy", "none"):
        seen.clear()
        run = toy.generate(prompt, drafter=drafter, on_round=seen.append, **options)
        assert [token for round_ in seen for token in round_.committed] == run.token_ids
        assert [round_.position for round_ in seen][:1] == [len(prompt)]
        assert sum(len(round_.nodes) for round_ in seen) == run.stats.drafted
        accepted = [node for round_ in seen for node in round_.nodes if node.accepted]
        assert len(accepted) == run.stats.accepted
        for round_ in seen:
            path = [node.token_id for node in round_.nodes if node.accepted]
            assert path == round_.committed[: len(path)]
            assert [node.depth for node in round_.nodes if node.accepted] == list(range(1, len(path) + 1))
        known = [node.probability is not None for round_ in seen for node in round_.nodes]
        assert all(known)
        assert run.stats.acceptance_by_depth[:1] == ([] if not run.stats.accepted else [
            sum(any(n.accepted for n in r.nodes) for r in seen) / sum(bool(r.nodes) for r in seen)
        ])  # fmt: skip


@pytest.mark.parametrize("mode", ["alone", "in-one-sequence", "batching"])
def test_a_host_drafter_drafts_in_the_pass_that_ends_the_prompt(toy: Runtime, branch_plan: Path, mode: str) -> None:
    prompt = [5, 6, 7, 8] * 4
    plain = toy.generate(prompt, drafter="none", max_new_tokens=6, ignore_eos=True).token_ids
    seen: list[Round] = []
    options = Options(drafter="ngram", max_new_tokens=6, ignore_eos=True, on_round=seen.append)
    if mode == "alone":
        found = [toy.generate(prompt, **options)]
    else:
        runtime = Runtime.load(branch_plan, threads=1)
        found = runtime.generate_branches([5], [prompt[1:], prompt[1:]], mode=mode, **options)  # type: ignore[arg-type]
    assert [each.token_ids for each in found] == [plain] * len(found)
    first = [each for each in seen if each.position == len(prompt)]
    assert len(first) == len(found)
    for each in first:
        assert [node.token_id for node in each.nodes][:4] == [5, 6, 7, 8][: len(each.nodes)]
        assert each.nodes


def test_rows_are_computed_again_only_for_features_that_are_lost(toy: Runtime) -> None:
    prompt = [(37 * i) % 299 + 1 for i in range(50)]
    session = toy.session()
    options = {"drafter": "head", "ignore_eos": True, "auto_disable": False}
    session.generate(prompt, max_new_tokens=8, **options)
    assert session.generate(max_new_tokens=4, **options).stats.reused_tokens == 57
    session.generate(drafter="none", max_new_tokens=6, ignore_eos=True)
    again = session.generate(max_new_tokens=4, **options)
    assert 50 < again.stats.reused_tokens < 62  # plain steps left no features after them


def test_chunked_prefill_gives_the_tokens_of_feeding_the_prompt_one_by_one(toy: Runtime) -> None:
    prompt = [(7 * i) % 290 + 1 for i in range(90)]
    session = toy.session()
    for token in prompt[:-1]:
        session.generate([token], max_new_tokens=1, drafter="none", ignore_eos=True)
        session.truncate(len(session.token_ids) - 1)
    one_by_one = session.generate(prompt[-1:], max_new_tokens=40, temperature=1.0, seed=5, drafter="none")
    assert one_by_one.token_ids == toy.generate(prompt, max_new_tokens=40, temperature=1.0, seed=5).token_ids


@pytest.mark.parametrize("index", [0, *(pytest.param(index, marks=pytest.mark.long) for index in (1, 2, 3))])
def test_reference_speculation_gives_the_tokens_of_plain_decoding(reference: Runtime, index: int) -> None:
    """Two held-out prompts each; many more in test_drafter_grid.py. Drafts are bit-exact on the CPU."""
    prompts = [reference.tokenizer.encode(text) for text in read_prompts(HELD_OUT)[2 * index : 2 * index + 2]]
    drafters = reference.manifest.drafters
    options = SAMPLINGS[index] | Options(max_new_tokens=64)
    checks = compare_drafters(
        reference.session(), prompts, [d.name for d in drafters], options, LOGIT_BOUND, exact=True
    )
    for check in checks.values():
        assert check.rounds < check.tokens, "no draft was ever accepted, so nothing was tested"
        assert check.partings == []


def test_a_tokenizer_that_opens_sequences_with_a_token_does_so_once(
    toy_recipe: Path, tmp_path: Path, toy: Runtime
) -> None:
    """As Llama's: what is appended later is not opened again, so a cut sequence equals an uncut one."""
    folder = shutil.copytree(toy_recipe.parent, tmp_path / "toy", ignore=shutil.ignore_patterns("*plan*"))
    path = str(folder / "target" / "tokenizer.json")
    tokenizer = LibraryTokenizer.from_file(path)
    tokenizer.post_processor = TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", 0)])
    tokenizer.save(path)
    build(load_recipe(folder / "model.yaml", ["drafters=[]"]), folder / "model.yaml", tmp_path / "plan")
    runtime = Runtime.load(tmp_path / "plan", threads=1)
    opened = [0, *toy.tokenizer.encode("import os")]
    session = runtime.session()
    first = session.generate("import os", max_new_tokens=4, ignore_eos=True).token_ids
    second = session.generate(max_new_tokens=4, ignore_eos=True).token_ids
    assert session.token_ids == [*opened, *first, *second]
    assert first + second == toy.generate(opened, max_new_tokens=8, ignore_eos=True).token_ids
    session.generate("\nx", max_new_tokens=1)
    assert session.token_ids[len(opened) + 8 : -1] == toy.tokenizer.encode("\nx")
