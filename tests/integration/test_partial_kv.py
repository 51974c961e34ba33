"""Partial KV: what the partial cache holds, what a pass over it computes, and that lossless mode changes no token."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, DynamicCache

from outrider import PrefixCacheConfig, Runtime
from outrider.plans import names
from outrider.plans.errors import PlanError, RequestError
from outrider.plugins.reference import block_select, block_summary, partial_kv_gather
from outrider.runtime.session import Session
from tests.conftest import TOY_DRAFTERS
from tests.integration.long_context import prompt

LAYOUT = {"block_size": 4, "sink_blocks": 1, "window_blocks": 2}
DRAFTERS = ["none", *TOY_DRAFTERS]
SEVERAL = settings(suppress_health_check=[HealthCheck.too_slow])


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


@pytest.mark.parametrize("length", [40, 41, 43, 90, 131])
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
    block_summary(kv, windows, 0, covered, 0, most, least, **LAYOUT)
    blocks = max(0, covered // 4 - 3)  # after those, the last sequence that had the buffers has left its own
    np.testing.assert_array_equal(own[names.KEY_MAX][..., :blocks], most[..., :blocks])
    np.testing.assert_array_equal(own[names.KEY_MIN][..., :blocks], least[..., :blocks])
    expected = np.zeros_like(own[names.KV])
    filled = partial_kv_gather(kv, 0, covered, own[names.SELECTED], expected, **LAYOUT)
    assert filled == min(covered, 4 + 12 + 8 + covered % 4)
    np.testing.assert_array_equal(own[names.KV][:, :, :, :filled], expected[:, :, :, :filled])
    # The blocks are the best by the queries of the pass that filled it: those of the prompt's last chunk.
    asked = replayed_queries(long, length)
    rows = np.arange(len(asked[0]))
    chosen = block_select(asked, rows, most, least, windows, 0, covered, 3, 3, **LAYOUT, reduction=0, most_queries=8)
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


def pair(long: Runtime, tokens: list[int], **options: object):
    """The same generation with the full KV cache alone, and losslessly."""
    return [long.session().generate(tokens, partial_kv=mode, **options) for mode in ("off", "lossless")]  # type: ignore[arg-type]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_lossless_mode_changes_no_token(long: Runtime, drafter: str) -> None:
    ran = tentative = 0
    for seed, temperature, length in ((0, 0.0, 40), (1, 0.0, 75), (2, 0.9, 31), (3, 1.3, 60), (4, 0.5, 20)):
        options = {"drafter": drafter, "temperature": temperature, "seed": seed, "max_new_tokens": 70, "logprobs": 2}
        plain, found = pair(long, prompt(seed, length), **options)
        assert found.token_ids == plain.token_ids
        assert found.text == plain.text
        assert found.finish_reason == plain.finish_reason
        assert [p.logprob for p in found.logprobs] == pytest.approx([p.logprob for p in plain.logprobs], abs=1e-5)
        assert found.stats.partial_mode == "lossless"
        assert 0 <= found.stats.retracted <= found.stats.tentative
        ran += found.stats.partial_rounds
        tentative += found.stats.tentative - found.stats.retracted
        assert whole(plain.stats)
    assert ran > 20  # and it was in force
    assert tentative > 20


@SEVERAL
@given(data=st.data())
def test_lossless_sessions_are_those_of_full_kv(long: Runtime, data: st.DataObject) -> None:
    """Turns, cuts, limits, end tokens, stop strings, cancellations, budgets, other drafters and modes in between."""
    lossless, full = long.session(), long.session()
    for turn in range(data.draw(st.integers(1, 4))):
        if turn:
            length = data.draw(st.integers(0, len(full.token_ids)))
            for session in (lossless, full):
                session.truncate(length)
        fresh = prompt(data.draw(st.integers(0, 9)), data.draw(st.integers(1, 60)))
        room = 159 - len(full.token_ids) - len(fresh)
        if room < 1:
            return
        options = {
            "max_new_tokens": data.draw(st.integers(1, max(1, min(60, room)))),
            "temperature": data.draw(st.sampled_from([0.0, 0.8])),
            "seed": data.draw(st.integers(0, 3)),
            "drafter": data.draw(st.sampled_from(DRAFTERS)),
            "eos_token_ids": data.draw(st.sampled_from([[0], list(range(0, 300, 23)), []])),
            "stop": data.draw(st.sampled_from([[], ["e"], [" the"]])),
            "auto_disable": data.draw(st.booleans()),
            "partial_budget": data.draw(st.sampled_from([None, 1, 2, "auto"])),
            "tentative": data.draw(st.booleans()),
        }
        if data.draw(st.integers(0, 4)) == 0:  # a lossy turn leaves tokens of its own
            lossless.generate(fresh, partial_kv="lossy", **options)  # type: ignore[arg-type]
            full.generate(lossless.token_ids[:159], whole=True, max_new_tokens=1, partial_kv="off", ignore_eos=True)
            for session in (lossless, full):
                session.truncate(min(len(lossless.token_ids), len(full.token_ids)) - 1)
            continue
        mode = data.draw(st.sampled_from(["lossless", "lossless", "off"]))
        spans = data.draw(st.integers(1, 30))
        found, expected = [], []
        for session, tokens, kind in ((lossless, found, mode), (full, expected, "off")):
            for span in session.stream(fresh, partial_kv=kind, **options):  # type: ignore[arg-type]
                tokens += [] if span.tentative else span.token_ids
                if len(tokens) >= spans:
                    break
        least = min(len(found), len(expected))
        assert found[:least] == expected[:least]
        together = min(len(lossless.token_ids), len(full.token_ids))
        assert lossless.token_ids[:together] == full.token_ids[:together]
        for session in (lossless, full):
            session.truncate(together)


def test_a_limit_and_the_contexts_end_are_where_they_are_alone(long: Runtime) -> None:
    for tokens, limit in ((prompt(1, 60), 17), (prompt(2, 100), 400)):
        plain, found = pair(long, tokens, drafter="chain", max_new_tokens=limit, ignore_eos=True)
        assert found.token_ids == plain.token_ids
        assert len(found.token_ids) == min(limit, 160 - len(tokens))


def test_cancelling_leaves_a_session_that_goes_on_as_if_it_had_not_been(long: Runtime) -> None:
    tokens, session = prompt(5, 60), long.session()
    expected = long.session().generate(tokens, max_new_tokens=60, partial_kv="off", ignore_eos=True).token_ids
    found: list[int] = []
    for index in range(60):
        cancel = threading.Event()
        stream = session.stream(
            [] if index else tokens, cancel=cancel, max_new_tokens=60, drafter="chain", ignore_eos=True
        )
        for number, span in enumerate(stream):
            found += span.token_ids
            if number == index % 3:
                cancel.set()
        if len(found) >= len(expected):
            break
    assert found[: len(expected)] == expected
    assert session.token_ids == tokens + found


def test_tentative_spans_come_before_what_is_confirmed(long: Runtime) -> None:
    tokens = prompt(1, 75)
    plain = long.session().generate(tokens, max_new_tokens=60, partial_kv="off", ignore_eos=True)
    session, found, waiting, shown = long.session(), list[int](), list[int](), 0
    stream = session.stream(tokens, max_new_tokens=60, tentative=True, drafter="chain", ignore_eos=True)
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
    assert shown == stream.result.stats.partial_rounds > 0
    assert not any(span.tentative for span in long.session().stream(tokens, max_new_tokens=40, drafter="chain"))


@pytest.mark.parametrize("mode", ["lossless", "lossy"])
@pytest.mark.parametrize("drafter", ["none", "ngram", "chain"])
def test_a_cache_that_was_never_filled_serves_nobody(long: Runtime, drafter: str, mode: str) -> None:
    """A prompt of one token has no rows: as few as a KV cache that stands for nothing."""
    session = long.session()
    options = {"max_new_tokens": 10, "drafter": drafter, "ignore_eos": True, "auto_disable": False}
    for token in range(1, 6):
        session.reset()
        found = session.generate([token], partial_kv=mode, **options)  # type: ignore[arg-type]
        assert found.stats.partial_rounds == 0
        assert found.token_ids == long.session().generate([token], partial_kv="off", **options).token_ids  # type: ignore[arg-type]


def test_a_resting_drafter_does_not_keep_a_session_from_running_ahead(
    long: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # what is ahead is up to the policy
    monkeypatch.setattr("outrider.runtime.kv.partial_policy.Interval._tokens_per_ms", lambda _, length: 1e9 * length)
    monkeypatch.setattr("outrider.runtime.drafters.adaptive.AdaptiveSpeculation.disabled", True)
    monkeypatch.setattr("outrider.runtime.drafters.adaptive.AdaptiveSpeculation.drafting", False)
    stats = long.session().generate(prompt(1, 60), max_new_tokens=60, drafter="chain", ignore_eos=True).stats
    assert stats.partial_rounds > 10


# The other mode, and what does not go.


def test_lossy_mode_is_repeatable_and_says_so(long: Runtime) -> None:
    for drafter in ("chain", "ngram", "head"):
        options = {"max_new_tokens": 60, "drafter": drafter, "partial_kv": "lossy", "auto_disable": False}
        found = [long.session().generate(prompt(1, 75), **options) for _ in range(2)]  # type: ignore[misc]
        assert found[0].token_ids == found[1].token_ids
        assert found[0].stats.partial_mode == "lossy"
        assert found[0].stats.partial_rounds > 0
        assert whole(found[0].stats)


def test_the_prefix_cache_serves_lossless_sessions(long_plan: Path) -> None:
    runtime = Runtime.load(long_plan, threads=1, prefix_cache=PrefixCacheConfig())
    tokens = prompt(6, 90)
    expected = runtime.session().generate(tokens, max_new_tokens=50, partial_kv="off", ignore_eos=True).token_ids
    for drafter in ("head", "chain", "ngram", "none", "head"):
        found = runtime.session().generate(tokens, max_new_tokens=50, drafter=drafter, ignore_eos=True)
        assert found.token_ids == expected
        assert found.stats.cached_tokens > 60
        assert found.stats.partial_rounds > 0


def test_what_a_prefix_cache_keeps_are_no_copies(long_plan: Path) -> None:
    runtime = Runtime.load(long_plan, threads=1, prefix_cache=PrefixCacheConfig())
    assert runtime.prefix_cache is not None
    assert set(runtime.prefix_cache.shapes) == {names.TARGET, "head", "block", "chain", "bushy", "sure"}


@pytest.mark.parametrize("mode", ["lossless", "lossy"])
def test_a_broken_cache_is_said_once_and_full_kv_goes_on(
    long: Runtime, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    tokens = prompt(1, 75)
    expected = long.session().generate(tokens, max_new_tokens=40, partial_kv="off", ignore_eos=True).token_ids
    for program in (names.REFRESH, names.partial(names.speculate("chain"))):
        caplog.clear()
        session = long.session()

        def fail() -> None:
            raise PlanError("a stage fails")

        monkeypatch.setattr(session.programs[program], "run", fail)
        with caplog.at_level(logging.WARNING, logger="outrider"):
            for _ in range(2):
                options = {"max_new_tokens": 40, "drafter": "chain", "ignore_eos": True, "auto_disable": False}
                found = session.generate(tokens, whole=True, partial_kv=mode, **options)  # type: ignore[arg-type]
                assert found.token_ids == expected
        assert len(caplog.records) == 1
        assert "continues with full KV: a stage fails" in caplog.text


@pytest.mark.parametrize("mode", ["lossless", "lossy"])
@pytest.mark.parametrize("drafter", ["head", "chain", "mixed"])
def test_drafters_go_on_where_the_cache_breaks(
    long: Runtime, monkeypatch: pytest.MonkeyPatch, drafter: str, mode: str
) -> None:
    tokens, session = prompt(1, 75), long.session()
    options = {"max_new_tokens": 60, "drafter": drafter, "ignore_eos": True, "auto_disable": False}
    expected = long.session().generate(tokens, partial_kv="off", **options)  # type: ignore[arg-type]

    def fail() -> None:
        raise PlanError("a stage fails")

    for program in {names.partial(name) for name in session.programs} & set(session.programs):
        monkeypatch.setattr(session.programs[program], "run", fail)
    found = session.generate(tokens, partial_kv=mode, **options)  # type: ignore[arg-type]
    assert found.token_ids == expected.token_ids
    assert found.stats.drafted > 0.7 * expected.stats.drafted


def test_what_cannot_be_asked_for(long: Runtime, toy: Runtime) -> None:
    with pytest.raises(RequestError, match=r"partial_budget is .*; pass auto, or 1 to 3 blocks"):
        long.generate("x", partial_budget=4)
    for option in ({"partial_budget": 1}, {"tentative": True}):
        with pytest.raises(RequestError, match=r" is (1|True), and the plan has no partial KV cache"):
            toy.generate("x", **option)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"has no partial KV cache; build it with partial_kv\.enabled"):
        toy.generate("x", partial_kv="lossy")
    assert toy.generate("x", partial_kv="off", max_new_tokens=2).stats.partial_mode == "off"
