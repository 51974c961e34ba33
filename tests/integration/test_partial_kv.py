"""Partial KV: what the partial cache holds, what a pass over it computes, and that lossless mode changes no token."""

from __future__ import annotations

import logging
import threading
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from outrider import Runtime
from outrider.plans import names
from outrider.plans.errors import PlanError, RequestError
from outrider.plugins.ops.block_select import block_select
from outrider.plugins.ops.block_summary import block_summary
from outrider.plugins.ops.partial_kv_gather import partial_kv_gather
from outrider.runtime.options.options import Options
from outrider.runtime.options.request import resolve
from outrider.runtime.session import Session
from outrider.runtime.trace import RoundTrace
from tests.conftest import PARTIAL_KV, TOY_DRAFTERS, BuildOnce
from tests.integration.long_context import prompt

LAYOUT = {"block_size": 4, "sink_blocks": 1, "window_blocks": 2}
DRAFTERS = ["none", *TOY_DRAFTERS]


pytestmark = pytest.mark.usefixtures("run_ahead")


def whole(stats) -> bool:
    return stats.tentative == stats.retracted == 0


# What the KV cache holds, and what is computed over it.


def lossy_session(long: Runtime, length: int, new: int = 3, drafter: str = "none") -> tuple[Session, list[int]]:
    """A session whose last round ran over the partial KV cache."""
    session = long.session()
    found = session.generate(
        prompt(3, length), max_new_tokens=new, drafter=drafter, partial_kv="lossy", ignore_eos=True, auto_disable=False
    )
    assert found.stats.refreshes == 1
    assert found.stats.partial_rounds == found.stats.rounds - 1 > 0
    return session, found.token_ids


