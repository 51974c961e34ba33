"""The same seed gives the same tokens, with any drafter, after any cut; and no step allocates an array."""

from __future__ import annotations

import shutil
import tracemalloc
from contextlib import closing
from pathlib import Path

import pytest
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers.processors import TemplateProcessing

from outrider import Runtime
from outrider.compiler.build import build
from outrider.compiler.held_out import read_prompts
from outrider.compiler.recipe import load_recipe
from outrider.plans.errors import RequestError
from outrider.plans.manifest import Buckets
from outrider.plans.plan import open_plan
from outrider.runtime.backends.onnxruntime_cpu import _Sized
from outrider.runtime.options.options import Options
from outrider.runtime.trace import RoundTrace
from outrider.tools.verify.agreement import compare_drafters
from outrider.tools.verify.verification import LOGIT_BOUND
from tests.conftest import HELD_OUT, PARTIAL_KV, TOY_DRAFTERS, BuildOnce, drafting_never_pays, forget_what_drafting_cost
from tests.plans.damage import edit

PROMPT = [(37 * i) % 299 + 1 for i in range(50)]  # several chunks
LONG = list(range(100, 1100))  # a view of over 1,000 keys: its mask alone is 4.6 kB, its logits 16 kB
SAMPLINGS = (
    Options(temperature=0.0),
    Options(temperature=0.7, top_p=0.9, seed=1),
    Options(temperature=1.3, top_k=40, seed=2**63 + 5, stream_id=2, filter_order="temperature_last"),
)


def test_what_a_drafter_knows_survives_cuts_and_other_drafters(toy: Runtime) -> None:
    """After a generation that was cut, a drafter accepts as much as if it had never been cut."""
    options = Options(max_new_tokens=30, ignore_eos=True, auto_disable=False)
    for drafter in ("chain", "bushy"):
        whole = toy.generate(PROMPT, drafter=drafter, auto_disable=False, max_new_tokens=60, ignore_eos=True)
        session = toy.session()
        pieces = [session.generate(PROMPT, drafter=drafter, **options), session.generate(drafter=drafter, **options)]
        accepted = sum(piece.stats.accepted for piece in pieces)
        assert accepted > 0
        assert abs(accepted - whole.stats.accepted) <= 4  # the cut itself costs at most a draft


