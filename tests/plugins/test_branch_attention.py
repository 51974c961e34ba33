"""The reference of BranchAttention: it appends, groups query heads, and keeps rows apart."""

import numpy as np
import pytest

from outrider.plugins.reference import branch_attention

HEADS, KV_HEADS, DIM, CAPACITY, VIEW = 4, 2, 8, 24, 16
PAST, NEW = np.array([5, 0, 9]), np.array([3, 1, 4])
SCALE = 0.37


@pytest.fixture
def batch():
    rng = np.random.default_rng(0)
    total, rows = int(NEW.sum()), len(NEW)
    q = rng.normal(size=(1, total, HEADS * DIM)).astype(np.float32)
    k, v = rng.normal(size=(2, 1, total, KV_HEADS * DIM)).astype(np.float32)
    k_cache, v_cache = rng.normal(size=(2, rows, KV_HEADS, CAPACITY, DIM)).astype(np.float32)
    visible = rng.random((rows, 1, int(NEW.max()), VIEW)) < 0.6
    visible[..., 0] = True
    bias = np.where(visible, np.float32(0), np.finfo(np.float32).min)
    return q, k, v, k_cache, v_cache, bias


def attend(q, k, v, k_cache, v_cache, bias, past=PAST, new=NEW, sinks=None, softcap=0.0):
    splits = np.concatenate([[0], np.cumsum(new)])
    return branch_attention(
        q, k, v, k_cache, v_cache, bias, past, splits, sinks,
        num_heads=HEADS, kv_num_heads=KV_HEADS, scale=SCALE, softcap=softcap,
    )  # fmt: skip


def test_new_keys_and_values_are_appended_and_nothing_else_changes(batch):
    _, k, v, k_cache, v_cache, _ = batch
    _, k_out, v_out = attend(*batch)
    token = 0
    for row, (past, new) in enumerate(zip(PAST, NEW, strict=True)):
        for i in range(new):
            for out, cache, fresh in ((k_out, k_cache, k), (v_out, v_cache, v)):
                np.testing.assert_array_equal(out[row, :, past + i].ravel(), fresh[0, token])
                cache[row, :, past + i] = out[row, :, past + i]
            token += 1
    np.testing.assert_array_equal(k_out, k_cache)
    np.testing.assert_array_equal(v_out, v_cache)


def test_each_token_is_the_softmax_over_the_keys_that_it_sees(batch):
    q, _, _, _, _, bias = batch
    out, k_out, v_out = attend(*batch)
    row, place = 2, 1
    token = int(NEW[:row].sum()) + place
    for head in range(HEADS):
        seen = np.flatnonzero(bias[row, 0, place] == 0)
        query = q[0, token, head * DIM : (head + 1) * DIM]
        weights = np.exp([SCALE * float(query @ k_out[row, head // 2, j]) for j in seen])
        expected = sum(w * v_out[row, head // 2, j] for w, j in zip(weights, seen, strict=True)) / weights.sum()
        np.testing.assert_allclose(out[0, token, head * DIM : (head + 1) * DIM], expected, rtol=1e-4, atol=1e-6)


def test_a_row_is_the_same_alone_as_among_others(batch):
    q, k, v, k_cache, v_cache, bias = batch
    together = attend(*batch)[0]
    first = 0
    for row, new in enumerate(NEW.tolist()):
        tokens, rows = slice(first, first + new), slice(row, row + 1)
        alone = attend(
            q[:, tokens], k[:, tokens], v[:, tokens], k_cache[rows], v_cache[rows], bias[rows], PAST[rows], NEW[rows]
        )[0]
        np.testing.assert_array_equal(alone, together[:, tokens])
        first += new


def test_scores_are_capped_before_the_bias_hides_keys_and_a_sink_takes_its_share(batch):
    q, _, _, _, _, bias = batch
    softcap, sinks = 0.8, np.array([-1.0, 0.0, 0.5, 2.0], np.float32)
    out, k_out, v_out = attend(*batch, sinks=sinks, softcap=softcap)
    row, place = 2, 1
    token = int(NEW[:row].sum()) + place
    for head in range(HEADS):
        seen = np.flatnonzero(bias[row, 0, place] == 0)
        query = q[0, token, head * DIM : (head + 1) * DIM]
        scores = [SCALE * float(query @ k_out[row, head // 2, j]) for j in seen]
        weights = np.exp([softcap * np.tanh(score / softcap) for score in scores])
        total = weights.sum() + np.exp(sinks[head])
        expected = sum(w * v_out[row, head // 2, j] for w, j in zip(weights, seen, strict=True)) / total
        np.testing.assert_allclose(out[0, token, head * DIM : (head + 1) * DIM], expected, rtol=1e-4, atol=1e-6)