@pytest.mark.parametrize("length", [40, 43, 131])
def test_the_partial_cache_holds_what_the_references_choose(long: Runtime, length: int) -> None:
    session, _ = lossy_session(long, length)
    buffers = session.buffers
    kv, queries = buffers.array(names.TARGET, names.KV), buffers.array(names.TARGET, names.QUERIES)
    own = {
        name: buffers.array(names.PARTIAL, name) for name in (names.KEY_MAX, names.KEY_MIN, names.SELECTED, names.KV)
    }
    covered = int(buffers.array(names.PARTIAL, names.COVERED)[0])
    assert covered == length
    most, least = np.zeros_like(own[names.KEY_MAX]), np.zeros_like(own[names.KEY_MIN])
    windows = np.zeros(kv.shape[0] // 2, np.int64)
    tensors = own | {"kv": kv, "layer_windows": windows, "key_max": most, "key_min": least}
    tensors |= {"row": np.array([0]), "covered": np.array([covered]), "summarised": np.array([0])}
    block_summary(tensors, **LAYOUT)
    blocks = max(0, covered // 4 - 3)  # after those, the last sequence that had the buffers has left its own
    np.testing.assert_array_equal(own[names.KEY_MAX][..., :blocks], most[..., :blocks])
    np.testing.assert_array_equal(own[names.KEY_MIN][..., :blocks], least[..., :blocks])
    expected = np.zeros_like(own[names.KV])
    filled = partial_kv_gather(tensors | {"partial_kv": expected}, **LAYOUT)
    assert filled == min(covered, 4 + 12 + 8 + covered % 4)
    np.testing.assert_array_equal(own[names.KV][:, :, :, :filled], expected[:, :, :, :filled])
    # The blocks are the best by the queries of the pass that filled it: those of the prompt's last chunk.
    asked = replayed_queries(long, length)
    rows = np.arange(len(asked[0]))
    tensors |= {"queries": asked, "kept_indices": rows, "kept_count": np.array([len(rows)]), "budget": np.array([3])}
    chosen = block_select(tensors, **LAYOUT, reduction=0, most_queries=8)
    np.testing.assert_array_equal(own[names.SELECTED], chosen)
    assert queries.shape[0] == len(asked)


def replayed_queries(long: Runtime, length: int) -> np.ndarray:
    """Queries f32 `[layers, tokens, width]` of the prompt's last chunk, from a session of its own."""
    session = long.session()
    session.generate(prompt(3, length), max_new_tokens=1, drafter="none", partial_kv="off", ignore_eos=True)
    last = (length - 1) % 16 + 1
    return session.buffers.array(names.TARGET, names.QUERIES)[:, :last].copy()


@pytest.mark.parametrize("length", [57, 100])
def test_queries_are_those_of_transformers(long: Runtime, toy_recipe: Path, length: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(toy_recipe.parent / "target", dtype=torch.float32)
    seen = []
    hook = model.model.layers[1].self_attn.q_norm.register_forward_hook(lambda _, __, out: seen.append(out))
    with torch.no_grad():
        model(torch.tensor([prompt(3, length)]))
    hook.remove()
    cos, sin = model.model.rotary_emb(seen[0], torch.arange(length)[None])
    q = seen[0].transpose(1, 2)
    half = q.shape[-1] // 2
    rotated = q * cos[:, None] + torch.cat([-q[..., half:], q[..., :half]], -1) * sin[:, None]
    ours = replayed_queries(long, length)[1]
    theirs = rotated[0].transpose(0, 1).reshape(length, -1)[-len(ours) :].numpy()
    np.testing.assert_allclose(ours, theirs, atol=2e-5)  # as far as logits agree


@pytest.mark.parametrize("drafter", ["none", "chain"])
def test_a_pass_over_the_partial_cache_is_attention_over_what_it_holds(
    long: Runtime, toy_recipe: Path, drafter: str
) -> None:
    """Transformers, with the KV cache's rows as its cache, chooses the same tokens and sees the same logits."""
    length, new = 90, 4
    session, found = lossy_session(long, length, new, drafter)
    model = AutoModelForCausalLM.from_pretrained(toy_recipe.parent / "target", dtype=torch.float32)
    kv = torch.from_numpy(session.buffers.array(names.PARTIAL, names.KV)[:, 0])
    filled = 4 + 12 + 8 + length % 4
    cache = DynamicCache()
    for layer in range(model.config.num_hidden_layers):
        cache.update(kv[None, 2 * layer, :, :filled].clone(), kv[None, 2 * layer + 1, :, :filled].clone(), layer)
    token = found[0]
    for index in range(1, new):
        position = torch.tensor([[length + index - 1]])
        with torch.no_grad():
            logits = model(torch.tensor([[token]]), past_key_values=cache, position_ids=position).logits[0, -1]
        best = logits.topk(2)
        assert found[index] == int(best.indices[0]) or float(best.values[0] - best.values[1]) < 1e-4
        token = found[index]
    # The rows that steps have put into the buffer are those of the same tokens.
    for layer in range(model.config.num_hidden_layers):
        theirs = cache.layers[layer].keys[0, :, filled : filled + new - 1].numpy()
        ours = kv[2 * layer, :, filled : filled + theirs.shape[1]].numpy()
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


# Lossless: the same tokens as without.


def test_tentative_spans_come_before_what_is_confirmed(long: Runtime) -> None:
    tokens = prompt(1, 75)
    options = Options(max_new_tokens=60, logprobs=2, ignore_eos=True)
    plain = long.session().generate(tokens, partial_kv="off", **options)
    session, found, waiting, shown = long.session(), list[int](), list[int](), 0
    stream = session.stream(tokens, tentative=True, drafter="chain", **options)
    for span in stream:
        if span.tentative:
            waiting += span.token_ids
            shown += 1
            assert span.text == session.text_behind(waiting)  # as nothing is held back
            assert session.token_ids == tokens + found
            continue
        agreed = next(
            (i for i, (a, b) in enumerate(zip(waiting, span.token_ids, strict=False)) if a != b), len(waiting)
        )
        assert agreed >= min(len(waiting), len(span.token_ids) - 1)
        found, waiting = found + span.token_ids, []
    assert found == stream.result.token_ids == plain.token_ids
    ours, theirs = ([each.logprob for each in result.logprobs] for result in (stream.result, plain))
    assert ours == pytest.approx(theirs, abs=1e-5)
    assert shown == stream.result.stats.partial_rounds > 0
    assert not any(span.tentative for span in long.session().stream(tokens, max_new_tokens=40, drafter="chain"))


@pytest.mark.parametrize("mode", ["lossless", "lossy"])
@pytest.mark.parametrize("drafter", ["none", "ngram", "chain"])
def test_a_cache_that_was_never_filled_is_not_read(long: Runtime, drafter: str, mode: str) -> None:
    """A prompt of one token has no rows, as a KV cache that was never filled."""
    session = long.session()
    options = {"max_new_tokens": 10, "drafter": drafter, "ignore_eos": True, "auto_disable": False}
    for token in range(1, 6):
        session.reset()
        found = session.generate([token], partial_kv=mode, **options)  # type: ignore[arg-type]
        assert found.stats.partial_rounds == 0
        assert found.token_ids == long.session().generate([token], partial_kv="off", **options).token_ids  # type: ignore[arg-type]


# The other mode, and what does not go.


def test_lossy_mode_is_repeatable_and_is_in_the_statistics(long: Runtime) -> None:
    for drafter in ("chain", "ngram", "head"):
        options = {"max_new_tokens": 60, "drafter": drafter, "partial_kv": "lossy", "auto_disable": False}
        found = [long.session().generate(prompt(1, 75), **options) for _ in range(2)]  # type: ignore[misc]
        assert found[0].token_ids == found[1].token_ids
        assert found[0].stats.partial_mode == "lossy"
        assert found[0].stats.partial_rounds > 0
        assert whole(found[0].stats)


@pytest.mark.parametrize("mode", ["lossless", "lossy"])
@pytest.mark.parametrize("drafter", ["head", "chain", "mixed"])
def test_where_the_cache_breaks_full_kv_continues_with_one_warning(
    long: Runtime, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, drafter: str, mode: str
) -> None:
    """And drafters continue too."""
    tokens = prompt(1, 75)
    options = {"max_new_tokens": 60, "drafter": drafter, "ignore_eos": True, "auto_disable": False, "whole": True}
    expected = long.session().generate(tokens, partial_kv="off", **options)  # type: ignore[arg-type]

    def fail() -> None:
        raise PlanError("a stage fails")

    for filling in (True, False):
        caplog.clear()
        session = long.session()
        over = {names.partial(name) for name in session.programs} & set(session.programs)
        for program in [names.REFRESH] if filling else over:
            monkeypatch.setattr(session.programs[program], "run", fail)
        for _ in range(2):
            found = session.generate(tokens, partial_kv=mode, **options)  # type: ignore[arg-type]
            assert found.token_ids == expected.token_ids
            assert found.stats.drafted > 0.7 * expected.stats.drafted
        (warning,) = (each for each in caplog.records if each.levelno == logging.WARNING)
        assert "continues with full KV: a stage fails" in warning.getMessage()


@pytest.mark.parametrize(
    ("plan", "options", "said"),
    [
        ("long", {"partial_budget": 4}, r"partial_budget is .*; pass auto, or 1 to 3 blocks"),
        ("toy", {"partial_budget": 1}, " is 1, and the plan has no partial KV cache"),
        ("toy", {"tentative": True}, " is True, and the plan has no partial KV cache"),
        ("toy", {"partial_kv": "lossy"}, r"has no partial KV cache; build it with partial_kv\.enabled"),
        ("everything", {"partial_kv": "lossless", "drafter": "classical"}, "accepted by rejection"),
    ],
)
def test_what_cannot_be_asked_for(request: pytest.FixtureRequest, plan: str, options: Options, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        request.getfixturevalue(plan).generate("x", **options)


def test_budgets_change_what_is_retrieved_and_no_token(long: Runtime) -> None:
    tokens, session = prompt(8, 120), long.session()
    expected = long.generate(tokens, max_new_tokens=30, partial_kv="off", ignore_eos=True).token_ids
    for budget in (1, 2, 3, "auto", None):
        found = session.generate(
            tokens, whole=True, max_new_tokens=30, partial_budget=budget, drafter="chain", ignore_eos=True
        )
        assert found.token_ids == expected
        assert isinstance(budget, str) or found.stats.retrieved == (budget or 3)
        own = found.stats
        assert own.parted <= own.retracted <= own.tentative - own.agreed
        assert (own.agreement == 1) == (own.retracted == 0)


def test_the_plans_budget_is_that_of_requests_without_one(long: Runtime) -> None:
    for budget in (None, 2, "auto"):
        plans = long.manifest.partial_kv.model_copy(update={"budget": budget})  # type: ignore[union-attr]
        manifest = long.manifest.model_copy(update={"partial_kv": plans})
        assert resolve({}, manifest, long.grammars).partial_budget == budget
        assert resolve({"partial_budget": 1}, manifest, long.grammars).partial_budget == 1


def held_rows(session: Session, drafter: str) -> dict[int, np.ndarray]:
    """Rows of the drafter's KV cache by their numbers in the sequence."""
    kept = session.loop.drafting.engine_drafters[drafter].cache.window
    assert kept is not None
    kv = session.buffers.array(drafter, names.KV)[:, 0]
    gap = kept._front if kept._dropped else kept.slots.length
    return {slot + kept._dropped * (slot >= gap): kv[:, :, slot].copy() for slot in range(kept.slots.length)}


def unfinished(session: Session, tokens: list[int], how: str, drafter: str) -> int:
    """A lossless generation that ends while tokens wait; how many."""
    cancel, waiting = threading.Event(), 0
    stream = session.stream(tokens, max_new_tokens=60, tentative=True, drafter=drafter, ignore_eos=True, cancel=cancel)
    for span in stream:
        waiting = waiting + len(span.token_ids) if span.tentative else 0
        if waiting > 1:  # their rows are in the partial KV cache
            if how == "close":
                stream.close()
            else:
                cancel.set()
            break
    for _ in stream:
        pass
    return waiting


@pytest.mark.parametrize("how", ["close", "cancel"])
@pytest.mark.parametrize("drafter", ["none", "chain", "head", "mixed", "ngram"])
def test_what_waited_is_in_no_cache_afterwards(long: Runtime, how: str, drafter: str) -> None:
    session = long.session()
    waiting = unfinished(session, prompt(1, 75), how, drafter)
    assert waiting
    so_far, fresh = session.token_ids, prompt(9, waiting)
    options = {"max_new_tokens": 12, "drafter": "none", "ignore_eos": True}
    found = session.generate(fresh, partial_kv="lossy", **options)  # type: ignore[arg-type]
    expected = long.session().generate([*so_far, *fresh], partial_kv="off", **options)  # type: ignore[arg-type]
    assert found.token_ids[0] == expected.token_ids[0]  # by a pass over all that there is, the prompt too
    assert found.stats.refreshes > 0


@pytest.mark.parametrize("drafter", ["chain", "head", "bushy"])
def test_rows_of_drafters_are_those_of_a_session_without_tentative_tokens(long: Runtime, drafter: str) -> None:
    lossless, full = long.session(), long.session()
    ran = 0
    for turn in range(3):
        tokens = prompt(turn, 30)
        options = {"max_new_tokens": 14, "drafter": drafter, "ignore_eos": True, "auto_disable": False}
        for session, mode in ((lossless, "lossless"), (full, "off")):
            ran += session.generate(tokens, partial_kv=mode, **options).stats.partial_rounds  # type: ignore[arg-type]
    assert ran > 3
    ours, theirs = held_rows(lossless, drafter), held_rows(full, drafter)
    both = sorted(set(ours) & set(theirs))
    assert len(both) > 15
    for number in both[:-1]:
        np.testing.assert_array_equal(ours[number], theirs[number], err_msg=str(number))


def test_a_drafter_reads_no_more_of_a_long_prompt_than_it_keeps(long: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    session, runs = long.session(), list[int]()
    program = session.programs[names.extend("chain")]
    run = program.run
    monkeypatch.setattr(program, "run", lambda: (runs.append(1), run())[1])
    session.generate(prompt(2, 140), max_new_tokens=8, drafter="chain", ignore_eos=True)
    assert 1 <= len(runs) <= 3  # chunks of 16: the sink's, and what the window of 20 lacks; the whole prompt has nine


LENGTHS = (75, 40, 60, 20)  # the last one's context grows until partial KV pays


def asked(seed: int, length: int, drafter: str = "none") -> Options:
    return Options(
        drafter=drafter, temperature=0.9 * (seed % 2), seed=seed, max_new_tokens=150 - length, ignore_eos=True,
        auto_disable=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def expected(everything: Runtime) -> list[list[int]]:
    """Tokens of the target alone, over the full cache."""
    return [
        everything.generate(prompt(seed, length), partial_kv="off", **asked(seed, length)).token_ids
        for seed, length in enumerate(LENGTHS)
    ]


def test_requests_with_and_without_partial_kv_and_every_drafter_share_passes(
    serving: Runtime, expected: list[list[int]]
) -> None:
    for shift in range(3):
        requests = []
        for seed, length in enumerate(LENGTHS):
            drafter = ["none", *TOY_DRAFTERS][(2 * seed + shift) % (1 + len(TOY_DRAFTERS))]
            mode = "off" if (seed + shift) % 4 == 0 else "lossless"
            requests.append((prompt(seed, length), Options(partial_kv=mode, **asked(seed, length, drafter))))  # type: ignore[misc, typeddict-item]
        found = [handle.result() for handle in serving.submit_all(requests)]
        assert [each.token_ids for each in found] == expected
        for own, (_, options) in zip((each.stats for each in found), requests, strict=True):
            assert (own.partial_rounds > own.refreshes > 0) == (options["partial_kv"] == "lossless")


@pytest.fixture(scope="module")
def one_row(built: BuildOnce) -> Runtime:
    """A plan whose three branches share the one row that it has."""
    capacity = "capacity={context: 160, prefill_chunk: 16, branches: 3}"
    return Runtime.load(built("one-row", [f"partial_kv={PARTIAL_KV}", capacity]), threads=1)


@pytest.mark.parametrize("drafter", ["none", "chain", "head", "ngram"])
def test_a_sequence_that_shares_its_row_reads_the_partial_cache_while_it_is_alone(
    one_row: Runtime, drafter: str
) -> None:
    """Others come while its tokens wait to be confirmed, and leave again; no sequence has other tokens than alone."""
    shared, options = prompt(3, 60), asked(1, 90, drafter) | {"presence_penalty": 1.0}
    own = [([7], 60, 0), ([8, 9], 4, 12), ([10], 3, 13)]  # tokens, how many follow, and in which round they come
    branches = []
    for tokens, new, first in own:
        rounds = count()
        later = lambda *_, tokens=tokens, first=first, rounds=rounds: tokens if next(rounds) >= first else None  # noqa: E731
        branches.append({"prompt": later, **options, "partial_kv": "lossless", "max_new_tokens": new, "stream_id": 0})
    found = one_row.generate_branches(shared, branches)
    for (tokens, new, _), each in zip(own, found, strict=True):
        alone = options | {"partial_kv": "off", "drafter": "none", "max_new_tokens": new}
        assert each.token_ids == one_row.generate(shared + tokens, **alone).token_ids  # type: ignore[arg-type]
    long, *others = (each.stats for each in found)
    assert long.partial_rounds > long.refreshes > 1
    assert all(each.partial_rounds == 0 for each in others)


def test_lossy_rows_read_their_own_partial_caches(everything: Runtime) -> None:
    """A lossy row has the tokens that it has alone where its prompt is fed in the same chunks: without drafts, and with
    both asked for at once, so that the second prompt goes in before the first row's next full pass."""
    lengths = (64, 48)
    options = Options(max_new_tokens=50, drafter="none", ignore_eos=True)
    alone = [everything.generate(prompt(8, length), partial_kv="lossy", **options) for length in lengths]
    full = [everything.generate(prompt(8, length), partial_kv="off", **options).token_ids for length in lengths]
    lossy = Options(partial_kv="lossy", **options)  # type: ignore[misc]
    found = everything.submit_all([(prompt(8, length), lossy) for length in lengths])
    for handle, one, whole in zip(found, alone, full, strict=True):
        result = handle.result()
        assert result.stats.partial_rounds > result.stats.refreshes > 0
        assert result.token_ids == one.token_ids != whole


def test_kv_accepted_after_an_end_token_is_in_no_partial_cache(everything: Runtime) -> None:
    rounds: list[RoundTrace] = []
    options = Options(drafter="bushy", partial_kv="lossy", auto_disable=False)
    start = [*range(5, 13)] * 6
    everything.session().generate(start, max_new_tokens=60, ignore_eos=True, on_round=rounds.append, **options)
    before, ends = set[int](), list[int]()
    for each in rounds:
        ends += [token for token in each.committed[:-1] if token not in before]
        before |= set(each.committed)
    for end in ends[:3]:
        sessions = everything.session(), everything.session()
        for session in sessions:
            session.generate(start, max_new_tokens=60, eos_token_ids=[end], **options)
        sessions[1].truncate(len(sessions[1].token_ids))
        found = [session.generate([40], max_new_tokens=20, ignore_eos=True, **options) for session in sessions]
        assert found[0].token_ids == found[1].token_ids