@pytest.mark.parametrize("drafter", ["ngram", "chain", "head"])
def test_drafting_that_does_not_pay_is_disabled_and_tried_again(
    toy: Runtime, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or at once, with another sampling; a head that was disabled has no features computed again."""
    forget_what_drafting_cost(toy)
    drafting_never_pays(monkeypatch, 5)
    options = Options(ignore_eos=True, drafter=drafter, draft_tokens=1)  # rounds enough, whatever the memory knows
    sampled = Options(temperature=1.0, seed=4, **options)  # type: ignore[misc]
    plain = toy.generate([5, 6, 7] * 9, max_new_tokens=100, temperature=1.0, seed=4, ignore_eos=True, drafter="none")
    drafted = toy.session().generate([5, 6, 7] * 9, max_new_tokens=100, **sampled)
    assert drafted.token_ids == plain.token_ids
    assert 0 < drafted.stats.plain_rounds < drafted.stats.rounds
    assert drafted.stats.drafted > 0
    forget_what_drafting_cost(toy)
    drafting_never_pays(monkeypatch, 500)
    session = toy.session()
    session.generate([5, 6, 7], max_new_tokens=60, **sampled)
    disabled = session.generate([8, 9], max_new_tokens=20, **sampled).stats
    assert (disabled.plain_rounds, disabled.reused_tokens) == (disabled.rounds, 3 + 60 - 1)
    assert session.generate(max_new_tokens=20, **options).stats.drafted > 0


def test_rounds_can_be_watched(toy: Runtime) -> None:
    seen: list[RoundTrace] = []
    options = Options(max_new_tokens=40, ignore_eos=True, auto_disable=False)
    for drafter in ("ngram", "chain", "bushy", "none"):
        seen.clear()
        run = toy.generate(PROMPT, drafter=drafter, on_round=seen.append, **options)
        assert [token for round_ in seen for token in round_.committed] == run.token_ids
        assert [round_.position for round_ in seen][:1] == [len(PROMPT)]
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
    seen: list[RoundTrace] = []
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
    session = toy.session()
    options = {"drafter": "head", "ignore_eos": True, "auto_disable": False}
    session.generate(PROMPT, max_new_tokens=8, **options)
    assert session.generate(max_new_tokens=4, **options).stats.reused_tokens == 57
    session.generate(drafter="none", max_new_tokens=6, ignore_eos=True)
    again = session.generate(max_new_tokens=4, **options)
    assert 50 < again.stats.reused_tokens < 62  # plain steps left no features after them


@pytest.mark.parametrize(
    ("sampling", "count"),
    [(SAMPLINGS[0], 2), *(pytest.param(each, 120, marks=pytest.mark.long) for each in SAMPLINGS)],
    ids=str,
)
def test_reference_speculation_gives_the_tokens_of_plain_decoding(
    reference: Runtime, sampling: Options, count: int
) -> None:
    """On held-out prompts, each whole and cut in half. Drafts are bit-exact on the CPU."""
    encoded = [reference.tokenizer.encode(text) for text in read_prompts(HELD_OUT)]
    prompts = [ids[:length] for ids in encoded for length in (len(ids), len(ids) // 2)][:count]
    drafters = [drafter.name for drafter in reference.manifest.drafters]
    options = sampling | Options(max_new_tokens=64)
    for check in compare_drafters(reference.session(), prompts, drafters, options, LOGIT_BOUND, exact=True).values():
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


@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_after_warm_up_a_step_allocates_no_array(reference: Runtime, drafter: str) -> None:
    session = reference.session()
    stream = session.stream(LONG, max_new_tokens=40, drafter=drafter, ignore_eos=True)
    for _ in range(6):
        next(stream)
    tracemalloc.start()
    try:
        peaks = []
        for _ in range(6):
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            next(stream)
            peaks.append(tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()
        stream.close()
    assert sorted(peaks)[len(peaks) // 2] < 4096, peaks  # Python's own objects; any array of the step would be more


def test_buffers_never_move(toy: Runtime) -> None:
    session = toy.session()
    before = {name: array.ctypes.data for name, array in session.buffers.arrays.items()}
    session.generate(list(range(1, 60)), max_new_tokens=30)
    session.reset()
    session.generate(list(range(1, 20)), max_new_tokens=30, temperature=1.0, drafter="none")
    assert {name: array.ctypes.data for name, array in session.buffers.arrays.items()} == before


def test_plain_decoding_binds_again_only_where_the_view_grows(
    reference: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound, bind = list[str](), _Sized.bind
    stream = reference.session().stream(list(range(120)), max_new_tokens=60, drafter="none", ignore_eos=True)
    for _ in range(2):
        next(stream)
    monkeypatch.setattr(_Sized, "bind", lambda self, sizes: (bound.append(self._name), bind(self, sizes)))
    list(stream)
    assert bound == ["attn_bias"]  # once, where 128 keys become 256


def test_timing_a_round_leaves_the_sequence_as_it_is(toy: Runtime) -> None:
    session, options = toy.session(), Options(max_new_tokens=20, ignore_eos=True, drafter="none")
    expected = toy.generate([5, 6, 7], **options | Options(max_new_tokens=40)).token_ids
    with pytest.raises(RequestError, match="tokens, 0 of them with KV"):
        session.time_round([], "none")
    first = session.generate([5, 6, 7], **options).token_ids
    timed: list[tuple[list[int], str | None]] = [([], "none"), ([1, 2, 3], "ngram"), ([1, 2, 3], None), ([], None)]
    assert all(session.time_round(chain, drafter) > 0 for chain, drafter in timed)
    for chain, drafter, said in (
        ([1], "head", "engine of its own"), ([1], "other", "no drafter"), ([1] * 100, "ngram", "room for a chain of"),
    ):  # fmt: skip
        with pytest.raises(RequestError, match=said):
            session.time_round(chain, drafter)
    assert first + session.generate(**options).token_ids == expected


REPEATED = [(37 * i) % 299 + 1 for i in range(20)] * 2
NEW, VIEWS = (1, 4, 7, 12), (128, 256)


def with_buckets(plan: Path, out: Path, view: tuple[int, ...]) -> Runtime:
    """A copy with buckets for its target that no draft of n-grams has the size of."""
    buckets = Buckets(new=NEW, view=view).model_dump(mode="json")
    shutil.copytree(plan, out)
    edit(out, lambda manifest: manifest["backends"]["onnxruntime-cpu"].update(buckets={"target": buckets}))
    return Runtime.load(out, threads=1)


@pytest.fixture(scope="module")
def bucketed(toy_plan: Path, tmp_path_factory: pytest.TempPathFactory) -> Runtime:
    return with_buckets(toy_plan, tmp_path_factory.mktemp("buckets") / "plan", VIEWS)


@pytest.mark.parametrize("drafter", ["none", *TOY_DRAFTERS])
@pytest.mark.parametrize("sampling", [Options(temperature=0.0), Options(temperature=0.8, top_k=20, seed=7)], ids=str)
def test_buckets_change_no_token(bucketed: Runtime, toy: Runtime, drafter: str, sampling: Options) -> None:
    options = sampling | Options(max_new_tokens=150, ignore_eos=True, auto_disable=False, drafter=drafter)
    expected, found = toy.generate(REPEATED, **options), bucketed.generate(REPEATED, **options)
    assert found.token_ids == expected.token_ids
    assert found.finish_reason == expected.finish_reason
    if drafter not in ("none", "chain", "block"):  # on devices a chain keeps its length to the end
        assert (found.stats.drafted, found.stats.accepted) == (expected.stats.drafted, expected.stats.accepted)


def test_drafts_are_rounded_up_as_far_as_there_is_room(bucketed: Runtime) -> None:
    session = bucketed.session()
    step, seen = session.loop.target_step, list[tuple[int, int, int]]()
    options = Options(max_new_tokens=200, ignore_eos=True, auto_disable=False, drafter="ngram")
    with closing(session.stream(REPEATED, **options)) as stream:
        for _ in stream:
            seen.append((int(step.past_length[0]), 1 + step.drafted, step.new_tokens))
    _, *rounds = seen  # the first also computes the prompt
    for past, size, rounded in rounds:
        bucket = min(b for b in NEW if b >= size)
        assert rounded == (bucket if past + bucket <= session.loop.target_step.largest_view else size)
    assert {size for _, size, _ in rounds} > {1}
    assert any(size < rounded for _, size, rounded in rounds)


@pytest.mark.usefixtures("run_ahead")
def test_a_step_over_the_partial_cache_sees_no_more_than_that_has(built: BuildOnce, tmp_path: Path) -> None:
    """Views are rounded up far, to more keys than the partial cache has slots."""
    scaling = "target.rope_scaling={rope_type: yarn, factor: 3.0, original_max_position_embeddings: 256}"
    plan = open_plan(built("buckets", [f"partial_kv={PARTIAL_KV}", "capacity.context=600", "drafters=[]", scaling]))
    room = plan.manifest.backends["onnxruntime-cpu"].symbols["target"]["T"]
    options = Options(max_new_tokens=40, ignore_eos=True, partial_kv="lossless", auto_disable=False)
    expected = Runtime.load(plan.root, threads=1).generate(REPEATED, **options)

    found = with_buckets(plan.root, tmp_path / "plan", (room,)).generate(REPEATED, **options)
    assert found.token_ids == expected.token_ids
    assert found.stats.partial_rounds == expected.stats.partial_rounds > 0
